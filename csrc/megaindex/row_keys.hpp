// Keys of rows: a hash of the content of the source and of the input tokens of a row, and the pass,
// as megaindex/kernels/reference/row_keys.py specifies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megaindex/receipt.hpp"

namespace megaindex {

struct RowKeys {
  int32_t* exposures;  // set to -1 in rows without input tokens
  int32_t* sources;
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

// Write source and key of each of n rows, whose first `width` tokens are input; contents has the two
// words of each source's content fingerprint.
inline void row_keys(const ReceiptSpans& spans, int64_t n, int64_t width, const uint64_t* contents,
                     const RowKeys& out) {
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
    out.sources[k] = first;
    if (first == detail::kNothing) {
      out.exposures[k] = detail::kNothing;
      out.keys[k] = 0;
    } else {
      low += static_cast<uint64_t>(out.exposures[k]) * detail::kExposure;
      out.keys[k] = static_cast<int64_t>(detail::LowLane::mix(low));
    }
    if (out.high != nullptr) out.high[k] = static_cast<int64_t>(high);
  }
}

}  // namespace megaindex
