// Blends without comparing all datasets for every draw.
//
// An entry is behind by weight * d - count after d draws: a line in d that steps down by 1 when the
// entry is drawn. For a window of draws, a floor is set below the entries that are furthest behind,
// and the few entries that reach it anywhere in the window are picked. Draws are decided among
// them: while the best of them is at or above the floor, no other entry is as far behind.
//
// Comparisons use the same doubles as the plain scan. So the floor decides how many entries are
// compared, and never which is drawn. With very many entries there are two floors: one for a pool
// that serves hundreds of draws, and one for the field picked from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megaindex/blending_entries.hpp"
#include "megaindex/blending_pool.hpp"

namespace megaindex {

template <class Vector>
class WindowBlend {
 public:
  WindowBlend(const BlendRule& rule, int64_t* counts)
      : rule_(rule), counts_(counts), entries_(rule, counts, rule.num_datasets > kMaxLanes) {
    const std::vector<int64_t> widths = pool_widths(entries_.size());
    pools_.resize(widths.size() + 1);
    for (BlendPool& pool : pools_) pool.resize(entries_.size());
    for (size_t k = 0; k < widths.size(); ++k) {
      pools_[k + 1].width = pools_[k + 1].fitting = widths[k];
      make_slots(pools_[k], widths[k]);
    }
    pools_[0].size = padded(entries_.size());
    pools_[0].last = kNever;
    for (int64_t e = 0; e < entries_.size(); ++e) at(pools_[0].slope, e) = entries_.weight(e);
  }

  bool in_turn() const { return entries_.in_turn(); }

  // Load the caller's counts.
  void load() {
    for (int64_t e = 0; e < entries_.size(); ++e) at(pools_[0].count, e) = entries_.load(e);
    for (size_t k = 1; k < pools_.size(); ++k) pools_[k].last = -1;
    quota_ = 0;
  }

  // Draw until `end`, or until windows are slower than the scan, as when very many entries are
  // equally far behind. Return the position reached.
  template <class Index>
  int64_t advance(int64_t begin, int64_t end, const BlendOutput<Index>& out) {
    for (int64_t n = begin, mark = begin; n < end;) {
      if (!choose_field(n)) return n;
      n = draw(n, end, out);
      if (n - mark >= kStretch) {
        if (looked_at_ > (n - mark) * rule_.num_datasets) return n;
        looked_at_ = 0;
        mark = n;
      }
    }
    return end;
  }

 private:
  // Return the number of draws for each pool but the widest: from more entries, more candidates are
  // picked less often.
  static std::vector<int64_t> pool_widths(int64_t entries) {
    if (entries <= kMaxLanes) return {};
    if (entries <= 1500) return {entries <= 256 ? 16 : 20};
    return {entries <= 16384 ? 256 : 512, 16};
  }

  // Pick the field anew if it may lack the entry drawn at n. Return false if too many are close.
  bool choose_field(int64_t n) {
    const double d = blend_multiplier(n);
    size_t k = 0;
    while (k + 1 < pools_.size() && d <= pools_[k + 1].last &&
           !(stopped_ && top_ < pools_[k + 1].floor.at(d))) {
      ++k;
    }
    stopped_ = false;
    for (; k + 1 < pools_.size(); ++k) {
      const bool is_field = k + 2 == pools_.size();
      if (!narrow<Vector>(pools_[k], pools_[k + 1], d, is_field ? kMaxLanes : entries_.size())) {
        return false;
      }
      looked_at_ += 3 * pools_[k].size;  // takes about as long as three scans
      quota_ = 0;
    }
    return true;
  }

  template <class Index>
  int64_t draw(int64_t n, int64_t end, const BlendOutput<Index>& out) {
    BlendPool& field = pools_.back();
    const double d = blend_multiplier(n);
    if (quota_ == 0) mark_special();
    int64_t draws = std::min(end - n, quota_);
    if (n == 0) draws = 1;  // positions 0 and 1 have the same multiplier
    const double left = field.last - d;  // infinite without a floor
    if (left < kMaxDraws) draws = std::min(draws, static_cast<int64_t>(left) + 1);
    const BlendPool& wider = pools_[pools_.size() > 1 ? pools_.size() - 2 : 0];
    const Race race{field.slope.data(), field.count.data(), std::min(field.size, entries_.size()),
                    special_, {field.floor, wider.floor}};
    const RaceResult result = run(race, n, draws, out);
    n += result.drawn;
    quota_ -= result.drawn;
    if (result.leaders != 0) {
      take_special(n++, lowest_index(result.leaders), out);
    } else if (result.drawn < draws) {
      stopped_ = true;
      top_ = result.top;
    }
    return n;
  }

