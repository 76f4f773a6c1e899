// Compares the functions of lock.js with docs/lock-format/vectors.json:
//   node vectors.js vectors.json      prints the number of vectors, or ends with the first that differs
const assert = require('assert'), fs = require('fs'), lock = require('./lock.js');
const all = JSON.parse(fs.readFileSync(process.argv[2], 'utf8')), range = (n) => Array.from({ length: n }, (_, i) => i);
const keyOf = (text) => lock.keyOf(...text.split('/').slice(1)), word = (x) => x.toString(16).padStart(16, '0');
const shuffled = (seed, n) => { // twice, with one stream
  const both = lock.shuffler(seed)([...range(n), ...range(n)], n); return { first: both.slice(0, n), second: both.slice(n) };
};
const keysOf = (fingerprints) => fingerprints.map((text) => ({ key: [text.slice(0, 16), text.slice(16)].map((half) => BigInt(`0x${half}`)) }));
const FUNCTIONS = {
  'canonical JSON': ({ value }) => ({ text: lock.canonical(value), sha256: lock.sha256(lock.canonical(value)) }),
  key({ text, words }) {
    const [high, low] = lock.hash(Buffer.from(text)), { word: of } = keyOf(text);
    return { hash: lock.hex(high << 64n | low), words: words.map((_, i) => word(of(i))) };
  },
  perm: ({ key, n, values }) => ({ values: values.map((_, i) => lock.permutation(keyOf(key), n)(i)) }),
  shuffle: ({ seed, n }) => shuffled(seed, n),
  rank_perm: ({ key, length, n, values }) => ({ values: values.map((_, r) => lock.rankPermutation(keyOf(key), length, n)(r)) }),
  pack({ lengths, capacity, most, least, stacked }) {
    return { bins: lock.pack(range(capacity + 1).map((l) => lengths.filter((each) => each === l).length), most, least, stacked) };
  },
  draws({ draws, rows, streams, ordinals }) {
    const draw = lock.MIXING[draws.rule](draws, () => rows), drawn = streams.map((_, p) => draw(p));
    return { streams: drawn.map(([q]) => q), ...(ordinals && { ordinals: drawn.map(([, j]) => j) }) };
  },
  balance({ work, D, M, batches }) {
    const micro = lock.dealt([0, work.length, batches.flat(2).length], D, M, (i) => work[i]);
    const padded = micro.map((rows) => [...rows, ...range(M - rows.length).map(() => -1)]);
    return { batches: batches.map((_, round) => padded.slice(round * D, (round + 1) * D)) };
  },
  receipt({ fingerprints, positions, spans }) {
    const sum = positions.reduce((a, p, i) => a + lock.receiptOf(p, spans[i], keysOf(fingerprints)), 0n);
    return { receipt: lock.hex(BigInt.asUintN(128, sum)) };
  },
};
assert.deepStrictEqual(Object.keys(all).sort(), Object.keys(FUNCTIONS).sort());
for (const [name, vectors] of Object.entries(all)) {
  for (const given of vectors) for (const [field, found] of Object.entries(FUNCTIONS[name](given))) assert.deepStrictEqual(found, given[field], name);
}
console.log(Object.values(all).flat().length);
