// The samples of a run from its run.lock and .idx files, written from docs/lock-format.md alone.
//   node lock.js run.lock SUBSET rows D M [balance]     of D ranks, micro batches of M: reads lines "step rank row",
//       prints "position source:document:offset:length ..." (no span if skipped), or "padding"
//   node lock.js run.lock SUBSET receipts FIRST END     receipts of blocks FIRST to END - 1
//   node lock.js run.lock identity                      the identity, and the content identity
//   node lock.js verify run.lock [LENGTHS]              compares all receipts; exit status 1 if one differs
const { createHash } = require('crypto'), fs = require('fs'), path = require('path');
const LOW = 0xffffffffn, u64 = (x) => BigInt.asUintN(64, x), total = (values) => values.reduce((a, b) => a + b);
const range = (n, value = (i) => i) => Array.from({ length: n }, (_, i) => value(i));
const swap = (list, i, j) => { [list[i], list[j]] = [list[j], list[i]]; };
const memo = (make, kept = new Map()) => (x) => (kept.has(x) ? kept : kept.set(x, make(x))).get(x);
const merged = (list, join) => list.reduce((kept, each) => { // joins each to the one before it, unless join is false
  const both = kept.length > 0 && join(kept.at(-1), each); return both ? [...kept.slice(0, -1), both] : [...kept, each];
}, []);
// ---- XXH3-128 of 17 bytes or more ------------------------------------------------------------------------
const SECRET = Buffer.from('uP5sOSOkS758AYEs9yGtHN7UbemDkJfbckCkpLezZx/LeeZOzMDleIJa0H3M/3IhuAhGdPdDJI7gNZDmgTomTDwoUruRwwDLiNBlixtTLqNxZEiXog35' +
  'TjgZ70ap3qzYqPp2P+OcND/53LvHxwtPHYpR4EvNtFkxyJ9+ydl4c2TqxayDNNPrw8WBoP/6E2PrFw3dUbfw2knTFlUmKdRonisWvlh9R6H8j/i40XrQMc5FyzqPlRYEKK/X+8q7S0B+', 'base64');
const [A1, A2, A3, B1, B2, B3, B4, B5] = [0x9E3779B1n, 0x85EBCA77n, 0xC2B2AE3Dn, 0x9E3779B185EBCA87n,
  0xC2B2AE3D27D4EB4Fn, 0x165667B19E3779F9n, 0x85EBCA77C2B2AE63n, 0x27D4EB2F165667C5n];
