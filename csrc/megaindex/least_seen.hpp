// The least-seen order: at each step the sample whose tokens have been served least often, the
// steps before included.
//
// Tokens are given as segments, which runs cover as a whole. Scores only grow, so a heap of
// outdated scores suffices: its least sample is taken if its recomputed score is still the least.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "megaindex/poll.hpp"

namespace megaindex {

struct SegmentRuns {
  const int64_t* begins;      // run r covers segments begins[r] ... ends[r] - 1
  const int64_t* ends;
  const int64_t* row_splits;  // runs of sample k: row_splits[k] ... row_splits[k + 1] - 1
  int64_t num_samples;
};

// Write `count` samples to out, the lower number first among equals. widths are the tokens of each
// segment; counts, how often they have been served, is updated.
template <class Poll = NoPoll>
void least_seen(const SegmentRuns& runs, const int64_t* widths, int64_t* counts, int64_t count,
                int64_t* out, Poll poll = {}) {
  using Scored = std::pair<int64_t, int64_t>;  // score, sample
  const auto visit = [&](int64_t sample, auto&& body) {
    for (int64_t r = runs.row_splits[sample]; r < runs.row_splits[sample + 1]; ++r) {
      for (int64_t s = runs.begins[r]; s < runs.ends[r]; ++s) body(s);
    }
  };
  const auto score = [&](int64_t sample) {
    int64_t sum = 0;
    visit(sample, [&](int64_t s) { sum += counts[s] * widths[s]; });
    return sum;
  };
  std::vector<Scored> heap;
  heap.reserve(static_cast<size_t>(runs.num_samples));
  for (int64_t k = 0; k < runs.num_samples; ++k) heap.emplace_back(score(k), k);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  for (int64_t taken = 0, steps = 0; taken < count; ++steps) {
    if (steps % 65536 == 0) poll();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const int64_t sample = heap.back().second;
    const Scored now{score(sample), sample};
    if (heap.size() > 1 && now > heap.front()) {
      heap.back() = now;
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
      continue;
    }
    heap.pop_back();
    visit(sample, [&](int64_t s) { ++counts[s]; });
    out[taken++] = sample;
  }
}

}  // namespace megaindex
