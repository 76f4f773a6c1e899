// The samples of a run from its run.lock and .idx files, written from docs/lock-format.md alone.
//   node lock.js run.lock SUBSET rows D M [balance] < queries    of D ranks with micro batches of M, lines
//       "step rank row": prints "position source:document:offset:length ..." (no span if skipped), or "padding"
//   node lock.js run.lock SUBSET receipts FIRST END              receipts of blocks FIRST to END - 1
const { createHash } = require('crypto'), fs = require('fs'), path = require('path');
const LOW = 0xffffffffn, u64 = (x) => BigInt.asUintN(64, x);
const range = (n, value = (i) => i) => Array.from({ length: n }, (_, i) => value(i));
const total = (values) => values.reduce((a, b) => a + b);
const swap = (list, i, j) => { [list[i], list[j]] = [list[j], list[i]]; };
const memo = (make, kept = new Map()) => (x) => (kept.has(x) ? kept : kept.set(x, make(x))).get(x);
// ---- XXH3-128 of 17 bytes or more ------------------------------------------------------------------------
const SECRET = Buffer.from('uP5sOSOkS758AYEs9yGtHN7UbemDkJfbckCkpLezZx/LeeZOzMDleIJa0H3M/3IhuAhGdPdDJI7gNZDmgTom' +
  'TDwoUruRwwDLiNBlixtTLqNxZEiXog35TjgZ70ap3qzYqPp2P+OcND/53LvHxwtPHYpR4EvNtFkxyJ9+ydl4c2TqxayDNNPrw8WBoP/6' +
  'E2PrFw3dUbfw2knTFlUmKdRonisWvlh9R6H8j/i40XrQMc5FyzqPlRYEKK/X+8q7S0B+', 'base64');
const [A1, A2, A3, B1, B2, B3, B4, B5] = [0x9E3779B1n, 0x85EBCA77n, 0xC2B2AE3Dn, 0x9E3779B185EBCA87n,
  0xC2B2AE3D27D4EB4Fn, 0x165667B19E3779F9n, 0x85EBCA77C2B2AE63n, 0x27D4EB2F165667C5n];
