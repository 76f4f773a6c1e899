// Blends by the frameworks' greedy rule: the dataset of each position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "megaindex/blending_avx2.hpp"
#include "megaindex/blending_stretches.hpp"
#include "megaindex/blending_window.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

constexpr int64_t kBlendPollEvery = int64_t{1} << 16;

// Return whether windows are exact for these weights: their bounds of rounding errors are those of
// products, and counts must differ by 1. For larger weights and those near the smallest doubles the
// plain scan is used.
inline bool fits_windows(const BlendRule& rule, int64_t end) {
  constexpr double kLeast = 1e-270;
  const double draws = blend_multiplier(end);
  return draws <= kMostBehind &&
         std::all_of(rule.weights, rule.weights + rule.num_datasets, [draws](double w) {
           return w == 0 || (w >= kLeast && w * draws <= kMostBehind);
         });
}

template <class Vector, class Index, class Poll>
void scan_blend(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                const BlendOutput<Index>& out, Poll& poll) {
  ScanBlend<Vector> scan(rule, counts);
  for (int64_t n = begin; n < end;) {
    const int64_t stop = std::min(end, n + kBlendPollEvery);
    scan.advance(n, stop, out);
    n = stop;
    poll();
  }
}

// Draw by windows, and by the plain scan for stretches where that is faster.
template <class Vector, class Index, class Poll>
void window_blend(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                  const BlendOutput<Index>& out, Poll& poll) {
  WindowBlend<Vector> window(rule, counts);
  if (!window.in_turn()) return scan_blend<Vector>(rule, begin, end, counts, out, poll);
  constexpr int64_t kShortest = 64;
  int64_t stretch = kShortest;
  window.load();
  for (int64_t n = begin; n < end;) {
    const int64_t from = n;
    const int64_t stop = std::min(end, n + kBlendPollEvery);
    n = window.advance(n, stop, out);
    if (n - from > 64 * stretch) stretch = kShortest;
    if (n < stop) {
      const int64_t resume = std::min(end, n + stretch);
      scan_blend<Vector>(rule, n, resume, counts, out, poll);
      stretch = std::min(2 * stretch, kBlendPollEvery);
      n = resume;
      window.load();
    } else {
      poll();
    }
  }
}

// Return whether any other way would take longer to set up than all the comparisons.
inline bool are_few(int64_t draws, int64_t num_datasets) {
  return draws <= 8 || (draws <= 320 && num_datasets <= 16);
}

// Compare all datasets for every draw, without arrays of its own.
template <class Index>
void compare_few(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                 const BlendOutput<Index>& out) {
  for (int64_t n = begin; n < end; ++n) {
    const double d = blend_multiplier(n);
    double top = -kNever;
    int64_t drawn = 0;
    for (int64_t i = 0; i < rule.num_datasets; ++i) {
      const double value = rule.weights[i] * d - rule.entry_count(i, counts[i]);
      drawn = value > top ? i : drawn;
      top = std::max(top, value);
    }
    out.write(n, drawn, counts[drawn]++);
  }
}

template <class Vector, class Index, class Poll>
void draw_in_sequence(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                      const BlendOutput<Index>& out, Poll& poll) {
  constexpr int64_t kFewDraws = 256;  // the scan's, in the time in which windows are set up
  if (are_few(end - begin, rule.num_datasets)) {
    compare_few(rule, begin, end, counts, out);
  } else if (end - begin > kFewDraws &&
             (rule.num_datasets <= kMaxLanes || fits_windows(rule, end))) {
    window_blend<Vector>(rule, begin, end, counts, out, poll);
  } else {
    scan_blend<Vector>(rule, begin, end, counts, out, poll);
  }
}

// Draw by stretches, and in sequence for a while where those do not follow from each other. Return
// the position reached, from which too few draws are left.
template <class Vector, class Index, class Poll>
int64_t stretch_blend(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                      const BlendOutput<Index>& out, Poll& poll) {
  if constexpr (Vector::kMostStretched > 0) {
    constexpr int64_t kShortest = 4096;
    if (end - begin < StretchBlend<Vector>::fewest_draws(rule.num_datasets)) return begin;
    StretchBlend<Vector> stretches(rule, counts);
    int64_t while_slow = kShortest;
    if (begin == 0) compare_few(rule, begin++, 1, counts, out);
    while (begin < end) {
      const int64_t reached = stretches.advance(begin, end, out);
      if (reached == begin) break;
      begin = reached;
      if (stretches.slow()) {
        const int64_t stop = std::min(end, begin + while_slow);
        draw_in_sequence<Vector>(rule, begin, stop, counts, out, poll);
        begin = stop;
        while_slow *= 2;
      } else {
        while_slow = kShortest;
      }
      poll();
    }
  }
  return begin;
}

