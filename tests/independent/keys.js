// Numbers of a key as docs/keys.md specifies them, written from that page alone.
//
//   node keys.js vectors                      the golden file tests/golden/keys.json
//   node keys.js masks COUNT N STREAM SHARE   a byte for each of N numbers of the keys
//                                             mix(0), mix(1), …: 1 if it is below SHARE
"use strict";
const u64 = (x) => BigInt.asUintN(64, x);
const GAMMA = 0x9e3779b97f4a7c15n;

function mix(x) {
  x = u64((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n);
  x = u64((x ^ (x >> 27n)) * 0x94d049bb133111ebn);
  return x ^ (x >> 31n);
}

function streamNumber(stream) {
  if (typeof stream !== "string") return BigInt(stream);
  let number = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(stream)) {
    number = u64((number ^ BigInt(byte)) * 0x100000001b3n);
  }
  return number;
}

function columns(stream, n) {
  const first = streamNumber(stream);
  return Array.from({ length: n }, (_, i) => mix(u64(first + BigInt(i + 1) * GAMMA)));
}

const word = (mixedKey, column) => mix(mixedKey ^ column);
const number = (word) => Number(word >> 11n) * 2 ** -53;

// Philox4x64-10 of Salmon et al. (2011), as NumPy counts: the first block has counter 1
function philox(key, stream, blocks) {
  const words = [];
  for (let block = 1n; block <= BigInt(blocks); block++) {
    let [a, b, c, d] = [block, 0n, 0n, 0n];
    let [k, l] = [u64(key), streamNumber(stream)];
    for (let round = 0; round < 10; round++) {
      const p = a * 0xd2e7470ee14c6c93n, q = c * 0xca5a826395121157n;
      [a, b, c, d] = [(q >> 64n) ^ b ^ k, u64(q), (p >> 64n) ^ d ^ l, u64(p)];
      k = u64(k + GAMMA);
      l = u64(l + 0xbb67ae8584caa73bn);
    }
    words.push(a, b, c, d);
  }
  return words;
}

function vectors() {
  const keys = ["0", "1", "-1", "5577006791947779410", "-9223372036854775808"];
  const streams = [0, 1, "18446744073709551615n", "mlm", "fim", "Maße"];
  const hex = (x) => x.toString(16).padStart(16, "0");
  const rows = [];
  for (const text of streams) {
    const stream = /^\d+n$/.test(text) ? BigInt(text.slice(0, -1)) : text;
    for (const key of keys) {
      const words = columns(stream, 4).map((column) => word(mix(u64(BigInt(key))), column));
      rows.push({
        key,
        stream: typeof stream === "string" ? stream : null,
        number: streamNumber(stream).toString(),
        words: words.map(hex),
        uniform: words.map(number),
        philox: philox(BigInt(key), stream, 2).map(hex),
      });
    }
  }
  const command = "node tests/independent/keys.js vectors > tests/golden/keys.json";
  console.log(JSON.stringify({ command, node: process.version, rows }));
}

function masks(count, n, stream, share) {
  const places = columns(stream, n);
  const bytes = Buffer.alloc(count * n);
  for (let k = 0; k < count; k++) {
    const mixed = mix(mix(BigInt(k))); // the key of row k is mix(k)
    for (let i = 0; i < n; i++) bytes[k * n + i] = number(word(mixed, places[i])) < share ? 1 : 0;
  }
  process.stdout.write(bytes);
}

const [mode, count, n, stream, share] = process.argv.slice(2);
if (mode === "vectors") vectors();
else masks(Number(count), Number(n), stream, Number(share));