const secret = memo((at) => SECRET.readBigUInt64LE(at));
const fold = (a, b) => u64(a * b) ^ (a * b >> 64n), end32 = (h) => h ^ h >> 32n;
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
  const merged = (start, s) => avalanche(u64(range(4).reduce((sum, i) => sum +
    fold(sums[2 * i] ^ secret(s + 16 * i), sums[2 * i + 1] ^ secret(s + 16 * i + 8)), start)));
  return [merged(~(n * B2), 117), merged(n * B1, 11)];
}
const hex = (...words) => words.map((word) => word.toString(16).padStart(16, '0')).join('');
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
const high32 = (x, y) => Math.floor(((x >>> 16) * y + Math.floor((x & 0xffff) * y / 65536)) / 65536); // x · y >> 32
function network(rounds, n) {
  const rows = Math.ceil(Math.sqrt(n)), columns = Math.ceil(n / rows);
  const keyed = ([flip, factor], x, size) =>
    high32(round32(Math.imul(x ^ flip, 0x85EBCA6B), 15, factor | 1) >>> 0, size);
  return function perm(i) {
    let left = Math.floor(i / columns), right = i % columns;
    for (let r = 0; r < 8; r += 2) {
      left = (left + keyed(rounds[r], right, rows)) % rows;
      right = (right + keyed(rounds[r + 1], left, columns)) % columns;
    }
    return left * columns + right < n ? left * columns + right : perm(left * columns + right);
  };
}
function permutation(key, n) { // returns perm(key, n, ·)
  if (n >= 4096) return network(key.rounds(0), n);
  const t = range(n); for (let i = n - 1; i > 0; i--) swap(t, i, Number(key.word(i) % BigInt(i + 1)));
  return (i) => t[i];
}
const h32 = (x, z = round32(round32(x, 16, 0x85EBCA6B), 13, 0xC2B2AE35)) => (z ^ z >>> 16) >>> 0;
function rankPermutation(key, length, n) { // returns rank_perm(key, length, n, ·)
  const [low, high] = key.halves(length);
  const rounds = key.rounds(2 ** 32).map(([a, b]) => [(low ^ a) >>> 0, (high ^ b) >>> 0]);
  if (n >= 4096) return network(rounds, n);
  return (first) => rounds.reduce((rank, [a, b]) => {
    const partner = (Math.floor((h32(a) >>> 12) * n / 2 ** 20) - rank + n) % n;
    return h32(Math.max(rank, partner) ^ b) >= 2 ** 31 ? partner : rank;
  }, first);
}
function shuffler(seed) { // MT19937; returns the function that shuffles the head of a list, then its rest
  let at = 624, s = Uint32Array.of(seed, ...Array(623));
  for (let i = 1; i < 624; i++) s[i] = Math.imul(1812433253, s[i - 1] ^ s[i - 1] >>> 30) + i;
  const next = () => {
    for (let i = 0; at === 624 && i < 624; i++) {
      const y = (s[i] & 0x80000000) | (s[(i + 1) % 624] & 0x7fffffff);
      s[i] = s[(i + 397) % 624] ^ y >>> 1 ^ (y & 1 ? 0x9908b0df : 0);
    }
    const x = s[at % 624], y = x ^ x >>> 11, z = y ^ y << 7 & 0x9d2c5680, w = z ^ z << 15 & 0xefc60000;
    at = at % 624 + 1; return w ^ w >>> 18;
  };
  const shuffle = (list, begin, end) => {
    for (let i = end - begin - 1, j; i > 0; i--) {
      do j = next() & 2 ** (32 - Math.clz32(i)) - 1; while (j < 0 || j > i); swap(list, begin + i, begin + j);
    }
    return list;
  };
  return (list, head) => shuffle(shuffle(list, 0, head), head, list.length);
}
// ---- nodes: functions from a sample to its spans [source, document, offset, length] ----------------------
function cutter(documents, lengths) { // returns the function that cuts tokens [x, y) out of a list
  const starts = new Float64Array(documents.length + 1);
  documents.forEach((d, p) => { starts[p + 1] = starts[p] + lengths[d]; });
  return (x, y) => {
    let p = 0, spans = []; for (let step = 2 ** 31; step >= 1; step /= 2) if (starts[p + step] <= x) p += step;
    for (; p < documents.length && starts[p] < y; p++) {
      const begin = Math.max(starts[p], x), end = Math.min(starts[p + 1], y);
      if (begin < end) spans.push([0, documents[p], begin - starts[p], end - begin]);
    }
    return spans;
  };
}
function inBlocks({ seed, name }, blockOf, first, spansOf, numberOf = (b) => b) {
  const shuffled = memo((b) => permutation(keyOf(seed, numberOf(b), 'samples', name), first(b + 1) - first(b)));
  return (i) => spansOf(blockOf(i), shuffled(blockOf(i))(i - first(blockOf(i))));
}
const inEpochs = (node, P, spansOf) => inBlocks(node, (i) => Math.floor(i / P), (b) => b * P, spansOf);
function documentsOf({ documents: [begin, end], without }, lengths, tableOf) { // returns them and their tokens
  const left = new Set(without === undefined ? [] : tableOf(without).flat());
  const documents = range(end - begin, (i) => begin + i).filter((d) => !left.has(d));
  return [documents, documents.reduce((sum, d) => sum + lengths[d], 0)];
}
const passesOf = ({ seed, name, order }, documents, lengths, k = 1) => memo((b) => {
  const n = k * documents.length, perm = order !== 'window' && permutation(keyOf(seed, b, 'documents', name), n);
  const list = range(n, (p) => documents[(perm ? perm(p) : p) % documents.length]);
  return { list, cut: cutter(list, lengths) };
});
const ORDERS = {
  arrays(node, [{ lengths }]) {
    const { sequence_length: S, extra, epochs: E, final_epoch_apart: apart } = node, shuffle = shuffler(node.seed);
    const [documents, T] = documentsOf(node, lengths), n = documents.length;
    const cut = cutter(shuffle(range(E * n, (p) => documents[p % n]), apart ? (E - 1) * n : E * n), lengths);
    const order = shuffle(range(node.samples), apart ? Math.floor(((E - 1) * T - extra) / S) : node.samples);
    return (i) => cut(order[i] * S, Math.min((order[i] + 1) * S + extra, E * T));
  },
  epoch(node, [{ lengths }], tableOf) {
    const { sequence_length: S, extra, epochs_mixed: k } = node, [documents, T] = documentsOf(node, lengths, tableOf);
    const B = k * T, carry = node.left_over === 'carry', each = Math.floor((B - extra) / S);
    const first = (b) => (carry ? Math.max(0, Math.floor((b * B - extra) / S)) : b * each);
    const passes = passesOf(node, documents, lengths, k);
    const blockOf = (i) => Math.floor(carry ? (i * S + S + extra - 1) / B : i / each);
    return inBlocks(node, blockOf, first, (b, c) => {
      const x = carry ? (first(b) + c) * S - b * B : c * S, y = x + S + extra;
      return x >= 0 ? passes(b).cut(x, y) : [...passes(b - 1).cut(x + B, B), ...passes(b).cut(0, y)];
    });
  },
  window: (node, sources) => ORDERS.epoch({ ...node, epochs_mixed: 1 }, sources), // of documents in place
  blocks(node, [{ lengths }]) {
    const { sequence_length: S, extra, block_tokens: size } = node, [documents, T] = documentsOf(node, lengths);
    const passes = passesOf(node, documents, lengths), blocks = [], firsts = [0];
    const apart = [64, 32, 16, 8, 4, 2, 1].find((g) => g === 1 || g * 16 * T <= documents.length * size);
    range(node.epochs).forEach((e) => {
      const bounds = [0, T];
      passes(e).list.reduce((x, d, p) => {
        if (p % apart === 0 && x - bounds.at(-2) >= size && T - x >= size) bounds.splice(-1, 0, x);
        return x + lengths[d];
      }, 0);
      bounds.slice(1).forEach((end, b) => {
        blocks.push({ number: `${e}/${b}`, cut: (x) => passes(e).cut(bounds[b] + x, bounds[b] + x + S + extra) });
        firsts.push(firsts.at(-1) + Math.max(0, Math.floor((end - bounds[b] - extra) / S)));
      });
    });
    const blockOf = (i) => firsts.findLastIndex((first) => first <= i);
    return inBlocks(node, blockOf, (b) => firsts[b], (b, c) => blocks[b].cut(c * S), (b) => blocks[b].number);
  },
  packed(node, [{ lengths }]) {
    const { sequence_length: S, extra, seed, name } = node, pieces = byLength(piecesOf(node, lengths, S), S);
    const bins = pack(pieces.map((p) => p.length), node.max_documents, 1, true);
    const ranked = memo((b) => memo((l) => rankPermutation(keyOf(seed, b, 'documents', name), l, pieces[l].length)));
    return inEpochs(node, bins.length, (b, c) => bins[c].map(([l, rank]) => {
      const [source, d, offset] = pieces[l][l < S ? ranked(b)(l)(rank) : rank];
      return [source, d, offset, l + (l === S && offset + S < lengths[d] ? extra : 0)];
    }));
  },
  bins(node, [{ lengths }]) {
    const split = node.long_documents === 'split', S = split ? node.sequence_length : node.capacity;
    const pieces = piecesOf(node, lengths, S).filter((piece) => piece[3] >= 2), ranks = byLength(pieces, S);
    const bins = pack(ranks.map((r) => r.length), 0, 2, false).sort(([[l, i]], [[m, j]]) => m - l || i - j);
    const cuts = node.packed ? bins.map((bin) => bin.map(([l, rank]) => ranks[l][rank])) : pieces.map((p) => [p]);
    return inEpochs(node, cuts.length, (_, c) => cuts[c].sort((a, b) => a[1] - b[1] || a[2] - b[2])
      .map(([source, d, x, l]) => [source, d, x, l + (split && l === S && x + S < lengths[d])]));
  },
  blend(node, sources) {
    const { rule, weights, uncounted } = node, nodes = rowsOf(node), children = builtOf(nodes, sources);
    const draw = rule === 'greedy' ? greedy(weights.map((text) => double(text))) : divisor(weights);
    const read = (q, j, n = nodes[q].samples) => children(q, uncounted && j >= n ? j % Math.max(1, n - uncounted) : j);
    return (p) => read(...draw(p));
  },
  stages(node, sources, tableOf) {
    const children = builtOf(rowsOf(node), sources, tableOf), cursors = sources.map(() => 0);
    const stages = node.stages.map((stage) => {
      const from = stage.sources || range(sources.length), draw = MIXING[stage.rule](stage, tableOf);
      const begins = stage.begins || from.map((q) => cursors[q]);
      begins.forEach((begin, q) => { // draws of a stream are numbered in order, so its last one counts them
        const last = range(stage.samples, draw).findLast(([stream]) => stream === q);
        cursors[from[q]] = last ? begin + last[1] + 1 : begin;
      });
      return [stage.samples, (p) => children(from[draw(p)[0]], begins[draw(p)[0]] + draw(p)[1])];
    });
    return (p) => oneAfterAnother(stages, p - (node.first_position || 0));
  },
  sequence({ parts }, ...others) {
    const served = parts.map(({ index, ranges }) => [build(index, ...others), ranges]).flatMap(([child, ranges]) =>
      ranges.map(([begin, end, times]) => [(end - begin) * times, (p) => child(begin + p % (end - begin))]));
    return (p) => oneAfterAnother(served, p);
  },
  skipped({ index, end, left_out: holes, moved, masks }, sources, tableOf) {
    const child = build(index, sources, tableOf);
    const masked = masks.map((mask) => ({ ...mask, ids: mask.file !== null && new Set(tableOf(mask.file).flat()) }));
    const behind = moved.map(([begin, stop]) => [stop - begin, (p) => child(begin + p)]);
    const mark = (p, [q, d, ...span]) => [q, d, ...span, ...(masked.some(({ source, from, ids }) =>
      source === q && p >= from && (!ids || ids.has(d))) ? ['masked'] : [])];
    return (p) => (holes.some(([begin, stop]) => p >= begin && p < stop) ? []
      : (p < end ? child(p) : oneAfterAnother(behind, p - end)).map((span) => mark(p, span)));
  },
};
const build = (node, ...others) => ORDERS[node.order](node, ...others);
const builtOf = (nodes, sources, tableOf, children = nodes.map((node, q) => build(node, [sources[q]], tableOf))) =>
  (q, sample) => children[q](sample).map(([, ...span]) => [q, ...span]);
