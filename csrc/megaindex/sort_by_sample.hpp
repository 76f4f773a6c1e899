// Sorting the entries of a shuffle by sample.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megaindex/invalid_input.hpp"

namespace megaindex {

namespace detail {

constexpr int kWindowBits = 14;  // samples whose positions fit the L1 cache
constexpr int64_t kWindow = int64_t{1} << kWindowBits;

inline uint32_t sample_at(const uint32_t* shuffle, int64_t position, int64_t samples) {
  const uint32_t sample = shuffle[position];
  if (sample >= samples) {
    throw InvalidInput("shuffle_index: entry " + std::to_string(position) + " is " +
                       std::to_string(sample) + ", sample_index holds " + std::to_string(samples) +
                       " samples; build the index again");
  }
  return sample;
}

}  // namespace detail

// Sort entries begin ... begin + n - 1 of a shuffle of the samples 0 ... samples - 1 by sample:
// each becomes sample << 32 | its place among these n, from 0. Throw InvalidInput if a sample
// occurs twice.
//
// Entries are first sorted into windows of samples, with one sequential stream of writes for each
// window, and then within each window, which fits a cache. Direct writes would be cache misses.
inline void sort_by_sample(const uint32_t* shuffle, int64_t samples, int64_t begin, int64_t n,
                           uint64_t* out) {
  using detail::kWindow;
  using detail::kWindowBits;
  std::vector<int64_t> next(static_cast<size_t>((samples >> kWindowBits) + 2));
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t sample = detail::sample_at(shuffle, begin + k, samples);
    ++next[(sample >> kWindowBits) + 1];
  }
  for (size_t w = 1; w < next.size(); ++w) next[w] += next[w - 1];
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t sample = shuffle[begin + k];
    out[next[sample >> kWindowBits]++] = uint64_t{sample} << 32 | static_cast<uint64_t>(k);
  }
  std::vector<uint32_t> window(static_cast<size_t>(kWindow));  // place + 1, or 0 without an entry
  int64_t from = 0;
  for (size_t w = 0; from < n; ++w) {  // next[w] is where window w ends
    const int64_t to = next[w];
    const uint64_t first = static_cast<uint64_t>(w) << kWindowBits;
    for (int64_t at = from; at < to; ++at) {
      const uint64_t sample = out[at] >> 32, place = out[at] & UINT32_MAX;
      uint32_t& there = window[sample - first];
      if (there != 0) {
        throw InvalidInput("shuffle_index: entries " + std::to_string(begin + there - 1) + " and " +
                           std::to_string(begin + static_cast<int64_t>(place)) + " are both " +
                           std::to_string(sample) + "; build the index again");
      }
      there = static_cast<uint32_t>(place + 1);
    }
    for (uint64_t k = 0; from < to; ++k) {  // a branch on window[k] would be mispredicted
      out[from] = (first + k) << 32 | (window[k] - 1);
      from += window[k] != 0;
      window[k] = 0;
    }
  }
}

}  // namespace megaindex
