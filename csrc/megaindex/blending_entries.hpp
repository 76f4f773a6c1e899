// Entries of a blend: datasets of equal weight that are drawn in turn.
#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "megaindex/blending_walk.hpp"

namespace megaindex {

// Among datasets of equal weight, limit and count, the lowest index is drawn first, and then its
// count is one more than the others'. So they are drawn in turn: an entry has their weight, the
// next member and its count. With few datasets each is an entry of its own.
class BlendEntries {
 public:
  BlendEntries(const BlendRule& rule, const int64_t* counts, bool group)
      : rule_(rule), counts_(counts), member_(static_cast<size_t>(rule.num_datasets)) {
    std::vector<int32_t> entry(member_.size());
    std::iota(entry.begin(), entry.end(), 0);
    size_ = group ? number_entries(entry) : rule.num_datasets;
    start_.assign(static_cast<size_t>(size_ + 1), 0);
    for (const int32_t e : entry) ++at(start_, e + 1);
    std::partial_sum(start_.begin(), start_.end(), start_.begin());
    next_ = start_;
    for (int64_t i = 0; i < rule.num_datasets; ++i) {
      at(member_, at(next_, at(entry, i))++) = static_cast<int32_t>(i);
    }
    next_ = start_;
  }

  int64_t size() const { return size_; }
  bool all_single() const { return size_ == rule_.num_datasets; }
  bool single(int64_t e) const { return at(start_, e + 1) - at(start_, e) == 1; }
  int64_t first(int64_t e) const { return at(member_, at(start_, e)); }
  double weight(int64_t e) const { return rule_.weights[first(e)]; }
  int64_t next(int64_t e) const { return at(member_, at(next_, e)); }

  // Load the counts of entry e and return the count of its next member.
  double load(int64_t e) {
    const int64_t last = at(member_, at(start_, e + 1) - 1);
    at(next_, e) = at(start_, e);
    while (counts_[next(e)] > counts_[last]) ++at(next_, e);
    return rule_.entry_count(last, counts_[last]);
  }

  // Advance to the next member after a draw of this one; return whether it was the last.
  bool turn(int64_t e) {
    if (++at(next_, e) < at(start_, e + 1)) return false;
    at(next_, e) = at(start_, e);
    return true;
  }

  // Return whether the counts of members are those of draws in turn, which a caller's counts may
  // not be.
  bool in_turn() const {
    for (int64_t e = 0; e < size_; ++e) {
      const int64_t low = counts_[at(member_, at(start_, e + 1) - 1)];
      int64_t ahead = 1;
      for (int64_t k = at(start_, e); k < at(start_, e + 1); ++k) {
        const int64_t lead = counts_[at(member_, k)] - low;
        if (lead < 0 || lead > ahead) return false;
        ahead = lead;
      }
    }
    return true;
  }

 private:
  // Number the entries in the order of their first members; write the entry of each dataset and
  // return the number of entries. Groups of fewer than kFew datasets are not joined: draws from
  // entries of one dataset are faster.
  int64_t number_entries(std::vector<int32_t>& entry) const {
    constexpr int32_t kFew = 8;
    std::vector<int32_t> members(entry.size(), 0);  // of the group of each first dataset
    for (const int32_t first : find_first(entry)) ++at(members, first);
    std::vector<int32_t> number(entry.size(), -1);
    int32_t size = 0;
    for (int64_t i = 0; i < rule_.num_datasets; ++i) {
      const int32_t first = at(entry, i);
      const int64_t key = at(members, first) < kFew ? i : first;
      if (at(number, key) < 0) at(number, key) = size++;
      at(entry, i) = at(number, key);
    }
    return size;
  }

  // Write the first dataset of equal weight and limit of each.
  std::vector<int32_t>& find_first(std::vector<int32_t>& first) const {
    const int64_t n = rule_.num_datasets;
    int shift = 62;
    while (n * 4 > int64_t{1} << (64 - shift)) --shift;
    std::vector<int32_t> table(size_t{1} << (64 - shift), -1);  // hashed
    for (int64_t i = 0; i < n; ++i) {
      auto slot = static_cast<int64_t>(hash(i) >> shift);
      while (at(table, slot) >= 0 && !alike(i, at(table, slot))) {
        slot = (slot + 1) % static_cast<int64_t>(table.size());
      }
      if (at(table, slot) < 0) at(table, slot) = static_cast<int32_t>(i);
      at(first, i) = at(table, slot);
    }
    return first;
  }

  int64_t limit(int64_t i) const { return rule_.limits == nullptr ? 0 : rule_.limits[i]; }
  bool alike(int64_t i, int64_t j) const {
    return rule_.weights[i] == rule_.weights[j] && limit(i) == limit(j);
  }
  uint64_t hash(int64_t i) const {
    const double weight = rule_.weights[i] + 0.0;  // turns -0.0 into 0.0
    uint64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    bits ^= static_cast<uint64_t>(limit(i)) << 1;
    bits *= 0x9E3779B97F4A7C15u;
    return (bits ^ bits >> 32) * 0x9E3779B97F4A7C15u;
  }

  BlendRule rule_;
  const int64_t* counts_;
  int64_t size_ = 0;
  std::vector<int32_t> member_;  // datasets, those of an entry together
  std::vector<int64_t> start_;   // of each entry in member_
  std::vector<int64_t> next_;    // of each entry: its next member, in member_
};

}  // namespace megaindex