const secret = (at) => SECRET.readBigUInt64LE(at), fold = (a, b) => u64(a * b) ^ (a * b >> 64n), end32 = (h) => h ^ h >> 32n;
const avalanche = (h) => end32(u64((h ^ h >> 37n) * 0x165667919E3779F9n));
function hash(data) { // returns [high, low]
  const length = data.length, n = BigInt(length), at = (k) => data.readBigUInt64LE(k);
  if (length <= 240) {
    let low = u64(n * B1), high = 0n;
    const mix = (a, b, s) => {
      low = u64(low + fold(at(a) ^ secret(s), at(a + 8) ^ secret(s + 8))) ^ u64(at(b) + at(b + 8));
      high = u64(high + fold(at(b) ^ secret(s + 16), at(b + 8) ^ secret(s + 24))) ^ u64(at(a) + at(a + 8));
    };
    if (length <= 128) for (let k = length - 1 >> 5; k >= 0; k--) mix(16 * k, length - 16 * (k + 1), 32 * k);
    else {
      for (let i = 0; i < 128; i += 32) mix(i, i + 16, i); [low, high] = [avalanche(low), avalanche(high)];
      for (let i = 128; i + 32 <= length; i += 32) mix(i, i + 16, i - 125); mix(length - 16, length - 32, 103);
    }
    return [u64(-avalanche(u64(low * B1 + high * B4 + n * B2))), avalanche(u64(low + high))];
  }
  const sums = [A3, B1, B2, B3, B4, A2, B5, A1];
  const add = (begin, s) => range(8).forEach((i) => {
    const value = at(begin + 8 * i), keyed = value ^ secret(s + 8 * i);
    sums[i ^ 1] = u64(sums[i ^ 1] + value); sums[i] = u64(sums[i] + (keyed & LOW) * (keyed >> 32n));
  });
  for (let stripe = 0; stripe < Math.floor((length - 1) / 64); stripe++) { add(64 * stripe, 8 * (stripe % 16));
    if (stripe % 16 === 15) sums.forEach((x, i) => { sums[i] = u64((x ^ x >> 47n ^ secret(128 + 8 * i)) * A1); });
  }
  add(length - 64, 121);
  const digest = (start, s) => avalanche(u64(range(4).reduce((sum, i) => sum +
    fold(sums[2 * i] ^ secret(s + 16 * i), sums[2 * i + 1] ^ secret(s + 16 * i + 8)), start)));
  return [digest(~(n * B2), 117), digest(n * B1, 11)];
}
const hex = (x) => x.toString(16).padStart(32, '0');
// ---- keys and permutations -------------------------------------------------------------------------------
const finish = (x, [s, m, t, k, u], y = u64((x ^ x >> s) * m), z = u64((y ^ y >> t) * k)) => z ^ z >> u;
const SPLIT_MIX = [30n, 0xBF58476D1CE4E5B9n, 27n, 0x94D049BB133111EBn, 31n];
function keyOf(...parts) {
  const [high, low] = hash(Buffer.from(['megaindex', ...parts].join('/')));
  const word = (i) => finish(high ^ finish(u64(low + BigInt(i + 1) * 0x9E3779B97F4A7C15n), SPLIT_MIX), SPLIT_MIX);
  const halves = (i) => [Number(word(i) & LOW), Number(word(i) >> 32n)], rounds = (first) => range(48, (r) => halves(first + r));
  return { word, halves, rounds };
}
const round32 = (x, shift, factor) => Math.imul(x ^ x >>> shift, factor);
function network(rounds, n) {
  const rows = Math.ceil(Math.sqrt(n)), columns = Math.ceil(n / rows), keyed = ([flip, factor], x, size) =>
    Number(BigInt(round32(Math.imul(x ^ flip, 0x85EBCA6B), 15, factor | 1) >>> 0) * BigInt(size) >> 32n);
  return function perm(i) {
    let left = Math.floor(i / columns), right = i % columns;
    for (let r = 0; r < 8; r += 2) {
      left = (left + keyed(rounds[r], right, rows)) % rows; right = (right + keyed(rounds[r + 1], left, columns)) % columns;
    }
    return left * columns + right < n ? left * columns + right : perm(left * columns + right);
  };
}
function permutation(key, n) { // returns perm(key, n, ·)
  if (n >= 4096) return network(key.rounds(0), n);
  const t = range(n); for (let i = n - 1; i > 0; i--) swap(t, i, Number(key.word(i) % BigInt(i + 1))); return (i) => t[i];
}
const h32 = (x, z = round32(round32(x, 16, 0x85EBCA6B), 13, 0xC2B2AE35)) => (z ^ z >>> 16) >>> 0;
function rankPermutation(key, length, n) { // returns rank_perm(key, length, n, ·)
  const [low, high] = key.halves(length), rounds = key.rounds(2 ** 32).map(([a, b]) => [(low ^ a) >>> 0, (high ^ b) >>> 0]);
  if (n >= 4096) return network(rounds, n);
  return (first) => rounds.reduce((rank, [a, b]) => {
    const partner = (Math.floor((h32(a) >>> 12) * n / 2 ** 20) - rank + n) % n;
    return h32(Math.max(rank, partner) ^ b) >= 2 ** 31 ? partner : rank;
  }, first);
}
function shuffler(seed) { // MT19937; returns the function that shuffles the head of a list, then its rest
  const s = [seed]; for (let i = 1; i < 624; i++) s.push(Math.imul(1812433253, s[i - 1] ^ s[i - 1] >>> 30) + i);
  const next = () => {
    const y = (s[0] & 0x80000000) | (s[1] & 0x7fffffff), x = s[397] ^ y >>> 1 ^ (y & 1 ? 0x9908b0df : 0);
    const a = x ^ x >>> 11, b = a ^ a << 7 & 0x9d2c5680, c = b ^ b << 15 & 0xefc60000; s.push(x); s.shift(); return c ^ c >>> 18;
  };
  const shuffle = (list, begin, end) => {
    for (let i = end - begin - 1, j; i > 0; i--) {
      do j = next() & 2 ** (32 - Math.clz32(i)) - 1; while (j < 0 || j > i); swap(list, begin + i, begin + j);
    }
    return list;
  };
  return (list, head) => shuffle(shuffle(list, 0, head), head, list.length);
}
// ---- nodes of one source: functions from a sample to its spans [document, offset, length] ----------------
function cutter(documents, lengths) { // returns where documents start, and the function that cuts tokens [x, y) out
  const starts = new Float64Array(documents.length + 1);
  documents.forEach((d, p) => { starts[p + 1] = starts[p] + lengths[d]; });
  const cut = (x, y) => {
    let p = 0, spans = []; for (let step = 2 ** 31; step >= 1; step /= 2) if (starts[p + step] <= x) p += step;
    for (; p < documents.length && starts[p] < y; p++) {
      const begin = Math.max(starts[p], x), end = Math.min(starts[p + 1], y);
      if (begin < end) spans.push([documents[p], begin - starts[p], end - begin]);
    }
    return spans;
  };
  return { starts, cut };
}
function inBlocks({ seed, name }, blockOf, first, spansOf) {
  const shuffled = memo((b) => permutation(keyOf(seed, b, 'samples', name), first(b + 1) - first(b)));
  return (i) => spansOf(blockOf(i), shuffled(blockOf(i))(i - first(blockOf(i))));
}
const inEpochs = (node, P, spansOf) => inBlocks(node, (i) => Math.floor(i / P), (b) => b * P, spansOf);
function documentsOf({ documents: [begin, end], without, members }, tableOf) { // of an epoch
  const left = new Set(without ? tableOf(without).flat() : []), { word } = members ? keyOf(members.seed, 'subset', members.name) : {};
  const isMember = (d) => !members || (word(d) >= BigInt(members.first) && word(d) <= BigInt(members.last));
  return range(end - begin, (i) => begin + i).filter((d) => !left.has(d) && isMember(d));
}
function passesOf(node, lengths, tableOf) {
  const { seed, name, order, epochs_mixed: k = 1 } = node, documents = documentsOf(node, tableOf), n = k * documents.length;
  return memo((b) => {
    const perm = order === 'window' ? (p) => p : permutation(keyOf(seed, b, 'documents', name), n);
    return cutter(range(n, (p) => documents[perm(p) % documents.length]), lengths);
  });
}
function leastSeen(read, { samples, extra, least_seen: c }) { // those from c on by how often their tokens were served
  const served = {}, scores = range(samples, () => 0), order = range(c);
  const tokens = scores.map((_, i) => read(i).flatMap(([d, x, n]) => range(n, (k) => `${d} ${x + k}`)).slice(0, -extra || undefined));
  const take = (i) => { tokens[i].forEach((token) => { served[token] = 1 + (served[token] ?? 0); }); scores[i] = Infinity; };
  for (order.forEach(take); order.length < samples;) {
    const at = scores.indexOf(Math.min(...scores)), score = total([0, ...tokens[at].map((token) => served[token] ?? 0)]);
    if (score > scores[at]) scores[at] = score; else { order.push(at); take(at); } // a score only grows
  }
  return (i) => read(order[i]);
}
const ORDERS = {
  arrays(node, lengths) {
    const { documents: [begin, end], sequence_length: S, extra, seed, epochs: E, samples, final_epoch_apart: apart, least_seen: c } = node;
    const n = end - begin, whole = (apart ? E - 1 : E) * n, shuffle = shuffler(seed);
    const { starts, cut } = cutter(shuffle(range(E * n, (p) => begin + p % n), whole), lengths), T = starts.at(-1) / E;
    const order = shuffle(range(samples), apart ? Math.floor(((E - 1) * T - extra) / S) : samples);
    const read = (i) => cut(order[i] * S, Math.min((order[i] + 1) * S + extra, E * T));
    return c === undefined ? read : leastSeen(read, node);
  },
  epoch(node, lengths, tableOf) {
    const { sequence_length: S, extra } = node, passes = passesOf(node, lengths, tableOf), B = passes(0).starts.at(-1);
    const carry = node.left_over === 'carry', each = Math.floor((B - extra) / S);
    const first = (b) => (carry ? Math.max(0, Math.floor((b * B - extra) / S)) : b * each);
    const blockOf = (i) => Math.floor(carry ? (i * S + S + extra - 1) / B : i / each);
    return inBlocks(node, blockOf, first, (b, c) => {
      const x = carry ? (first(b) + c) * S - b * B : c * S, y = x + S + extra;
      return x >= 0 ? passes(b).cut(x, y) : [...passes(b - 1).cut(x + B, B), ...passes(b).cut(0, y)];
    });
  },
  window: (node, lengths) => ORDERS.epoch(node, lengths), // of documents in place
  blocks(node, lengths) {
    const { seed, name, sequence_length: S, extra, block_tokens: size } = node, passes = passesOf(node, lengths);
    const T = passes(0).starts.at(-1), n = passes(0).starts.length - 1;
    const apart = [64, 32, 16, 8, 4, 2, 1].find((g) => g === 1 || g * 16 * T <= n * size);
    const blocksOf = memo((e, { starts, cut } = passes(e), bounds = [0]) => {
      starts.forEach((x, p) => p % apart === 0 && x - bounds.at(-1) >= size && T - x >= size && bounds.push(x));
      return bounds.map((begin, b) => {
        const samples = Math.max(0, Math.floor(((bounds[b + 1] ?? T) - begin - extra) / S));
        const perm = permutation(keyOf(seed, `${e}/${b}`, 'samples', name), samples);
        return [samples, (i) => cut(begin + perm(i) * S, begin + (perm(i) + 1) * S + extra)];
      });
    });
    const from = (e, i, served = total(blocksOf(e).map(([samples]) => samples))) =>
      (i < served ? oneAfterAnother(blocksOf(e), i) : from(e + 1, i - served));
    return (i) => from(0, i);
  },
  packed(node, lengths) {
    const { sequence_length: S, extra, seed, name, align: A = 1 } = node, pieces = byLength(cutPieces(node, lengths, S), S / A, A);
    const bins = pack(pieces.map((p) => p.length), node.max_documents, 1, true);
    const ranked = memo((b) => memo((l) => rankPermutation(keyOf(seed, b, 'documents', name), l, pieces[l].length)));
    return inEpochs(node, bins.length, (b, c, padding = 0) => bins[c].map(([l, rank]) => {
      const [d, offset, n] = pieces[l][l < S / A ? ranked(b)(l)(rank) : rank], before = padding; padding += l * A - n;
      return [d, offset, n + (n === S && offset + S < lengths[d] ? extra : 0), ...(before ? [before] : [])];
    }));
  },
  bins(node, lengths) {
    const split = node.long_documents === 'split', S = split ? node.sequence_length : node.capacity;
    const pieces = cutPieces(node, lengths, S).filter((piece) => piece[2] >= 2), ranks = byLength(pieces, S);
    const bins = pack(ranks.map((r) => r.length), 0, 2, false).sort(([[l, i]], [[m, j]]) => m - l || i - j);
    const cuts = node.packed ? bins.map((bin) => bin.map(([l, rank]) => ranks[l][rank])) : pieces.map((p) => [p]);
    return inEpochs(node, cuts.length, (_, c) => cuts[c].sort((a, b) => a[0] - b[0] || a[1] - b[1])
      .map(([d, x, l]) => [d, x, l + (split && l === S && x + S < lengths[d])]));
  },
  sequence({ parts }, ...given) {
    const served = parts.flatMap(({ index, ranges }, _, __, read = memo(() => ORDERS[index.order](index, ...given))) =>
      ranges.map(([begin, end, times]) => [(end - begin) * times, (i) => read()(begin + i % (end - begin))]));
    return (i) => oneAfterAnother(served, i);
  },
};
const oneAfterAnother = (list, p, k = list.findIndex(([size]) => (p -= size) < 0)) => list[k][1](p + list[k][0]);
function cutPieces(node, lengths, S) { // of at most S tokens
  const used = (L) => (L <= S || node.long_documents === 'split' ? L : node.long_documents === 'skip' ? 0 : S);
  return documentsOf(node).map((d) => [d, used(lengths[d])]).flatMap(([d, tokens]) =>
    range(Math.ceil(tokens / S), (k) => [d, k * S, Math.min(tokens - k * S, S)]));
}
const byLength = (pieces, S, unit = 1, lists = range(S + 1, () => [])) => pieces.forEach((piece) => lists[Math.ceil(piece[2] / unit)].push(piece)) || lists;
function pack(count, most, least, stacked) { // returns the [length, rank] of the pieces of each bin
  const layers = [], capacity = count.length - 1; for (let length = capacity; length > 0; length--) {
    for (let left = count[length], rank = 0; left > 0;) {
      const [below] = layers.filter(({ room, held, bins, covered }) => covered < bins && room >= Math.max(length, least)
        && (!most || held < most)).sort((a, b) => a.room - b.room || a.held - b.held);
      const { room, held, bins: all, covered: before } = below || { room: capacity, held: 0, bins: left, covered: 0 };
      const each = Math.min(stacked || !below ? Math.floor(room / length) : 1, left, most ? most - held : left);
      const bins = Math.min(all - before, Math.floor(left / each));
      layers.push({ below, before, length, each, rank, bins, covered: 0, room: room - each * length, held: most && held + each });
      if (below) below.covered += bins; [rank, left] = [rank + bins * each, left - bins * each];
    }
  }
  const inBin = ({ below, before, length, rank, each }, i) => [...(below ? inBin(below, before + i) : []),
    ...range(each, (r) => [length, rank + i * each + r])];
  return layers.flatMap((layer) => range(layer.bins - layer.covered, (i) => inBin(layer, layer.covered + i)));
}
// ---- draws: functions from a position to [stream, number of the draw] ------------------------------------
const double = (text, [, a, b, exponent] = /^0x([01])\.(\w+)p(.+)$/.exec(text)) => parseInt(a + b, 16) * 2 ** (exponent - 4 * b.length);
const drawing = (streams, choose, drawn = range(streams, () => 0), draws = []) => (p) => {
  while (draws.length <= p) { const stream = choose(draws.length, drawn); draws.push([stream, drawn[stream]++]); }
  return draws[p];
};
const soonest = (w, due) => range(w.length).filter((q) => w[q]).reduce((best, q) => (due[q] * w[best] < due[best] * w[q] ? q : best));
const divisor = (weights, w = weights.map(BigInt)) => drawing(w.length, (_, drawn) => soonest(w, drawn.map((j) => BigInt(2 * j + 1))));
const inBatches = (draw, size, begins = [0]) => (p) => { // size: of all batches, or a list of those of each stream
  const sizeOf = (b) => size[draw(b)[0]] ?? size;
  while (begins.at(-1) <= p) begins.push(begins.at(-1) + sizeOf(begins.length - 1));
  const b = begins.findLastIndex((begin) => begin <= p); return draw(b).map((x, k) => (k ? x * sizeOf(b) + p - begins[b] : x));
};
const MIXING = {
  greedy: ({ weights }, _, most = [], doubles = weights.map((text) => double(text))) => drawing(weights.length, (i, drawn) => {
    const behind = doubles.map((w, q) => (drawn[q] >= most[q] ? -Infinity : w * Math.max(i, 1) - drawn[q])); return behind.indexOf(Math.max(...behind));
  }),
  exhaustive: ({ weights }) => MIXING.greedy({ weights }, 0, weights, weights.map((samples) => samples / total(weights))),
  stratified: ({ shares }) => divisor(shares), per_stream: ({ shares, batch }) => inBatches(divisor(shares), batch),
  random({ shares, seed, name, period }) {
    const spread = divisor(shares), beginOf = (p) => p - p % period % 2048;
    const block = memo((x) => {
      const draws = range(Math.min(2048, period - x % period), (i) => spread(x + i));
      const left = shares.map((_, q) => draws.filter((draw) => draw[0] === q));
      const perm = permutation(keyOf(seed, x, 'mixing', name), draws.length);
      return draws.map((_, i) => left[draws[perm(i)][0]].shift());
    });
    return (p) => block(beginOf(p))[p - beginOf(p)];
  },
  changed({ file, position, changes, columns, batch = 1, first }, tableOf) {
    const rows = tableOf(file, true).slice(...changes), UNIT = 2n ** 31n, owed = columns.map(() => 0n);
    const starts = rows.map(([sample]) => Math.floor(Math.max(sample - position, 0) / batch));
    const shares = rows.map((row) => columns.map((c) => BigInt(c < 0 ? 0 : row[c + 1]))).map((w) => {
      const scaled = w.map((x) => x * UNIT / total(w)), greatest = w.reduce((k, x, q) => (x > w[k] ? q : k), 0);
      return scaled.map((x, q) => (q === greatest ? x + UNIT - total(scaled) : x));
    });
    const before = first && MIXING[first.rule]({ ...first, batch: 1 }); let row = 0;
    return inBatches(drawing(columns.length, (i) => {
      if (i < starts[0]) return before(i)[0];
      if (i === starts[row + 1]) shares[row++].forEach((share, q) => { owed[q] += share * BigInt(starts[row] - starts[row - 1]); });
      const stream = soonest(shares[row], owed.map((x) => UNIT / 2n - x)); owed[stream] -= UNIT; return stream;
    }), batch);
  },
};
// ---- canonical form: pieces, stretches of positions that one rule draws from [source, begin, node] --------
const same = (a, b) => canonical(a) === canonical(b), gcd = (a, b) => (b ? gcd(b, a % b) : a);
const rowsOf = ({ common, columns, rows, ...node }) => (!rows ? [node] : rows.map((row) => Object.assign({}, common,
  ...columns.map((name, k) => (row[k] === null ? {} : { [name]: row[k] })))));