const rowsOf = ({ common, columns, rows }) => rows.map((row) => Object.assign({}, common,
  ...columns.map((name, k) => (row[k] === null ? {} : { [name]: row[k] }))));
const oneAfterAnother = ([[size, spansOf], ...rest], p) => (p < size ? spansOf(p) : oneAfterAnother(rest, p - size));
function piecesOf({ documents: [begin, end], long_documents: long }, lengths, S) { // of at most S tokens
  const used = (L) => (L <= S || long === 'split' ? L : long === 'skip' ? 0 : S);
  return Array.from(lengths.subarray(begin, end), used).flatMap((tokens, d) =>
    range(Math.ceil(tokens / S), (k) => [0, begin + d, k * S, Math.min(tokens - k * S, S)]));
}
const byLength = (pieces, S, lists = range(S + 1, () => [])) =>
  pieces.forEach((piece) => lists[piece[3]].push(piece)) || lists;
function pack(count, most, least, stacked) { // returns the [length, rank] of the pieces of each bin
  const layers = [], capacity = count.length - 1;
  for (let open = [], length = capacity; length > 0; length--) {
    for (let left = count[length], rank = 0; left > 0;) {
      const [below] = open.filter(({ room }) => room >= length).sort((a, b) => a.room - b.room || a.held - b.held);
      const { room, held, bins: all, covered: before } = below || { room: capacity, held: 0, bins: left, covered: 0 };
      const each = Math.min(stacked || !below ? Math.floor(room / length) : 1, left, most ? most - held : left);
      const bins = Math.min(all - before, Math.floor(left / each));
      layers.push({ below, before, length, each, rank, bins, covered: 0,
        room: room - each * length, held: most && held + each });
      if (below) below.covered += bins;
      open = [...open, layers.at(-1)].filter((layer) =>
        layer.covered < layer.bins && layer.room >= least && (!most || layer.held < most));
      [rank, left] = [rank + bins * each, left - bins * each];
    }
  }
  const inBin = ({ below, before, length, rank, each }, i) => [...(below ? inBin(below, before + i) : []),
    ...range(each, (r) => [length, rank + i * each + r])];
  return layers.flatMap((layer) => range(layer.bins - layer.covered, (i) => inBin(layer, layer.covered + i)));
}
// ---- draws: functions from a position to [stream, number of the draw] ------------------------------------
const double = (text, [, digits, fraction, exponent] = /^0x([01]\.([0-9a-f]+))p([+-]\d+)$/.exec(text)) =>
  parseInt(digits.replace('.', ''), 16) * 2 ** (exponent - 4 * fraction.length);
