// Receipts: 128-bit sums over samples of a hash of (position, what was served there).
//
// A sample is the runs of tokens it reads: (source, document, offset, length). Sums commute, so ranks
// and workers add their own samples, and one swapped, repeated or shifted sample changes the sum.
#pragma once

#include <cstdint>

namespace megaindex {

struct ReceiptSpans {
  const int32_t* source;
  const int64_t* document;
  const int64_t* offset;
  const int64_t* length;
  const int64_t* row_splits;  // runs of sample k: row_splits[k] ... row_splits[k + 1] - 1
};

namespace detail {

// Odd multipliers without structure: fractional parts of square roots of the first eight primes, as
// in SHA-512. The finalisers are those of MurmurHash3 and SplitMix64.
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

// One lane after the run at `at`, whose source has the fingerprint word `key`. The multiplication by
// Lane::chain makes the order of runs count; the finaliser is left to the end of the sample.
template <class Lane>
inline uint64_t after_run(uint64_t h, uint64_t key, const ReceiptSpans& spans, int64_t at) {
  return (h ^ (h >> 32)) * Lane::chain + key +
         static_cast<uint64_t>(spans.document[at]) * Lane::document +
         static_cast<uint64_t>(spans.offset[at]) * Lane::offset +
         static_cast<uint64_t>(spans.length[at]) * Lane::length;
}

}  // namespace detail

// Adds the hash of each of n samples to its block: sums has a high and a low word a block. keys holds
// the two words of each source's fingerprint.
inline void receipt_add(const int64_t* positions, int64_t n, const ReceiptSpans& spans,
                        const uint64_t* keys, const int64_t* blocks, uint64_t* sums) {
  uint64_t sum_high = 0, sum_low = 0;  // of the block so far: neighbours mostly share one
  const auto add_to = [&](int64_t block) {
    uint64_t* sum = sums + 2 * block;
    sum[1] += sum_low;
    sum[0] += sum_high + (sum[1] < sum_low);  // the carry
    sum_high = sum_low = 0;
  };
  for (int64_t k = 0; k < n; ++k) {
    auto high = static_cast<uint64_t>(positions[k]), low = high;
    for (int64_t at = spans.row_splits[k]; at < spans.row_splits[k + 1]; ++at) {
      const uint64_t* key = keys + 2 * spans.source[at];
      high = detail::after_run<detail::HighLane>(high, key[0], spans, at);
      low = detail::after_run<detail::LowLane>(low, key[1], spans, at);
    }
    high = detail::HighLane::mix(high);
    low = detail::LowLane::mix(low);
    sum_low += low;
    sum_high += high + (sum_low < low);
    if (k + 1 == n || blocks[k + 1] != blocks[k]) add_to(blocks[k]);
  }
}

}  // namespace megaindex