const formOf = ({ parts, epochs, samples, ...node }) => (parts ? { ...node, parts: parts.map(({ index, ranges }) =>
  ({ index: formOf(index), ranges })) } : { ...node, ...('name' in node ? {} : { epochs, samples }) }); // of one source
const lowest = ({ shares, first, ...draws }) => (draws.rule === 'divisor' ? lowest({ rule: 'stratified', shares: draws.weights })
  : { ...draws, ...(first && { first: lowest(first) }), ...(shares && { shares: shares.map((x) => x / shares.reduce(gcd)) }) });
function piecesOf(index, ranges) { // ranges: positions [begin, end, times] of the node
  const { parts, stages, order, common, columns, rows, ...blend } = index, nodes = rowsOf(index);
  if (parts) return parts.flatMap((part) => piecesOf(part.index, part.ranges));
  const stretches = stages || ranges.filter(([begin, end]) => begin < end).map(([begin, end, times]) =>
    ({ ...(rows && blend), first_draw: begin, samples: end - begin, times }));
  return stretches.map(({ samples, first_draw = 0, times = 1, sources = range(nodes.length), begins, ...draws }) => ({
    draws: sources.length > 1 || draws.uncounted ? lowest(draws) : { rule: 'stratified', shares: [1] }, first_draw, samples, times,
    streams: sources.map((source, q) => [source, begins ? begins[q] : 0, formOf(nodes[source])]) }));
}
function goesOn({ draws, streams, first_draw: first, samples, times }, next) { // where the one before ends
  const { rule, shares, batch = 1 } = draws, behind = first + samples - next.first_draw;
  const period = streams.map((_, q) => (/^(stratified|per_stream)$/.test(rule) ? shares[q] * (batch[q] ?? batch) : 0));
  const size = total(period), turns = size && behind / size;
  const later = streams.map(([source, begin, node], q) => [source, begin + turns * period[q], node]);
  return times * next.times === 1 && behind === turns * size && turns % 1 === 0 && same([draws, later], [next.draws, next.streams]);
}
function canonicalForm(name, { index, samples, steps, masked_rows: padded, rounds, every, ...own }, rows, files) {
  const named = (x) => JSON.parse(JSON.stringify(x, (key, y) => (/^(file|without)$/.test(key) && y !== null ? files[y].sha256 : y)));
  const ranges = (list) => merged(list, (a, b) => a[1] === b[0] && [a[0], b[1]]);
  const skipped = { end: samples, left_out: [], moved: [], masks: [], ...(index.order === 'skipped' ? index : { index }) };
  const joined = merged(piecesOf(skipped.index, [[0, skipped.end, 1]]), (a, b) => goesOn(a, b) && { ...a, samples: a.samples + b.samples });
  const pieces = merged(joined, (a, b) => same({ ...a, times: b.times }, b) && { ...a, times: a.times + b.times });
  const [sources, targets] = [own.sources.map((k) => rows[k].fingerprint), own.targets.map((t) => t && [t[0], rows[t[1]].fingerprint])];
  return { sources, targets, rounds, every, end: skipped.end, steps: merged(steps, (a, b) => a[1] === b[1] && [a[0], a[1], a[2] + b[2]]),
    masked_rows: name === 'train' ? padded : 0, pieces: named(pieces), left_out: ranges(skipped.left_out),
    moved: ranges(skipped.moved), masks: named(skipped.masks).map(canonical).sort().map(JSON.parse) };
}
function serving({ steps, pieces, left_out: holes, moved, masks }, sources, tableOf) { // returns spans and node of a position
  const drawn = pieces.map(({ draws, streams, first_draw: first, samples, times }) => {
    const children = streams.map(([source, , node]) => ORDERS[node.order](node, sources[source].lengths, tableOf));
    const draw = MIXING[draws.rule](draws, tableOf), { uncounted } = draws;
    const wrapped = (i, n) => (uncounted && i >= n ? i % Math.max(1, n - uncounted) : i);
    return [samples * times, (p, [q, j] = draw(first + p % samples), [source, begin, node] = streams[q]) =>
      [children[q](wrapped(begin + j, node.samples)).map((span) => [source, ...span]), node]];
  });
  const masked = masks.map(({ file, remove, ...mask }) => ({ ...mask, kind: remove ? 'removed' : 'masked', ids: file !== null && new Set(tableOf(file).flat()) }));
  const marksOf = (p, [q, d]) => masked.filter(({ source, from, ids }) => source === q && p >= from && (!ids || ids.has(d))).map(({ kind }) => kind).sort().slice(-1);
  const [last, size, count] = steps.at(-1), end = last + size * count - total([0, ...moved.map(([a, b]) => b - a)]);
  const behind = moved.map(([begin, stop]) => [stop - begin, (p) => read(begin + p)]);
  const read = (p) => (p < end ? oneAfterAnother(drawn, p - steps[0][0]) : oneAfterAnother(behind, p - end));
  const marked = (p, [spans, node]) => [spans.map((span) => [...span, ...marksOf(p, span)]), node];
  return (p) => (holes.some(([begin, stop]) => p >= begin && p < stop) ? [[]] : marked(p, read(p)));
}
// ---- steps, rows, receipts, files ------------------------------------------------------------------------
function dealt([first, samples, rows], D, M, workOf) { // returns the positions of each micro batch
  const e = Math.floor(samples / (rows / M)), sizes = range(rows / M, (m) => e + (m < samples % (rows / M)));
  const positions = range(samples, (i) => first + i), loads = range(D, () => 0);
  if (!workOf) return sizes.map((size) => positions.splice(0, size));
  const sorted = positions.map((p) => [p, workOf(p)]).sort(([p, v], [q, w]) => w - v || p - q);
  return range(rows / M / D).flatMap((r) => {
    const longer = sizes.slice(r * D, (r + 1) * D).filter((size) => size > e).length, round = range(D, () => []);
    for (const [p, work] of sorted.splice(0, D * e + longer)) {
      const most = e + (round.filter((batch) => batch.length > e).length < longer);
      const [rank] = range(D).filter((k) => round[k].length < most).sort((j, k) => loads[j] - loads[k]);
      round[rank].push(p); loads[rank] += work;
    }
    return round;
  });
}
const squares = (spans, { parts, ...node }) => spans.reduce(([sum, room], [, , , length]) => // the work of a sample
  [sum + Math.min(length, room) ** 2, room - Math.min(length, room)], [0, (parts?.[0].index ?? node).sequence_length])[0];
