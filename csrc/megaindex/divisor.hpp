// Blends by Webster's divisor rule: draw the dataset with the largest weight / (2 * count + 1), the
// lowest index among equals. Integer weights are compared exactly.
//
// The draw that takes dataset i from k to k + 1 happens at "time" (2k + 1) / weights[i], whatever
// else is drawn. So the counts at a time follow by division, and a range of draws by sorting the
// draws within a range of times. Times are scaled by the sum of the weights, so that a draw takes 2
// units on average.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "megaindex/invalid_input.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

__extension__ typedef __int128 Wide;

struct DivisorDraw {
  double time;  // since the beginning of the stretch, rounded
  int64_t count;
  int32_t dataset;
};

// Return the sum of the weights; throw if products of weights and positions could overflow.
inline Wide divisor_sum(const uint64_t* weights, int64_t num_datasets, int64_t position) {
  const auto too_large = [](uint64_t weight) { return weight >= uint64_t{1} << 53; };
  const Wide sum = std::accumulate(weights, weights + num_datasets, Wide{0});
  if (std::any_of(weights, weights + num_datasets, too_large) || sum <= 0 || sum >> 63 != 0) {
    throw InvalidInput("weights: each must be below 2**53, and their sum positive and below 2**63");
  }
  if (position < 0 || position > int64_t{1} << 60) {
    throw InvalidInput("position: must be from 0 to 2**60, got " + std::to_string(position));
  }
  return sum;
}

class DivisorStretch {
 public:
  DivisorStretch(const uint64_t* weights, int64_t num_datasets, Wide sum)
      : weights_(weights), num_datasets_(num_datasets), sum_(sum) {}

  // Return whether `counts` are those before `position`: as many draws, the last before the next.
  bool reaches(int64_t position, const int64_t* counts) const {
    DivisorDraw last{-1, 0, -1};
    DivisorDraw next{-1, 0, -1};
    Wide drawn = 0;
    for (int64_t i = 0; i < num_datasets_; ++i) {
      if (counts[i] < 0 || (weights_[i] == 0 && counts[i] > 0)) return false;
      if (weights_[i] == 0) continue;
      const auto dataset = static_cast<int32_t>(i);
      const DivisorDraw after{0, counts[i], dataset};
      const DivisorDraw before{0, counts[i] - 1, dataset};
      if (next.dataset < 0 || exactly_before(after, next)) next = after;
      if (counts[i] > 0 && (last.dataset < 0 || exactly_before(last, before))) last = before;
      drawn += counts[i];
    }
    return drawn == position && (last.dataset < 0 || exactly_before(last, next));
  }

  // Find the draws from `position`, where the counts are `counts`, to time 2 * (position + length).
  // Return their number, which differs from `length` by at most num_datasets.
  int64_t find(int64_t position, int64_t length, const int64_t* counts) {
    const auto room = static_cast<size_t>(length + num_datasets_ + 1);
    draws_.resize(room);
    order_.resize(room);
    num_draws_ = 0;
    largest_ = 0;
    for (int64_t i = 0; i < num_datasets_; ++i) {
      if (weights_[i] > 0) collect(i, 2 * position, 2 * (position + length), counts[i]);
    }
    sort(length);
    return num_draws_;
  }

  // The k-th draw found, in order of time.
  const DivisorDraw& operator[](int64_t k) const { return draws_[order_[static_cast<size_t>(k)]]; }

 private:
  void collect(int64_t i, int64_t begin, int64_t end, int64_t count) {
    const Wide weight = static_cast<Wide>(weights_[i]);
    const Wide next = (2 * static_cast<Wide>(count) + 1) * sum_;
    const double over_weight = 1 / static_cast<double>(weights_[i]);
    const double first = static_cast<double>(next - begin * weight) * over_weight;
    const double step = 2 * static_cast<double>(sum_) * over_weight;
    Wide left = end * weight - next;
    double time = first;
    for (int64_t k = 0; left >= 0; ++k, left -= 2 * sum_) {
      time = first + static_cast<double>(k) * step;
      draws_[static_cast<size_t>(num_draws_++)] = {time, count + k, static_cast<int32_t>(i)};
    }
    largest_ = std::max({largest_, std::fabs(first), std::fabs(time)});
  }