  template <class Index>
  RaceResult run(const Race& race, int64_t n, int64_t draws, const BlendOutput<Index>& out) {
    if (pools_.size() > 1 || !entries_.all_single()) {
      return Vector::race(race, blend_multiplier(n), draws,
                          [&](int64_t k, int64_t lane) { take_single(n + k, lane, out); });
    }
    const BlendOutput<Index> local = out;
    int64_t* const counts = counts_;  // lanes are datasets
    return Vector::race(race, blend_multiplier(n), draws, [=](int64_t k, int64_t lane) {
      local.write(n + k, lane, counts[lane]++);
    });
  }

  // Record a draw of a lane whose count the race has advanced.
  template <class Index>
  void take_single(int64_t n, int64_t lane, const BlendOutput<Index>& out) {
    for (size_t k = pools_.size(); k-- > 1;) {
      lane = at(pools_[k].parent, lane);
      at(pools_[k - 1].count, lane) += 1;
    }
    const int64_t i = entries_.first(lane);
    out.write(n, i, counts_[i]++);
  }

  template <class Index>
  void take_special(int64_t n, int64_t lane, const BlendOutput<Index>& out) {
    const int64_t e = entry_of(lane);
    const int64_t i = entries_.next(e);
    out.write(n, i, counts_[i]++);
    if (entries_.turn(e)) set_count(lane, rule_.entry_count(i, counts_[i]));
  }

  void set_count(int64_t lane, double count) {
    at(pools_.back().count, lane) = count;
    for (size_t k = pools_.size(); k-- > 1;) {
      lane = at(pools_[k].parent, lane);
      at(pools_[k - 1].count, lane) = count;
    }
  }

  int64_t lowest_index(uint64_t leaders) const {
    int64_t best = __builtin_ctzll(leaders);
    for (; leaders != 0; leaders &= leaders - 1) {
      const int64_t lane = __builtin_ctzll(leaders);
      if (entries_.next(entry_of(lane)) < entries_.next(entry_of(best))) best = lane;
    }
    return best;
  }

  // Mark the lanes that a race must not draw: entries of several datasets, whose count stays until
  // the last was drawn, and lanes near their limit. The others stay within theirs for quota_ draws.
  void mark_special() {
    special_ = 0;
    quota_ = kMaxDraws;
    const bool all_single = entries_.all_single();
    if (all_single && rule_.limits == nullptr) return;
    constexpr int64_t kFewest = 16;
    const BlendPool& field = pools_.back();
    for (int64_t lane = 0; lane < std::min(field.size, entries_.size()); ++lane) {
      if (at(field.count, lane) == kNever) continue;
      const int64_t e = entry_of(lane);
      const int64_t left = draws_left(all_single ? e : entries_.next(e));
      if (left <= 0) set_count(lane, kNever);
      quota_ = std::min(quota_, left < kFewest ? kMaxDraws : left);
      const bool special = left < kFewest || !(all_single || entries_.single(e));
      special_ |= static_cast<uint64_t>(special) << lane;
    }
  }

  int64_t draws_left(int64_t i) const {
    return rule_.limits == nullptr ? kMaxDraws : rule_.limits[i] - counts_[i];
  }

  int64_t entry_of(int64_t lane) const {
    for (size_t k = pools_.size(); k-- > 1;) lane = at(pools_[k].parent, lane);
    return lane;
  }

  static constexpr int64_t kMaxDraws = 256;
  static constexpr int64_t kStretch = 1024;

  BlendRule rule_;
  int64_t* counts_;
  BlendEntries entries_;
  std::vector<BlendPool> pools_;  // all entries first, the field last
  uint64_t special_ = 0;          // lanes of the field
  int64_t quota_ = 0;             // draws until special_ must be computed again
  bool stopped_ = false;          // a race ended at a floor, with the best behind by top_
  double top_ = 0;
  int64_t looked_at_ = 0;
};

}  // namespace megaindex