const LANES = [[0x6A09E667F3BCC909n, 0xBB67AE8584CAA73Bn, 0x3C6EF372FE94F82Bn, 0xA54FF53A5F1D36F1n],
  [0x510E527FADE682D1n, 0x9B05688C2B3E6C1Fn, 0x1F83D9ABFB41BD6Bn, 0x5BE0CD19137E2179n]];
const MARKS = { masked: 0x9E3779B97F4A7C15n, removed: 0xC2B2AE3D27D4EB4Fn }, ENDS = [[33n, 0xFF51AFD7ED558CCDn, 33n, 0xC4CEB9FE1A85EC53n, 33n], SPLIT_MIX];
function receiptOf(position, spans, sources) {
  const [high, low] = LANES.map(([a, b, c, d], k) => finish(spans.reduce((h, [source, x, y, z, ...more]) => u64(end32(h) * a + BigInt(x) * b + BigInt(y) * c
    + (sources[source].key[k] ^ (MARKS[more.at(-1)] ?? 0n)) + (BigInt(z) + (BigInt(more[0] | 0) << 32n)) * d),
  BigInt(position)), ENDS[k]));
  return spans.length ? high << 64n | low : 0n;
}
const int64 = (...values) => new Uint8Array(BigInt64Array.from(values, BigInt).buffer);
function sourceOf(where, { fingerprint }, sizes, table, bounds) { // of sizes of .bin and .idx, lengths and bounds
  const key = hash(Buffer.concat([int64(...sizes, table.length / 4), table, bounds])), found = hex(key[0] << 64n | key[1]);
  if (found !== fingerprint) throw new Error(`${where}: fingerprint ${found}, not ${fingerprint}`);
  return { key, lengths: new Int32Array(new Uint8Array(table).buffer) };
}
function openSource(pathOf, row, algorithm) {
  const file = `${row.path}.idx`, idx = fs.readFileSync(pathOf(file)), [n, m] = [18, 26].map((at) => Number(idx.readBigUInt64LE(at)));
  if (algorithm === 'sha256' && sha256(idx) !== row.idx) throw new Error(`${file}: SHA-256 ${sha256(idx)}, not ${row.idx}`);
  return sourceOf(file, row, [row.bin_bytes, idx.length], idx.subarray(34, 34 + 4 * n), idx.subarray(34 + 12 * n, 34 + 12 * n + 8 * m));
}
function openLengths(file, rows) { // returns what openSource returns for a row, from a file of lengths
  const data = fs.readFileSync(file), number = (at) => Number(data.readBigInt64LE(at)), heads = rows.map((_, k) => 16 + 48 * k);
  let at = 16 + 48 * rows.length; const next = (size) => data.subarray(at, at += size);
  const bounds = heads.map((head) => next(8 * number(head + 40))), tables = heads.map((head) => next(4 * number(head + 32)));
  const isOf = (row, head) => data.toString('hex', head, head + 16) === row.fingerprint && number(head + 16) === row.bin_bytes;
  if (data.toString('latin1', 0, 8) !== 'MIDXLEN\x01' || number(8) !== rows.length || at !== data.length || !heads.every((head, k) => isOf(rows[k], head))) {
    throw new Error(`${file}: no lengths of this lock`);
  }
  return (k) => sourceOf(`${file}: source ${k}`, rows[k], [rows[k].bin_bytes, number(heads[k] + 24)], tables[k],
    bounds[k].length ? bounds[k] : int64(...range(number(heads[k] + 32) + 1)));
}
function tableIn(file, isArray = file.endsWith('.npy')) { // returns rows of integers, of one number each in a text
  const data = fs.readFileSync(file);
  if (!isArray) return data.toString().trim().split(/\s+/).map((id) => [Number(id)]);
  const begin = data[6] > 1 ? 12 + data.readUInt32LE(8) : 10 + data.readUInt16LE(8), header = data.toString('latin1', 0, begin);
  const [, first, ...sizes] = /'([<>|])[iu](\d)'.*\((\d+),(?: (\d+))?\)/.exec(header), byColumn = /_order': T/.test(header);
  const [width, rows, columns] = sizes.map((x = 1) => Number(x)), bytes = (k) => data.subarray(begin + k * width).subarray(0, width);
  const number = (k) => (first === '>' ? bytes(k).reverse() : bytes(k)).readUIntLE(0, Math.min(width, 6));
  return range(rows, (k) => range(columns, (i) => number(byColumn ? i * rows + k : k * columns + i)));
}
const KEYS = new Set(`format version written_by settings root sources columns rows dialect tokens chunk_bytes hashes files path bytes
  sha256 subsets train valid test samples index steps past_steps masked_rows shapes targets rounds every skip receipts move
  block_steps blocks total digests digest order documents without members last sequence_length extra seed epochs source parts final_epoch_apart least_seen
  name epochs_mixed left_over block_tokens max_documents long_documents align capacity packed common weights rule uncounted stages from
  first_position shares begins batch period file changes position first ranges end left_out moved masks remove from_step note names settings
  hash tokenizers fingerprint special_tokens eod about run title licence address`.split(/\s+/));
