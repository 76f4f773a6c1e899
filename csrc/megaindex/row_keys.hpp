// Keys of rows: a hash of the content of the source and of the input tokens of a row, and the pass,
// as megaindex/kernels/reference/row_keys.py specifies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megaindex/receipt.hpp"

namespace megaindex {

struct RowPasses {
  const int64_t* numbers;  // of the samples, among those of all sources
  const int64_t* starts;   // first number of each run of samples of one pass, increasing
  const int64_t* passes;   // the pass of each run
  int64_t runs;
};

struct RowKeys {
  int64_t* samples;
  int32_t* sources;
  int32_t* exposures;
  int64_t* keys;
  int64_t* high;  // or nullptr
};

namespace detail {

constexpr uint64_t kExposure = 0x9e3779b97f4a7c15;
constexpr int32_t kNothing = -1;

template <class Lane>
inline uint64_t after_input(uint64_t h, uint64_t content, const ReceiptSpans& spans, int64_t at,
                            int64_t taken) {
  h = Lane::mix(h + Lane::chain + content + static_cast<uint64_t>(spans.document[at]));
  h = Lane::mix(h + Lane::chain + static_cast<uint64_t>(spans.offset[at]));
  return Lane::mix(h + Lane::chain + static_cast<uint64_t>(taken));
}

}  // namespace detail

// Write the fields of n rows, whose first `width` tokens are input; contents has the two words of
// each source's content fingerprint.
inline void row_keys(const int64_t* positions, const ReceiptSpans& spans, int64_t n, int64_t width,
                     const uint64_t* contents, const RowPasses& of, const RowKeys& out) {
  for (int64_t k = 0; k < n; ++k) {
    uint64_t high = 0, low = 0;
    int32_t first = detail::kNothing;
    int64_t left = width;
    for (int64_t at = spans.row_splits[k]; at < spans.row_splits[k + 1]; ++at) {
      const int64_t taken = std::min(left, spans.length[at]);
      if (taken < 1) continue;
      left -= taken;
      if (first == detail::kNothing) first = spans.source[at];
      const uint64_t* content = contents + 2 * spans.source[at];
      high = detail::after_input<detail::HighLane>(high, content[0], spans, at, taken);
      low = detail::after_input<detail::LowLane>(low, content[1], spans, at, taken);
    }
    int64_t pass = detail::kNothing;
    if (first != detail::kNothing) {
      const int64_t* next = std::upper_bound(of.starts, of.starts + of.runs, of.numbers[k]);
      pass = of.passes[std::max<int64_t>(next - of.starts, 1) - 1];
      low = detail::LowLane::mix(low + static_cast<uint64_t>(pass) * detail::kExposure);
    }
    out.samples[k] = first == detail::kNothing ? detail::kNothing : positions[k];
    out.sources[k] = first;
    out.exposures[k] = static_cast<int32_t>(pass);
    out.keys[k] = static_cast<int64_t>(low);
    if (out.high != nullptr) out.high[k] = static_cast<int64_t>(high);
  }
}

}  // namespace megaindex
