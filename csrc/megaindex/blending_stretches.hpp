// Blends of up to a hundred or so datasets, drawn at several places at once.
//
// A draw depends on the one before, so a single sequence of draws leaves most of a processor idle.
// Here the positions are divided into stretches that are drawn side by side, one in each lane of
// vector registers. The counts at the beginning of a stretch are estimated, and it begins `lead`
// draws early: within these, the counts usually become those of the blend. A stretch is accepted if
// its counts after the lead equal those at the end of the stretch before it. Then its draws are
// those of the rule, however it was estimated; else drawing goes on behind the last accepted one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "megaindex/blending_walk.hpp"

namespace megaindex {

template <class Vector>
class StretchBlend {
 public:
  StretchBlend(const BlendRule& rule, int64_t* counts)
      : rule_(rule),
        counts_(counts),
        estimate_(counts, counts + rule.num_datasets),
        slope_(rule.weights, rule.weights + rule.num_datasets),
        limit_(slope_.size(), kNever),
        count_(slope_.size() * kStretches),
        after_lead_(count_.size()),
        lead_(lead(rule.num_datasets)) {
    if (rule.limits != nullptr) {
      std::copy(rule.limits, rule.limits + rule.num_datasets, limit_.begin());
    }
  }

  // Return the fewest draws that can be divided.
  static int64_t fewest_draws(int64_t num_datasets) {
    return (kStretches + 1) * lead(num_datasets) + kStretches * kStep;
  }

  // Draw once in every stretch, from `begin` >= 1 on, since positions 0 and 1 have the same
  // multiplier. Return the position reached: `begin` if too few draws are left.
  template <class Index>
  int64_t advance(int64_t begin, int64_t end, const BlendOutput<Index>& out) {
    const int64_t share = (end - begin - lead_) / kStretches;
    const int64_t length = std::min(length_, share - share % kStep);
    if (length < lead_) return begin;
    Stretches run{rule_.num_datasets, slope_.data(), limit_.data(), rule_.limits != nullptr,
                  count_.data(), sizeof(Index), {}, {}, {}};
    std::copy(counts_, counts_ + rule_.num_datasets, estimate_.begin());
    int64_t estimated = 0;
    for (int64_t k = 0; k < kStretches; ++k) {
      const int64_t first = begin + k * length;
      if (k > 0 && estimated == k - 1) {
        if (estimate(first, length)) {
          ++estimated;
        } else {  // counts of which enough draws are left
          std::copy(counts_, counts_ + rule_.num_datasets, estimate_.begin());
        }
      }
      load(k);
      run.draws[k] = static_cast<double>(first);
      if (out.dataset != nullptr) run.dataset[k] = out.dataset + (first - out.origin);
      if (out.sample != nullptr) run.sample[k] = out.sample + (first - out.origin);
    }
    // a stretch and the lead of the next write the same positions, the stretch later
    Vector::draw_stretches(run, lead_);
    after_lead_ = count_;
    Vector::draw_stretches(run, length);
    int64_t accepted = 1;
    while (accepted <= estimated && follows(accepted)) ++accepted;
    store(accepted - 1);
    const int64_t shorter = std::max(padded(length_ / 2, kStep), lead_);
    length_ = accepted == kStretches ? std::min(kLongest, 2 * length_) : shorter;
    slow_ = 2 * accepted < kStretches;
    return begin + accepted * length + lead_;
  }

  // Return whether so few stretches were accepted that another way of drawing is faster.
  bool slow() const { return slow_; }

 private:
  static int64_t lead(int64_t num_datasets) { return padded(3 * num_datasets + 32, kStep); }

  void load(int64_t k) {
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      at(count_, i * kStretches + k) = rule_.entry_count(i, at(estimate_, i));
    }
  }

  void store(int64_t k) {
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      const double count = at(count_, i * kStretches + k);
      counts_[i] = count == kNever ? rule_.limits[i] : static_cast<int64_t>(count);
    }
  }

  bool follows(int64_t k) const {
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      if (at(after_lead_, i * kStretches + k) != at(count_, i * kStretches + k - 1)) return false;
    }
    return true;
  }

  // Advance the estimate by `draws`, to the counts before position n: all datasets are then behind
  // by more than level_ - 1 and at most level_, but for those that are further ahead or spent.
  // Return false if no level gives this number of draws.
  bool estimate(int64_t n, int64_t draws) {
    constexpr int kTries = 16;
    const auto d = static_cast<double>(n);
    for (int k = 0; k < kTries; ++k) {
      int64_t missing = draws, moving = 0;
      for (int64_t i = 0; i < rule_.num_datasets; ++i) {
        const int64_t more = draws_to_level(i, d);
        missing -= more;
        moving += more > 0;
      }
      if (std::abs(missing) <= 1 + rule_.num_datasets / 16) break;
      level_ -= static_cast<double>(missing) / static_cast<double>(std::max<int64_t>(moving, 1));
    }
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      const int64_t more = draws_to_level(i, d);
      at(estimate_, i) += more;
      draws -= more;
    }
    return draw_next(draws, d);
  }

  // Draw the `missing` datasets that are furthest behind, once each or, if negative, put as many
  // back of those furthest ahead. Return false if there are too few.
  bool draw_next(int64_t missing, double d) {
    const int64_t step = missing < 0 ? -1 : 1;
    nearest_.clear();
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      const int64_t count = at(estimate_, i);
      const bool can = step < 0 ? count > counts_[i] : !rule_.spent(i, count);
      if (can) nearest_.emplace_back(static_cast<double>(-step) * behind(i, d), step * i);
    }
    if (step * missing > static_cast<int64_t>(nearest_.size())) return false;
    const auto last = nearest_.begin() + step * missing;
    std::nth_element(nearest_.begin(), last, nearest_.end());
    for (auto near = nearest_.begin(); near != last; ++near) {
      at(estimate_, step * near->second) += step;
    }
    return true;
  }

  double behind(int64_t i, double d) const {
    return at(slope_, i) * d - static_cast<double>(at(estimate_, i));
  }

  int64_t draws_to_level(int64_t i, double d) const {
    const double wanted = behind(i, d) - level_ + 1;
    const double left = at(limit_, i) - static_cast<double>(at(estimate_, i));
    return wanted > 0 ? static_cast<int64_t>(std::min({wanted, left, kMostBehind})) : 0;
  }

  static constexpr int64_t kStep = 4;  // draws that a vector function makes at once
  // The most draws of a stretch, with both outputs of the stretches in different sets of a cache.
  static constexpr int64_t kLongest = 8232;

  BlendRule rule_;
  int64_t* counts_;
  std::vector<int64_t> estimate_;
  std::vector<std::pair<double, int64_t>> nearest_;
  Doubles slope_;
  Doubles limit_;
  Doubles count_;  // [num_datasets, kStretches]
  Doubles after_lead_;
  int64_t lead_;
  int64_t length_ = kLongest;
  double level_ = 0.5;
  bool slow_ = false;
};

}  // namespace megaindex
