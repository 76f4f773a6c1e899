// Draws from streams whose weights change; megaindex/kernels/reference/blending.py specifies them.
//
// Weights are integers that sum to kMixUnit = 2^31. Stream i of weight w, with deficit f at the
// start of the weights, is drawn for the j-th time at time ((2j + 1) * kMixUnit / 2 - f) / w, and
// draws follow each other in the order of time, equal ones in the order of streams. Within a unit of
// time no stream is drawn twice, so times compare by 64-bit products.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megaindex/invalid_input.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

constexpr int64_t kMixUnit = int64_t{1} << 31;
constexpr int64_t kMixMostDeficit = int64_t{1} << 48;
constexpr int64_t kMixMostPosition = int64_t{1} << 60;

// Weights in force from the position `start` of a stage, which is draw 0 here.
class MixSegment {
 public:
  MixSegment(const uint32_t* weights, const int64_t* deficits, int64_t num_streams)
      : weights_(weights), deficits_(deficits), num_streams_(num_streams) {
    int64_t sum = 0;
    bool small = true;
    for (int64_t i = 0; i < num_streams; ++i) {
      sum += weights[i];
      small &= -kMixMostDeficit <= deficits[i] && deficits[i] <= kMixMostDeficit;
    }
    if (sum != kMixUnit) throw InvalidInput("shares: each row must sum to 2**31");
    if (!small) throw InvalidInput("deficits: must be from -2**48 to 2**48");
  }

  // Draws of a stream until a time.
  int64_t drawn(int64_t i, int64_t time) const {
    if (weights_[i] == 0) return 0;
    const int64_t weight = weights_[i];
    const int64_t rest = deficits_[i] + weight * (time & (kMixUnit - 1)) + kMixUnit / 2;
    return std::max<int64_t>(weight * (time >> 31) + (rest >> 31), 0);
  }

  int64_t all_drawn(int64_t time) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_streams_; ++i) sum += drawn(i, time);
    return sum;
  }

  // The last time until which at most `draws` are drawn.
  int64_t time_before(int64_t draws) const {
    int64_t low = draws, high = draws + 1, step = 1;
    while (all_drawn(low) > draws) {
      high = low;
      low -= step;
      step *= 2;
    }
    step = 1;
    while (all_drawn(high) <= draws) {
      low = high;
      high += step;
      step *= 2;
    }
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (all_drawn(middle) <= draws ? low : high) = middle;
    }
    return low;
  }

  // Write the draws of each stream among the first `draws`.
  void counts(int64_t draws, int64_t* out) {
    const int64_t time = time_before(draws);
    int64_t left = draws;
    for (int64_t i = 0; i < num_streams_; ++i) left -= out[i] = drawn(i, time);
    if (left == 0) return;
    find(time, 1);
    for (int64_t k = 0; k < left; ++k) ++out[draws_[order_[static_cast<size_t>(k)]].stream];
  }

  // Call emit(stream, draw of the stream) for draws [begin, end).
  template <class Emit>
  void fill(int64_t begin, int64_t end, Emit&& emit) {
    constexpr int64_t kWindow = 4096;
    int64_t time = time_before(begin);
    int64_t at = all_drawn(time);
    while (at < end) {
      const int64_t length = std::min(kWindow, end - at);
      find(time, length);
      const auto found = static_cast<int64_t>(draws_.size());
      for (int64_t k = std::max<int64_t>(begin - at, 0); k < std::min(found, end - at); ++k) {
        const Draw& draw = draws_[order_[static_cast<size_t>(k)]];
        emit(draw.stream, draw.number);
      }
      at += found;
      time += length;
    }
  }

 private:
  struct Draw {
    int64_t number;
    uint32_t rest;  // time since the start of its unit, times the weight: 1 to the weight
    uint32_t unit;
    int32_t stream;
  };

  // Find the draws in times (time, time + length] and sort them.
  void find(int64_t time, int64_t length) {
    draws_.clear();
    starts_.assign(static_cast<size_t>(length) + 1, 0);
    for (int64_t i = 0; i < num_streams_; ++i) {
      if (weights_[i] > 0) collect(i, time, length);
    }
    for (size_t k = 1; k < starts_.size(); ++k) starts_[k] += starts_[k - 1];
    order_.resize(draws_.size());
    for (size_t k = draws_.size(); k-- > 0;) {
      order_[--starts_[draws_[k].unit]] = static_cast<uint32_t>(k);
    }
    for (size_t unit = 0; unit < static_cast<size_t>(length); ++unit) {
      if (starts_[unit + 1] - starts_[unit] < 2) continue;
      std::sort(order_.begin() + starts_[unit], order_.begin() + starts_[unit + 1],
                [this](uint32_t a, uint32_t b) { return before(draws_[a], draws_[b]); });
    }
  }

  void collect(int64_t i, int64_t time, int64_t length) {
    const int64_t first = drawn(i, time), end = drawn(i, time + length);
    if (first == end) return;
    // wraps around, as only the result is known to be small
    const auto weight = static_cast<uint64_t>(weights_[i]);
    const uint64_t since = ((2 * static_cast<uint64_t>(first) + 1) << 30) -
                           static_cast<uint64_t>(deficits_[i]) -
                           weight * static_cast<uint64_t>(time);
    const uint64_t units = kMixUnit / weight, rests = kMixUnit % weight;
    uint64_t unit = (since - 1) / weight;
    uint64_t rest = since - unit * weight;
    for (int64_t number = first; number < end; ++number) {
      draws_.push_back({number, static_cast<uint32_t>(rest), static_cast<uint32_t>(unit),
                        static_cast<int32_t>(i)});
      ++starts_[unit];
      unit += units;
      rest += rests;
      if (rest > weight) {
        rest -= weight;
        ++unit;
      }
    }
  }

  // Whether one draw of a unit comes before another.
  bool before(const Draw& a, const Draw& b) const {
    const uint64_t time_a = uint64_t{a.rest} * weights_[b.stream];
    const uint64_t time_b = uint64_t{b.rest} * weights_[a.stream];
    return time_a != time_b ? time_a < time_b : a.stream < b.stream;
  }

  const uint32_t* weights_;
  const int64_t* deficits_;
  int64_t num_streams_;
  std::vector<Draw> draws_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> starts_;  // of each unit in order_
};