const isPlain = (x) => x === null || typeof x !== 'object', sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');
const keysIn = (x) => (isPlain(x) ? [] : Object.entries(x).flatMap(([k, y]) => [...(Array.isArray(x) ? [] : [k]), ...keysIn(y)]));
const textOf = (x) => JSON.stringify(x).replace(/^"\\u0000(\d+)"$/, '$1') // an integer that is no double, see below
  .replace(/[\x7f-\uffff]/g, (c) => `\\u${c.charCodeAt().toString(16).padStart(4, '0')}`);
const canonical = (x) => (isPlain(x) ? textOf(x) : Array.isArray(x) ? `[${x.map(canonical)}]` : `{${Object.keys(x).sort((a, b) =>
  Buffer.from(a).compare(Buffer.from(b))).map((k) => `${textOf(k)}:${canonical(x[k])}`)}}`);
function parse(data) { // refuses what a lock does not have
  const text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(data), lock = JSON.parse(text);
  const exact = JSON.parse(text.replace(/("(?:[^"\\]|\\.)*")|\d{16,}/g, (digits, string) => string ?? (digits > 2 ** 53 ? `"\\u0000${digits}"` : digits)));
  const bare = text.replace(/"(?:[^"\\]|\\.)*"/g, '""'), { settings, ...rest } = lock, unknown = keysIn(rest).find((k) => !KEYS.has(k));
  const faults = { [`unknown key ${unknown}`]: unknown !== undefined, 'number that is no integer': /\d[.eE]/.test(bare),
    'key given twice': bare.match(/""\s*:/g).length > keysIn(lock).length, dialect: !/^(megatron|neox|paddlenlp)$/.test(lock.dialect),
    hash: !/^(xxh3-64|sha256)$/.test(lock.hash), 'format or version': `${lock.format} ${lock.version}` !== 'megaindex run lock 3',
    digest: sha256(data.subarray(0, data.lastIndexOf(lock.digest))) !== lock.digest,
    digests: Object.keys(lock.digests).some((name) => sha256(canonical(exact[name])) !== lock.digests[name]) };
  for (const [fault, found] of Object.entries(faults)) if (found) throw new Error(`run.lock: ${fault}`); return [lock, exact];
}
function openLock(file, lengths) {
  const [lock, exact] = parse(fs.readFileSync(file)), rows = rowsOf(lock.sources), short = (x) => sha256(canonical(x)).slice(0, 32);
  const pathOf = (named) => path.resolve(path.dirname(file), lock.root, named);
  const sourceIn = memo(lengths ? openLengths(lengths, rows) : (k) => openSource(pathOf, rows[k], lock.hash));
  const forms = Object.fromEntries(Object.entries(exact.subsets).map(([key, each]) => [key, canonicalForm(key, each, rows, lock.files)]));
  const contentOf = ({ chunk_bytes, hashes }) => short({ chunk_bytes, hashes: lock.subsets.train.sources.map((row) => hashes[row]) });
  const tableOf = (sha, isArray, named = pathOf(lock.files.find((each) => each.sha256 === sha).path)) => {
    if (sha256(fs.readFileSync(named)) !== sha) throw new Error(`${named}: SHA-256 is not ${sha}`); return tableIn(named, isArray);
  };
  const open = (name) => {
    const subset = lock.subsets[name], form = JSON.parse(canonical(forms[name])); // all that decides samples is in it
    const sources = subset.sources.map(sourceIn), read = serving(form, sources, tableOf), size = subset.receipts.block_steps;
    const steps = form.steps.flatMap(([first, n, count]) => range(count, (k) => [first + k * n, n, n]));
    steps.at(-1)[2] += subset.masked_rows; const made = steps.filter(([, n]) => n > 0);
    const hashesOf = ([first, n]) => range(n, (i) => receiptOf(first + i, read(first + i)[0], sources));
    const receipt = (served) => hex(BigInt.asUintN(128, total([0n, ...served.flatMap(hashesOf)])));
    return { ...subset.receipts, read, steps, blockOf: (k) => receipt(made.slice(k * size, (k + 1) * size)) };
  };
  return { lock, open, identity: short(forms), content: lock.tokens ? contentOf(lock.tokens) : 'not hashed' };
}
function verify(file, lengths) {
  const { lock, open, identity, content } = openLock(file, lengths), names = Object.keys(lock.subsets);
  console.log(`identity of the run ${identity}\nidentity of the tokens ${content}${lock.tokens ? ', by the hashes in the lock' : ''}`);
  const isSame = names.map((name) => {
    const { blocks, blockOf, total: stated } = open(name), found = blocks.map((_, k) => blockOf(k)), first = found.findIndex((x, k) => x !== blocks[k]);
    const sum = hex(BigInt.asUintN(128, total(found.map((x) => BigInt(`0x${x}`))))), same = first < 0 && sum === stated;
    console.log(`${name}: ${found.filter((x, k) => x === blocks[k]).length} of ${found.length} receipts as in the lock${same ? ''
      : first < 0 ? `; total ${sum}, not ${stated}` : `; block ${first}: ${found[first]}, not ${blocks[first]}`}`);
    return same;
  });
  const whole = !lengths && lock.hash === 'sha256';
  console.log(`compared the fingerprints of the sources of samples${lengths ? ` in ${lengths}` : whole ? ' and SHA-256 of their .idx' : ''}; ` +
    `not compared: tokens, settings, .provenance${whole ? '' : `, ${lengths ? 'the .idx' : 'XXH3-64 of the .idx'}`}`);
  process.exitCode = Number(!isSame.every((same) => same));
}
function main([file, name, what, ...numbers]) {
  if (file === 'verify') return verify(name, what);
  const [a, b] = numbers.map(Number), { open, identity, content } = openLock(file);
  if (name === 'identity') return console.log(`${identity}\n${content}`);
  const { read, steps, blockOf } = open(name), workOf = numbers[2] && ((p) => squares(...read(p)));
  const batches = memo((step) => dealt(steps[step], a, b, workOf));
  const positionOf = ([step, rank, w]) => batches(step)[Math.floor(w / b) * a + rank][w % b];
  const shown = (p) => (p === undefined ? 'padding' : [p, ...read(p)[0].map((span) => span.join(':'))].join(' '));
  const lines = what === 'receipts' ? range(b - a, (k) => blockOf(a + k))
    : fs.readFileSync(0, 'utf8').trim().split('\n').map((line) => shown(positionOf(line.split(' ').map(Number))));
  process.stdout.write(`${lines.join('\n')}\n`);
}
if (require.main === module) main(process.argv.slice(2)); else Object.assign(exports, { keyOf, hash, hex, permutation,
  rankPermutation, shuffler, pack, MIXING, dealt, receiptOf, canonical, sha256 }); // which vectors.js tries
