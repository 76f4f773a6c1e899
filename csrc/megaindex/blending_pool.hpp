// The entries that can be drawn in the next few draws.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <vector>

#include "megaindex/blending_walk.hpp"

namespace megaindex {

// Entries picked from a wider pool because they touch a floor: as long as the best is behind by
// floor.at(d) or more, and d <= last, nobody outside is as far behind. The widest pool, of all
// entries, has no floor.
struct BlendPool {
  Doubles slope;
  Doubles count;
  std::vector<int32_t> parent;  // places in the wider pool
  int64_t size = 0;             // padded
  Line floor;
  double last = -1;
  int64_t width = 0;            // draws the floor should last
  int64_t fitting = 0;          // draws of late, when the candidates for `width` are too many

  // To lay the next floor: the slowest entry at or above this one, and how far this one is below
  // the best.
  double slowest = 0;
  double depth = 0;

  // To pick from this pool: how far behind each entry is, and the maxima of those that share their
  // place modulo slots.size().
  Doubles values;
  Doubles slots;

  void resize(int64_t capacity) {
    const auto n = static_cast<size_t>(padded(capacity));
    slope.assign(n, 0.0);
    count.assign(n, kNever);
    parent.assign(n, 0);
    values.assign(n, 0.0);
  }
};

// Slots take the place of entries in choosing a floor: there are about three for each that is to be
// above it.
inline void make_slots(BlendPool& from, int64_t width) {
  from.slots.resize(static_cast<size_t>(padded(3 * width)));
}

// A level that `wanted` of the slots reach, and not half as many more. `guesses` are tried first.
template <class Vector>
double floor_level(Doubles& slots, int64_t wanted, std::initializer_list<double> guesses) {
  const auto size = static_cast<int64_t>(slots.size());
  const auto reached = [&](double level) {
    return Vector::count_at_least(slots.data(), size, level);
  };
  const auto fits = [&](int64_t count) { return count >= wanted && count <= wanted + wanted / 2; };
  for (const double guess : guesses) {
    if (fits(reached(guess))) return guess;
  }
  double low = kNever;
  double high = -kNever;
  for (const double slot : slots) {
    low = std::min(low, slot == -kNever ? kNever : slot);
    high = std::max(high, slot);
  }
  for (int step = 0; step < 12; ++step) {
    const double middle = low + (high - low) / 2;
    const int64_t count = reached(middle);
    if (fits(count)) return middle;
    (count > wanted ? low : high) = middle;
  }
  const auto nth = slots.begin() + std::min(wanted, size) - 1;
  std::nth_element(slots.begin(), nth, slots.end(), std::greater<>());
  return *nth;
}

// Lays a floor for `width` draws from d on. At least width + 1 entries touch it at d, if there are
// as many, so one of them is left whichever are drawn; it rises as the slowest of them did.
template <class Vector>
void lay_floor(BlendPool& from, BlendPool& to, double d, int64_t width) {
  constexpr double kLowest = -1e300;  // above entries that are spent
  const int64_t wanted = width + 1;
  // Where the last floor has come to, or a little further below that than it was below the best.
  const double before = to.floor.at(d);
  const double level =
      std::max(kLowest, floor_level<Vector>(from.slots, wanted, {before, before - 1.2 * to.depth}));
  const int64_t above =
      Vector::count_at_least(from.slots.data(), static_cast<int64_t>(from.slots.size()), level);
  const double best = *std::max_element(from.slots.begin(), from.slots.end());
  to.depth = (best - level) * static_cast<double>(wanted) / static_cast<double>(above + 1);
  to.floor = {d, level, to.slowest};
  to.last = std::min(d + static_cast<double>(width - 1), from.last);
}

template <class Vector>
void pick(const BlendPool& from, BlendPool& to) {
  // An entry below the floor at both ends is below it all along. These reach as much further as
  // rounding can lift an entry: by that of two products, each at most slope * last, and that of
  // sums and differences as large as the floor.
  constexpr double kUnit = std::numeric_limits<double>::epsilon();
  const double span = to.last - to.floor.first;
  const double slack = 8 * kUnit * (std::fabs(to.floor.level) + to.floor.rise * span);
  const Reach reach{{2 * kUnit * to.last, span + 2 * kUnit * to.last},
                    {to.floor.level - slack, to.floor.at(to.last) - slack}};
  to.size = Vector::within(from.values.data(), from.slope.data(), from.size, reach,
                           to.parent.data());
  double slowest = kNever;
  for (int64_t k = 0; k < to.size; ++k) {
    const int64_t place = at(to.parent, k);
    at(to.slope, k) = at(from.slope, place);
    at(to.count, k) = at(from.count, place);
    // looked up, because a branch on this would be mispredicted
    const double unless_above[2] = {kNever, 0};
    const bool above = at(from.values, place) >= to.floor.level;
    slowest = std::min(slowest, at(to.slope, k) + unless_above[above]);
  }
  to.slowest = slowest;
  for (; to.size % kBlendPad != 0; ++to.size) {
    at(to.slope, to.size) = 0;
    at(to.count, to.size) = kNever;
  }
}

// Picks those of `from` that can be drawn within to.width draws, or within fewer if these are more
// than `most`. False if even one draw has more candidates.
template <class Vector>
bool narrow(BlendPool& from, BlendPool& to, double d, int64_t most) {
  Vector::spread(from.slope.data(), from.count.data(), from.size, d, from.values.data(),
                 from.slots.data(), static_cast<int64_t>(from.slots.size()));
  to.fitting = std::min(to.width, to.fitting + 1);
  for (; to.fitting > 0; to.fitting = to.fitting * 3 / 4) {
    lay_floor<Vector>(from, to, d, to.fitting);
    pick<Vector>(from, to);
    if (to.size <= most) return true;
  }
  return false;
}

}  // namespace megaindex