template <class Vector, class Index, class Poll>
void draw_blend(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
                const BlendOutput<Index>& out, Poll& poll) {
  const auto is_exact = [](int64_t count) {
    return 0 <= count && static_cast<double>(count) <= kMostBehind;
  };
  if (rule.num_datasets <= Vector::kMostStretched && fits_windows(rule, end) &&
      std::all_of(counts, counts + rule.num_datasets, is_exact)) {
    begin = stretch_blend<Vector>(rule, begin, end, counts, out, poll);
  }
  draw_in_sequence<Vector>(rule, begin, end, counts, out, poll);
}

// Return the dataset that every draw is from, or -1. After n draws, at most n of them from this
// dataset, it is behind by more than any other by n * (its weight - 1 - the other's) or more. Among
// weights that sum to 1 there is such a dataset only if it is alone.
inline int64_t only_drawn(const BlendRule& rule, int64_t begin, int64_t end,
                          const int64_t* counts) {
  const double* heaviest = std::max_element(rule.weights, rule.weights + rule.num_datasets);
  const int64_t i = heaviest - rule.weights;
  if (rule.num_datasets == 1) return i;
  if (rule.limits != nullptr || counts[i] > begin) return -1;
  if (*heaviest * blend_multiplier(end) > kMostBehind) return -1;
  constexpr double kRounding = 1e-9;  // far above the rounding error
  const double above = *heaviest * (1 - kRounding) - 1;
  const auto lighter = [above](double w) { return w < above; };
  const int64_t others = std::count_if(rule.weights, rule.weights + rule.num_datasets, lighter);
  return others == rule.num_datasets - 1 ? i : -1;
}

template <class Index, class Poll>
void blend(const BlendRule& rule, int64_t begin, int64_t end, int64_t* counts,
           const BlendOutput<Index>& out, Poll& poll) {
  if (are_few(end - begin, rule.num_datasets)) {
    return compare_few(rule, begin, end, counts, out);
  }
  const int64_t only = only_drawn(rule, begin, end, counts);
  if (only >= 0) {
    for (int64_t n = begin; n < end; poll()) {
      const int64_t first = n - out.origin, draws = std::min(end - n, kBlendPollEvery);
      if (out.dataset != nullptr) std::fill_n(out.dataset + first, draws, static_cast<Index>(only));
      if (out.sample != nullptr) {
        std::iota(out.sample + first, out.sample + first + draws, counts[only]);
      }
      counts[only] += draws;
      n += draws;
    }
    return;
  }
#ifdef MEGAINDEX_HAS_AVX2
  if (has_avx2()) {
    return draw_blend<Avx2Vector>(rule, begin, end, counts, out, poll);
  }
#endif
  draw_blend<PortableVector>(rule, begin, end, counts, out, poll);
}

// Draw positions begin ... end - 1. counts[i] is the number of draws from dataset i before `begin`,
// and is advanced to `end`. Either output may be null. Weights are finite, not negative, of any
// sum.
template <class Index, class Poll = NoPoll>
void blend_greedy(const double* weights, int64_t num_datasets, int64_t begin, int64_t end,
                  int64_t* counts, Index* dataset_index, int64_t* dataset_sample_index,
                  Poll poll = {}) {
  blend(BlendRule{weights, nullptr, num_datasets}, begin, end, counts,
        BlendOutput<Index>{dataset_index, dataset_sample_index, begin}, poll);
}

// Draw as blend_greedy with weights sizes[i] / sum, at most sizes[i] times from dataset i; `end` is
// at most the sum. An empty dataset is never drawn.
template <class Index, class Poll = NoPoll>
void blend_exhaustive(const int64_t* sizes, int64_t num_datasets, int64_t begin, int64_t end,
                      int64_t* counts, Index* dataset_index, int64_t* dataset_sample_index,
                      Poll poll = {}) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_datasets; ++i) total += sizes[i];
  std::vector<double> weights(static_cast<size_t>(num_datasets));
  for (int64_t i = 0; i < num_datasets; ++i) {
    at(weights, i) = static_cast<double>(sizes[i]) / static_cast<double>(total);
  }
  blend(BlendRule{weights.data(), sizes, num_datasets}, begin, end, counts,
        BlendOutput<Index>{dataset_index, dataset_sample_index, begin}, poll);
}

}  // namespace megaindex