function drawing(drawn, choose) { // returns the draws behind those counted in drawn
  const first = total(drawn), draws = [], next = (stream) => [stream, drawn[stream]++]; return (p) => {
    while (first + draws.length <= p) draws.push(next(choose(first + draws.length, drawn))); return draws[p - first];
  };
}
const greedy = (shares) => drawing(shares.map(() => 0), (i, drawn, behind = shares.map((share, q) =>
  share * Math.max(i, 1) - drawn[q])) => behind.indexOf(Math.max(...behind)));
const soonest = (weights, due) => range(weights.length).filter((q) => weights[q]).reduce((best, q) =>
  (due[q] * weights[best] < due[best] * weights[q] ? q : best));
function divisor(weights) {
  const shares = weights.map(BigInt), W = total(shares), size = 4096;
  const block = memo((b, t = BigInt(Math.max(2 * b * size - weights.length, 0))) => drawing(shares.map((share) =>
    Number((share * t + W) / (2n * W))), (_, drawn) => soonest(shares, drawn.map((j) => BigInt(2 * j + 1)))));
  return (p) => block(Math.floor(p / size))(p);
}
const inBatches = (draw, size, begins = [0]) => (p) => { // size: of all batches, or a list of those of each stream
  const sizeOf = (b) => size[draw(b)[0]] ?? size;
  while (begins.at(-1) <= p) begins.push(begins.at(-1) + sizeOf(begins.length - 1));
  const b = begins.findLastIndex((begin) => begin <= p);
  return draw(b).map((x, k) => (k ? x * sizeOf(b) + p - begins[b] : x));
};
const MIXING = {
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
    const before = first && MIXING[first.rule]({ ...first, batch: 1 }), earlier = range(starts[0], (i) => before(i)[0]);
    const draw = drawing(columns.map((_, q) => earlier.filter((stream) => stream === q).length), (i) => {
      if (i === starts[1]) {
        shares.shift().forEach((share, q) => { owed[q] += share * BigInt(starts[1] - starts[0]); }); starts.shift();
      }
      const stream = soonest(shares[0], owed.map((x) => UNIT / 2n - x)); owed[stream] -= UNIT; return stream;
    });
    return inBatches((i) => (i < earlier.length ? before(i) : draw(i)), batch);
  },
};
// ---- steps, rows, receipts, files ------------------------------------------------------------------------
function dealt([first, samples, rows], D, M, workOf) { // returns the positions of each micro batch
  const e = Math.floor(samples / (rows / M)), sizes = range(rows / M, (m) => e + (m < samples % (rows / M)));
  const positions = range(samples, (i) => first + i), loads = range(D, () => 0);
  if (!workOf) return sizes.map((size) => positions.splice(0, size));
  const sorted = positions.map((p) => [p, workOf(p)]).sort(([p, v], [q, w]) => w - v || p - q);
  return range(rows / M / D).flatMap((r) => {
    let longer = sizes.slice(r * D, (r + 1) * D).filter((size) => size > e).length, round = range(D, () => []);
    for (const [p, work] of sorted.splice(0, D * e + longer)) {
      const free = range(D).filter((k) => round[k].length < e + (longer > 0));
      const rank = free.reduce((best, k) => (loads[k] < loads[best] ? k : best)); longer -= round[rank].length === e; round[rank].push(p); loads[rank] += work;
    }
    return round;
  });
}
function widthOf({ parts, index, rows, sequence_length: S, ...node }, p, source) { // the S of a sample
  if (parts) return oneAfterAnother(parts.flatMap(({ index: part, ranges }) => ranges.map(([begin, end, times]) =>
    [(end - begin) * times, () => widthOf(part, 0, source)])), p);
  return index ? widthOf(index, Math.min(p, node.end - 1), source)
    : rows ? widthOf(rowsOf({ rows, ...node })[source], 0, 0) : S;
}
const squares = (spans, S) => spans.reduce(([sum, room], [, , , length]) => // the work of a sample
  [sum + Math.min(length, room) ** 2, room - Math.min(length, room)], [0, S])[0];