  // Sort into buckets of about one draw, then exactly among neighbours, which may be in different
  // buckets because times are rounded.
  void sort(int64_t length) {
    const auto bucket = [length](const DivisorDraw& draw) {
      const double half = std::min(std::max(draw.time / 2, 0.0), static_cast<double>(length - 1));
      return static_cast<size_t>(half);
    };
    const auto size = static_cast<size_t>(num_draws_);
    starts_.assign(static_cast<size_t>(length) + 1, 0);
    for (size_t k = 0; k < size; ++k) ++starts_[bucket(draws_[k]) + 1];
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    for (size_t k = 0; k < size; ++k) {
      order_[starts_[bucket(draws_[k])]++] = static_cast<uint32_t>(k);
    }
    for (size_t k = 1; k < size; ++k) {
      const uint32_t draw = order_[k];
      size_t to = k;
      for (; to > 0 && before(draws_[draw], draws_[order_[to - 1]]); --to) {
        order_[to] = order_[to - 1];
      }
      order_[to] = draw;
    }
  }

  bool before(const DivisorDraw& a, const DivisorDraw& b) const {
    // a computed time has at most five rounding errors
    const double apart = 16 * std::numeric_limits<double>::epsilon() * largest_;
    return std::fabs(a.time - b.time) > apart ? a.time < b.time : exactly_before(a, b);
  }

  bool exactly_before(const DivisorDraw& a, const DivisorDraw& b) const {
    const Wide odd_a = 2 * static_cast<Wide>(a.count) + 1;
    const Wide odd_b = 2 * static_cast<Wide>(b.count) + 1;
    const Wide time_a = odd_a * static_cast<Wide>(weights_[b.dataset]);
    const Wide time_b = odd_b * static_cast<Wide>(weights_[a.dataset]);
    return time_a != time_b ? time_a < time_b : a.dataset < b.dataset;
  }

  const uint64_t* weights_;
  int64_t num_datasets_;
  Wide sum_;
  double largest_ = 0;  // absolute value of a time
  int64_t num_draws_ = 0;
  std::vector<DivisorDraw> draws_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> starts_;  // of each bucket in order_
};

// Draw positions begin ... end - 1. counts[i] is the number of draws from dataset i before `begin`,
// as of divisor_counts, and is advanced to `end`. Either output may be null. Throw InvalidInput for
// weights or an `end` out of range, and for other counts.
template <class Index, class Poll = NoPoll>
void divisor_fill(const uint64_t* weights, int64_t num_datasets, int64_t begin, int64_t end,
                  int64_t* counts, Index* dataset_index, int64_t* dataset_sample_index,
                  Poll poll = {}) {
  constexpr int64_t kLength = 4096;
  DivisorStretch stretch(weights, num_datasets, divisor_sum(weights, num_datasets, end));
  if (!stretch.reaches(begin, counts)) {
    throw InvalidInput("counts: must be those of the divisor rule before `begin`; take them from "
                       "divisor_counts");
  }
  for (int64_t n = begin; n < end;) {
    const int64_t length = std::max(std::min(kLength, end - n), 2 * num_datasets);
    const int64_t found = std::min(stretch.find(n, length, counts), end - n);
    for (int64_t k = 0; k < found; ++k, ++n) {
      const DivisorDraw& draw = stretch[k];
      if (dataset_index != nullptr) dataset_index[n - begin] = static_cast<Index>(draw.dataset);
      if (dataset_sample_index != nullptr) dataset_sample_index[n - begin] = draw.count;
      counts[draw.dataset] = draw.count + 1;
    }
    poll();
  }
}

// Compute the counts before `position`. Until time m / sum, floor((weights[i] * m + sum) / (2 *
// sum)) draws are from dataset i; this is a rounded quotient, which differs by at most a half. So
// until m = 2 * position - num_datasets there are at most `position` draws, and at most
// num_datasets remain.
inline void divisor_counts(const uint64_t* weights, int64_t num_datasets, int64_t position,
                           int64_t* counts_out) {
  const Wide sum = divisor_sum(weights, num_datasets, position);
  const Wide time = std::max<int64_t>(2 * position - num_datasets, 0);
  int64_t over = 0;
  for (int64_t i = 0; i < num_datasets; ++i) {
    counts_out[i] =
        static_cast<int64_t>((static_cast<Wide>(weights[i]) * time + sum) / (2 * sum));
    over += counts_out[i];
  }
  divisor_fill<int16_t>(weights, num_datasets, over, position, counts_out, nullptr, nullptr);
}

}  // namespace megaindex
