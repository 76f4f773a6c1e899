// Receipts: 128-bit sums over samples of a hash of the position and the token runs served there.
//
// A run is (source, document, offset, length). Sums commute, so that ranks and workers can add
// their own samples; swapping, repeating or shifting one sample changes the sum.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megaindex/cpu.hpp"

namespace megaindex {

struct ReceiptSpans {
  const int32_t* source;
  const int64_t* document;
  const int64_t* offset;
  const int64_t* length;
  const int64_t* row_splits;  // runs of sample k: row_splits[k] ... row_splits[k + 1] - 1
};

namespace detail {

// Odd multipliers: fractional parts of the square roots of the first eight primes, as in SHA-512.
// The finalisers are those of MurmurHash3 and SplitMix64.
struct HighLane {
  static constexpr uint64_t chain = 0x6a09e667f3bcc909, document = 0xbb67ae8584caa73b,
                            offset = 0x3c6ef372fe94f82b, length = 0xa54ff53a5f1d36f1;
  static uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 33)) * 0xff51afd7ed558ccd;
    h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53;
    return h ^ (h >> 33);
  }
};
struct LowLane {
  static constexpr uint64_t chain = 0x510e527fade682d1, document = 0x9b05688c2b3e6c1f,
                            offset = 0x1f83d9abfb41bd6b, length = 0x5be0cd19137e2179;
  static uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
    h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
    return h ^ (h >> 31);
  }
};

// Return a lane after the run at `at`, whose source has the fingerprint word `key`. Multiplying by
// Lane::chain makes the hash depend on the order of runs. The finaliser is applied once per sample.
template <class Lane>
inline __attribute__((always_inline)) uint64_t after_run(uint64_t h, uint64_t key,
                                                         const ReceiptSpans& spans, int64_t at) {
  return (h ^ (h >> 32)) * Lane::chain + key +
         static_cast<uint64_t>(spans.document[at]) * Lane::document +
         static_cast<uint64_t>(spans.offset[at]) * Lane::offset +
         static_cast<uint64_t>(spans.length[at]) * Lane::length;
}

// Samples that have one run each, of one source, are hashed 8 at a time in a loop that is compiled
// to vector code.
constexpr int64_t kLikeSamples = 8;

inline bool are_alike(const ReceiptSpans& spans, int64_t first) {
  const int64_t run = spans.row_splits[first];
  int64_t other_runs = spans.row_splits[first + kLikeSamples] - (run + kLikeSamples);
  for (int64_t k = 0; k < kLikeSamples; ++k) other_runs |= spans.row_splits[first + k] - (run + k);
  if (other_runs != 0) return false;
  int32_t other_sources = 0;
  for (int64_t k = 1; k < kLikeSamples; ++k) {
    other_sources |= spans.source[run + k] ^ spans.source[run];
  }
  return other_sources == 0;
}

template <class Lane>
inline __attribute__((always_inline)) void hash_alike(const int64_t* positions,
                                                      const ReceiptSpans& spans,
                                                      const uint64_t* keys, int64_t first,
                                                      uint64_t* hashes) {
  const int64_t run = spans.row_splits[first];
  const uint64_t key = keys[2 * spans.source[run]];
  for (int64_t k = 0; k < kLikeSamples; ++k) {
    const auto position = static_cast<uint64_t>(positions[first + k]);
    hashes[k] = Lane::mix(after_run<Lane>(position, key, spans, run + k));
  }
}

MEGAINDEX_AVX2 inline void hash_alike_avx2(const int64_t* positions, const ReceiptSpans& spans,
                                           const uint64_t* keys, int64_t first, uint64_t* high,
                                           uint64_t* low) {
  hash_alike<HighLane>(positions, spans, keys, first, high);
  hash_alike<LowLane>(positions, spans, keys + 1, first, low);
}

// Compute both lanes of sample k.
inline void hash_sample(int64_t position, const ReceiptSpans& spans, const uint64_t* keys, int64_t k,
                        uint64_t& high, uint64_t& low) {
  high = low = static_cast<uint64_t>(position);
  for (int64_t at = spans.row_splits[k]; at < spans.row_splits[k + 1]; ++at) {
    const uint64_t* key = keys + 2 * spans.source[at];
    high = after_run<HighLane>(high, key[0], spans, at);
    low = after_run<LowLane>(low, key[1], spans, at);
  }
  high = HighLane::mix(high);
  low = LowLane::mix(low);
}

}  // namespace detail

// Add the hash of each of n samples to its block: sums has a high and a low word for each block,
// keys the two words of each source's fingerprint.
inline void receipt_add(const int64_t* positions, int64_t n, const ReceiptSpans& spans,
                        const uint64_t* keys, const int64_t* blocks, uint64_t* sums) {
  uint64_t sum_high = 0, sum_low = 0;  // of the current block, which successive samples mostly share
  const auto add_to = [&](int64_t block) {
    uint64_t* sum = sums + 2 * block;
    sum[1] += sum_low;
    sum[0] += sum_high + (sum[1] < sum_low);  // the carry
    sum_high = sum_low = 0;
  };
  const auto add = [&](int64_t k, uint64_t high, uint64_t low) {
    sum_low += low;
    sum_high += high + (sum_low < low);
    if (k + 1 == n || blocks[k + 1] != blocks[k]) add_to(blocks[k]);
  };
  const bool vectors = has_avx2();
  uint64_t high[detail::kLikeSamples], low[detail::kLikeSamples];
  for (int64_t k = 0; k < n;) {
    const int64_t count = std::min(n - k, detail::kLikeSamples);
    if (vectors && count == detail::kLikeSamples && detail::are_alike(spans, k)) {
      detail::hash_alike_avx2(positions, spans, keys, k, high, low);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        detail::hash_sample(positions[k + i], spans, keys, k + i, high[i], low[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i, ++k) add(k, high[i], low[i]);
  }
}

}  // namespace megaindex