const LANES = [[0x6A09E667F3BCC909n, 0xBB67AE8584CAA73Bn, 0x3C6EF372FE94F82Bn, 0xA54FF53A5F1D36F1n],
  [0x510E527FADE682D1n, 0x9B05688C2B3E6C1Fn, 0x1F83D9ABFB41BD6Bn, 0x5BE0CD19137E2179n]];
const ENDS = [[33n, 0xFF51AFD7ED558CCDn, 33n, 0xC4CEB9FE1A85EC53n, 33n], SPLIT_MIX];
function receiptOf(position, spans, sources) {
  const [high, low] = LANES.map(([a, b, c, d], k) => finish(spans.reduce((h, [source, x, y, z, masked]) => {
    const key = sources[source].key[k] ^ (masked ? 0x9E3779B97F4A7C15n : 0n);
    return u64(end32(h) * a + key + BigInt(x) * b + BigInt(y) * c + BigInt(z) * d);
  }, BigInt(position)), ENDS[k]));
  return spans.length ? high << 64n | low : 0n;
}
function openSource(pathOf, { path: prefix, fingerprint, bin_bytes: bytes }) {
  const idx = fs.readFileSync(pathOf(`${prefix}.idx`)), n = Number(idx.readBigUInt64LE(18)), m = Number(idx.readBigUInt64LE(26));
  const sizes = new Uint8Array(BigInt64Array.of(BigInt(bytes), BigInt(idx.length), BigInt(n)).buffer);
  const bounds = idx.subarray(34 + 12 * n, 34 + 12 * n + 8 * m), table = idx.subarray(34, 34 + 4 * n);
  const key = hash(Buffer.concat([sizes, table, bounds]));
  if (hex(...key) !== fingerprint) throw new Error(`${prefix}.idx: fingerprint ${hex(...key)}, not ${fingerprint}`);
  return { key, lengths: new Int32Array(new Uint8Array(table).buffer) };
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
  block_steps blocks total digests digest order documents without sequence_length extra seed epochs source parts final_epoch_apart
  name epochs_mixed left_over block_tokens max_documents long_documents capacity packed common weights rule uncounted stages from
  first_position shares begins batch period file changes position first ranges end left_out moved masks from_step note names settings`.split(/\s+/));
const isPlain = (x) => x === null || typeof x !== 'object', sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');
const keysIn = (x) => (isPlain(x) ? [] : Object.entries(x).flatMap(([k, y]) => [...(Array.isArray(x) ? [] : [k]), ...keysIn(y)]));
const textOf = (x) => JSON.stringify(x).replace(/^"\\u0000(\d+)"$/, '$1') // an integer that is no double, see below
  .replace(/[\x7f-\uffff]/g, (c) => `\\u${c.charCodeAt().toString(16).padStart(4, '0')}`);
const canonical = (x) => (isPlain(x) ? textOf(x) : Array.isArray(x) ? `[${x.map(canonical)}]` : `{${Object.keys(x).sort((a, b) =>
  Buffer.from(a).compare(Buffer.from(b))).map((k) => `${textOf(k)}:${canonical(x[k])}`)}}`);
function parse(data) { // refuses what a lock does not have
  const text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(data), lock = JSON.parse(text);
  const exact = JSON.parse(text.replace(/("(?:[^"\\]|\\.)*")|\d{16,}/g, (digits, string) => string ?? `"\\u0000${digits}"`));
  const bare = text.replace(/"(?:[^"\\]|\\.)*"/g, '""'), { settings, ...rest } = lock, unknown = keysIn(rest).find((k) => !KEYS.has(k));
  const faults = { [`unknown key ${unknown}`]: unknown !== undefined, 'number that is no integer': /\d[.eE]/.test(bare),
    'key given twice': bare.match(/""\s*:/g).length > keysIn(lock).length, version: lock.version !== 1,
    format: lock.format !== 'megaindex run lock', dialect: !['megatron', 'neox', 'paddlenlp'].includes(lock.dialect),
    digest: sha256(data.subarray(0, data.lastIndexOf(lock.digest))) !== lock.digest,
    digests: Object.keys(lock.digests).some((name) => sha256(canonical(exact[name])) !== lock.digests[name]) };
  for (const [fault, found] of Object.entries(faults)) if (found) throw new Error(`run.lock: ${fault}`);
  return lock;
}
function main([file, name, what, ...numbers]) {
  const lock = parse(fs.readFileSync(file)), [a, b] = numbers.map(Number);
  const pathOf = (named) => path.resolve(path.dirname(file), lock.root, named), subset = lock.subsets[name];
  const sources = subset.sources.map((row) => openSource(pathOf, rowsOf(lock.sources)[row]));
  const spansOf = build(subset.index, sources, (row, isArray) => tableIn(pathOf(lock.files[row].path), isArray));
  const steps = subset.steps.flatMap(([first, n, count]) => range(count, (k) => [first + k * n, n, n]));
  steps.at(-1)[2] += subset.masked_rows; const made = steps.filter(([, n]) => n > 0), size = subset.receipts.block_steps;
  const workOf = numbers[2] && ((p) => squares(spansOf(p), widthOf(subset.index, p, spansOf(p)[0][0])));
  const batches = memo((step) => dealt(steps[step], a, b, workOf));
  const positionOf = ([step, rank, w]) => batches(step)[Math.floor(w / b) * a + rank][w % b];
  const shown = (p) => (p === undefined ? 'padding' : [p, ...spansOf(p).map((span) => span.join(':'))].join(' '));
  const receipt = (served) => BigInt.asUintN(128, total(served.flatMap(([first, n]) =>
    range(n, (i) => receiptOf(first + i, spansOf(first + i), sources))))).toString(16).padStart(32, '0');
  const lines = what === 'receipts' ? range(b - a, (k) => receipt(made.slice((a + k) * size, (a + k + 1) * size)))
    : fs.readFileSync(0, 'utf8').trim().split('\n').map((line) => shown(positionOf(line.split(' ').map(Number))));
  process.stdout.write(`${lines.join('\n')}\n`);
}
main(process.argv.slice(2));
