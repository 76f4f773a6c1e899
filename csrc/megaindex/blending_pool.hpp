// Pools: the entries that can be drawn in the next few draws.
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

// Entries picked from a wider pool because they reach a floor: while the best is behind by
// floor.at(d) or more and d <= last, no entry outside is as far behind. The widest pool has all
// entries and no floor.
struct BlendPool {
  Doubles slope;
  Doubles count;
  std::vector<int32_t> parent;  // places in the wider pool
  int64_t size = 0;             // padded
  Line floor;
  double last = -1;
  int64_t width = 0;            // draws for which the floor should hold
  int64_t fitting = 0;          // recent width, if the candidates for `width` were too many

  // For the next floor: the smallest slope of the entries at or above this floor, and the distance
  // from this floor up to the best entry.
  double slowest = 0;
  double depth = 0;

  // For picking from this pool: how far behind each entry is, and the maxima of the entries of
  // equal place modulo slots.size().
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

// A floor is chosen by slots instead of entries, about three for each entry wanted above it.
inline void make_slots(BlendPool& from, int64_t width) {
  from.slots.resize(static_cast<size_t>(padded(3 * width)));
}

// Return a level that wanted to 1.5 * wanted slots reach, trying `guesses` first.
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

// Set a floor for `width` draws from d on. At least width + 1 entries, if there are as many, reach
// it at d, so one of them remains whichever are drawn; its slope is that of the slowest of them.
template <class Vector>
void set_floor(BlendPool& from, BlendPool& to, double d, int64_t width) {
  constexpr double kLowest = -1e300;  // above entries that are spent
  const int64_t wanted = width + 1;
  // first guess: the last floor at d; second guess: a little more than its depth below that
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
  // An entry below the floor at both ends is below it in between. The reach is extended by the
  // largest rounding errors: of two products, each at most slope * last, and of sums and
  // differences as large as the floor.
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
    // a table look-up, because a branch on this would be mispredicted
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

// Pick the entries of `from` that can be drawn within to.width draws, or within fewer if these are
// more than `most`. Return false if even one draw has more candidates.
template <class Vector>
bool narrow(BlendPool& from, BlendPool& to, double d, int64_t most) {
  Vector::spread(from.slope.data(), from.count.data(), from.size, d, from.values.data(),
                 from.slots.data(), static_cast<int64_t>(from.slots.size()));
  to.fitting = std::min(to.width, to.fitting + 1);
  for (; to.fitting > 0; to.fitting = to.fitting * 3 / 4) {
    set_floor<Vector>(from, to, d, to.fitting);
    pick<Vector>(from, to);
    if (to.size <= most) return true;
  }
  return false;
}

}  // namespace megaindex
