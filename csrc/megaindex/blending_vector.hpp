// The loops of blending that vector instructions speed up, in portable C++; blending_avx2.hpp has
// them for AVX2. Both compute the same doubles: a product and a difference, each rounded, not
// fused.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

namespace megaindex {

// Allocator of arrays aligned to 32 bytes, for the aligned loads and stores of AVX2.
template <class T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <class U>
  explicit Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{32}));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{32}); }
  friend bool operator==(const Aligned&, const Aligned&) { return true; }
  friend bool operator!=(const Aligned&, const Aligned&) { return false; }
};
using Doubles = std::vector<double, Aligned<double>>;

// An entry is behind by slope * d - count after d draws. Arrays of entries are padded to a multiple
// of kBlendPad with entries of slope 0 and count kNever, which are never drawn.
constexpr int64_t kBlendPad = 16;
constexpr double kNever = std::numeric_limits<double>::infinity();

// The largest product of a weight and a draw number, and the largest count, for which doubles
// resolve differences of 1 with room to spare.
constexpr double kMostBehind = static_cast<double>(int64_t{1} << 50);

// A line as a function of the number of draws.
struct Line {
  double first = 0;  // where its value is `level`
  double level = -kNever;
  double rise = 0;

  double at(double d) const { return level + rise * (d - first); }
};

// A few entries among which a number of draws is decided without comparing others.
constexpr int64_t kMaxLanes = 64;
struct Race {
  const double* slope;
  double* count;  // advanced with every draw
  int64_t size;   // at most kMaxLanes
  uint64_t special;  // bits of the lanes that the caller draws itself
  Line floor[2];  // a draw counts only if its entry is behind by floor.at(d) or more
};

struct RaceResult {
  int64_t drawn;
  uint64_t leaders;  // if a special lane leads the next draw: bits of it and of its equals
  double top;        // how far behind the best was when a floor ended the race
};

// Bounds for entries that may rise to a line: value + slope * reach >= least at the line's
// beginning or at its end.
struct Reach {
  double reach[2];
  double least[2];
};

// Draws at kStretches places of a blend, each with counts of its own. The last three advance with
// every draw; outputs may be null.
constexpr int64_t kStretches = 8;
struct Stretches {
  int64_t size;         // datasets
  const double* slope;  // [size]
  const double* limit;  // [size], the count from which a dataset is not drawn
  bool limited;         // whether any limit is finite
  double* count;        // [size, kStretches]; kNever from the limit on
  int64_t index_size;   // bytes of an element of `dataset`
  double draws[kStretches];
  void* dataset[kStretches];
  int64_t* sample[kStretches];
};

struct PortableVector {
  static constexpr int64_t kMostStretched = 0;  // has no draw_stretches

  static double behind(const double* slope, const double* count, int64_t i, double d) {
    return slope[i] * d - count[i];
  }

  // Return the first of the entries furthest behind.
  static int64_t first_max(const double* slope, const double* count, int64_t size, double d) {
    int64_t best = 0;
    for (int64_t i = 1; i < size; ++i) {
      if (behind(slope, count, i, d) > behind(slope, count, best, d)) best = i;
    }
    return best;
  }

  // Draw up to `draws` lanes, at d, d + 1, ..., and call emit(draw, lane) for each; the lowest lane
  // wins among equals.
  template <class Emit>
  static RaceResult race(const Race& race, double d, int64_t draws, const Emit& emit) {
    for (int64_t k = 0; k < draws; ++k, d += 1) {
      const int64_t lane = first_max(race.slope, race.count, race.size, d);
      const double top = behind(race.slope, race.count, lane, d);
      if (top < race.floor[0].at(d) || top < race.floor[1].at(d)) return {k, 0, top};
      uint64_t leaders = 0;
      for (int64_t i = lane; race.special != 0 && i < race.size; ++i) {
        leaders |= static_cast<uint64_t>(behind(race.slope, race.count, i, d) == top) << i;
      }
      if ((leaders & race.special) != 0) return {k, leaders, top};
      race.count[lane] += 1;
      emit(k, lane);
    }
    return {draws, 0, 0};
  }

  // Compute how far behind each entry is, and the maximum for each i modulo num_slots.
  static void spread(const double* slope, const double* count, int64_t size, double d,
                     double* values, double* slots, int64_t num_slots) {
    std::fill(slots, slots + num_slots, -kNever);
    for (int64_t start = 0; start < size; start += num_slots) {
      for (int64_t i = start; i < std::min(size, start + num_slots); ++i) {
        values[i] = behind(slope, count, i, d);
        slots[i - start] = std::max(slots[i - start], values[i]);
      }
    }
  }

  static int64_t count_at_least(const double* x, int64_t size, double value) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) count += x[i] >= value;
    return count;
  }

  // Write the places of the entries within reach and return their number; `places` has room for
  // size.
  static int64_t within(const double* values, const double* slope, int64_t size, const Reach& r,
                        int32_t* places) {
    int64_t found = 0;
    for (int64_t i = 0; i < size; ++i) {
      places[found] = static_cast<int32_t>(i);
      found += (values[i] + slope[i] * r.reach[0] >= r.least[0]) ||
               (values[i] + slope[i] * r.reach[1] >= r.least[1]);
    }
    return found;
  }
};

}  // namespace megaindex