// Compute the deficits and counts at the end of each segment, rows 1 ... num_segments, from row 0.
template <class Poll = NoPoll>
void mix_table(const uint32_t* shares, const int64_t* lengths, int64_t num_segments,
               int64_t num_streams, int64_t* deficits, int64_t* counts, Poll poll = {}) {
  for (int64_t k = 0; k < num_segments; ++k) {
    const uint32_t* weights = shares + k * num_streams;
    const int64_t* before = deficits + k * num_streams;
    int64_t* after = deficits + (k + 1) * num_streams;
    const int64_t* count = counts + k * num_streams;
    int64_t* drawn = counts + (k + 1) * num_streams;
    MixSegment(weights, before, num_streams).counts(lengths[k], drawn);
    for (int64_t i = 0; i < num_streams; ++i) {
      const uint64_t owed = static_cast<uint64_t>(weights[i]) * static_cast<uint64_t>(lengths[k]);
      after[i] = static_cast<int64_t>(static_cast<uint64_t>(before[i]) + owed -
                                      (static_cast<uint64_t>(drawn[i]) << 31));
      drawn[i] = static_cast<int64_t>(static_cast<uint64_t>(drawn[i]) +
                                      static_cast<uint64_t>(count[i]));
    }
    if (k % 1024 == 1023) poll();
  }
}

// Draw positions begin ... end - 1 of segments that begin at `starts`; the last has no end.
template <class Poll = NoPoll>
void mix_fill(const uint32_t* shares, const int64_t* starts, const int64_t* deficits,
              const int64_t* counts, int64_t num_segments, int64_t num_streams, int64_t begin,
              int64_t end, int16_t* streams, int64_t* ordinals, int64_t num_threads,
              Poll poll = {}) {
  constexpr int64_t kWorthAThread = 1 << 14;
  const SharedPoll<Poll> shared(poll);
  const auto fill = [&](int64_t first, int64_t last) {
    int64_t k = std::upper_bound(starts, starts + num_segments, first) - starts - 1;
    for (int64_t at = first; at < last; ++k) {
      const int64_t stop = k + 1 < num_segments ? std::min(last, starts[k + 1]) : last;
      MixSegment segment(shares + k * num_streams, deficits + k * num_streams, num_streams);
      const int64_t* count = counts + k * num_streams;
      segment.fill(at - starts[k], stop - starts[k], [&](int32_t stream, int64_t number) {
        streams[at - begin] = static_cast<int16_t>(stream);
        ordinals[at - begin] = count[stream] + number;
        ++at;
      });
      if (k % 64 == 63) shared();
    }
  };
  const int64_t size = end - begin;
  const int64_t parts = std::max<int64_t>(std::min(num_threads, size / kWorthAThread), 1);
  run_parallel(parts, [&](int64_t part) {
    // without the product of size and part, which could overflow
    const int64_t each = size / parts, rest = size % parts;
    const int64_t first = begin + each * part + std::min(part, rest);
    fill(first, first + each + (part < rest));
  });
}

}  // namespace megaindex
