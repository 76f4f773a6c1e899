// Pieces of documents, sorted by length, and their packing by best-fit decreasing;
// kernels/reference/packing.py documents both.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "megaindex/invalid_input.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/poll.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex {

enum class LongDocuments { kTruncate, kSplit, kSkip };

constexpr int64_t kMostCapacity = int64_t{1} << 24;
constexpr int64_t kPieceStride = 64;  // documents between two entries of sample_starts

// The pieces of a document: `samples` of `capacity` tokens, and one of `rest` tokens if it is not 0.
struct Pieces {
  int64_t samples, rest;
};

class Cutter {
 public:
  Cutter(int64_t capacity, LongDocuments rule) : capacity_(capacity), rule_(rule) {
    while (int64_t{1} << bits_ < capacity) ++bits_;
    factor_ = ((uint64_t{1} << (31 + bits_)) + static_cast<uint64_t>(capacity) - 1) /
              static_cast<uint64_t>(capacity);
  }
  int64_t capacity() const { return capacity_; }

  // Return the tokens of a document that are placed.
  int64_t used(int64_t length) const {
    if (rule_ == LongDocuments::kSplit || length <= capacity_) return length;
    return rule_ == LongDocuments::kTruncate ? capacity_ : 0;
  }
  Pieces operator()(int64_t length) const {
    const int64_t whole = used(length);
    // exact for lengths below 2^31: the factor is less than 2^-bits too large, relatively
    const auto samples =
        static_cast<int64_t>((static_cast<uint64_t>(whole) * factor_) >> (31 + bits_));
    return {samples, whole - samples * capacity_};
  }

 private:
  int64_t capacity_;
  LongDocuments rule_;
  int bits_ = 0;
  uint64_t factor_;
};

namespace detail {

inline int64_t piece_parts(int64_t documents, int64_t capacity, int num_threads) {
  // a part has at least as many documents as counters
  const int64_t most = documents / std::max<int64_t>(capacity, 1 << 16);
  return std::max<int64_t>(1, std::min<int64_t>(num_threads, most));
}

// Bounds of a part, on a multiple of kPieceStride.
inline int64_t part_begin(int64_t documents, int64_t part, int64_t parts) {
  if (part == parts) return documents;
  const int64_t strides = (documents + kPieceStride - 1) / kPieceStride;
  return strides * part / parts * kPieceStride;
}

// Count the pieces of documents [begin, end) by length.
template <class Poll>
void count_part(const FileLengths& lengths, const Cutter& cut, int64_t begin, int64_t end,
                int64_t* counts, const SharedPoll<Poll>& poll) {
  constexpr int64_t kBatch = int64_t{1} << 20;
  for (int64_t first = begin; first < end; first += kBatch) {
    poll();
    int64_t least = 0, empty = 0;
    for (int64_t d = first; d < std::min(end, first + kBatch); ++d) {
      const int64_t length = lengths[static_cast<uint64_t>(d)];
      least = std::min(least, length);
      const Pieces pieces = cut(std::max<int64_t>(length, 0));
      counts[cut.capacity()] += pieces.samples;
      ++counts[pieces.rest];
      empty += pieces.rest == 0;
    }
    counts[0] -= empty;
    if (least < 0) throw InvalidInput("lengths: must not be negative");
  }
}

// Return the number of pieces of each length in each part.
template <class Poll>
std::vector<std::vector<int64_t>> count_parts(const FileLengths& lengths, const Cutter& cut,
                                              int64_t parts, const SharedPoll<Poll>& poll) {
  std::vector<std::vector<int64_t>> counts(static_cast<size_t>(parts));
  for (auto& part : counts) part.resize(static_cast<size_t>(cut.capacity() + 1));
  run_parallel(parts, [&](int64_t part) {
    count_part(lengths, cut, part_begin(lengths.count, part, parts),
               part_begin(lengths.count, part + 1, parts), counts[static_cast<size_t>(part)].data(),
               poll);
  });
  return counts;
}

// Documents on their way to the ranges of their lengths, collected by cache lines: written one by
// one, each would fetch a line.
class PieceWriter {
 public:
  // starts[l] is the first entry of length l that this writer fills.
  PieceWriter(std::vector<int64_t> starts, int32_t* documents)
      : documents_(documents),
        starts_(std::move(starts)),
        next_(starts_),
        held_(new int32_t[starts_.size() * kHeld]) {}

  void add(int64_t length, int64_t document) {
    const auto l = static_cast<size_t>(length);
    const auto at = static_cast<size_t>(next_[l]++);
    held_[l * kHeld + at % kHeld] = static_cast<int32_t>(document);
    if (at % kHeld == kHeld - 1) flush(l);
  }
  void finish() {
    for (size_t l = 0; l < next_.size(); ++l) {
      if (next_[l] % kHeld != 0) flush(l);
    }
  }

 private:
  static constexpr int64_t kHeld = 16;

  void flush(size_t l) {
    const int64_t stop = next_[l], line = (stop - 1) / kHeld * kHeld;
    const int32_t* held = held_.get() + l * kHeld;
    for (int64_t at = std::max(line, starts_[l]); at < stop; ++at) {
      documents_[at] = held[at - line];
    }
  }

  int32_t* documents_;
  const std::vector<int64_t> starts_;
  std::vector<int64_t> next_;
  std::unique_ptr<int32_t[]> held_;  // not initialised: lengths without a piece take no memory
};

// Write the documents of the pieces of a part, and the whole samples before each stride.
template <class Poll>
void sort_part(const FileLengths& lengths, const Cutter& cut, int64_t begin, int64_t end,
               PieceWriter writer, int64_t samples, int64_t* sample_starts,
               const SharedPoll<Poll>& poll) {
  for (int64_t first = begin; first < end; first += kPieceStride) {
    if ((first - begin) % (int64_t{1} << 20) == 0) poll();
    sample_starts[first / kPieceStride] = samples;
    for (int64_t d = first; d < std::min(end, first + kPieceStride); ++d) {
      const Pieces pieces = cut(lengths[static_cast<uint64_t>(d)]);
      samples += pieces.samples;
      if (pieces.rest > 0) writer.add(pieces.rest, d);
    }
  }
  writer.finish();
}

}  // namespace detail

// Fill counts, capacity + 1 entries, with the number of pieces of each length.
template <class Poll = NoPoll>
void count_pieces(const detail::FileLengths& lengths, const Cutter& cut, int num_threads,
                  int64_t* counts, Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const int64_t parts = detail::piece_parts(lengths.count, cut.capacity(), num_threads);
  const auto found = detail::count_parts(lengths, cut, parts, shared);
  for (size_t l = 0; l <= static_cast<size_t>(cut.capacity()); ++l) {
    counts[l] = 0;
    for (const auto& part : found) counts[l] += part[l];
  }
}

// Fill documents with those of the pieces below `capacity`, sorted by length, and sample_starts.
// Throw if `counts` are not those of the lengths.
template <class Poll = NoPoll>
void sort_pieces(const detail::FileLengths& lengths, const Cutter& cut, const int64_t* counts,
                 int num_threads, int32_t* documents, int64_t* sample_starts, Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const int64_t parts = detail::piece_parts(lengths.count, cut.capacity(), num_threads);
  auto starts = detail::count_parts(lengths, cut, parts, shared);
  std::vector<int64_t> samples;  // whole ones of each part
  int64_t next = 0;
  for (auto& part : starts) samples.push_back(part.back());
  for (size_t l = 0; l <= static_cast<size_t>(cut.capacity()); ++l) {
    int64_t found = 0;
    for (auto& part : starts) {
      const int64_t count = part[l];
      part[l] = next + found;
      found += count;
    }
    if (found != counts[l]) {
      throw InvalidInput("counts: must be those of these lengths; take them from count_pieces");
    }
    next += found;
  }
  run_parallel(parts, [&](int64_t part) {
    const auto p = static_cast<size_t>(part);
    const int64_t before = std::accumulate(samples.begin(), samples.begin() + part, int64_t{0});
    detail::sort_part(lengths, cut, detail::part_begin(lengths.count, part, parts),
                      detail::part_begin(lengths.count, part + 1, parts),
                      detail::PieceWriter(std::move(starts[p]), documents), before, sample_starts,
                      shared);
  });
  sample_starts[(lengths.count + kPieceStride - 1) / kPieceStride] =
      std::accumulate(samples.begin(), samples.end(), int64_t{0});
}

// Pieces of one length on consecutive bins.
struct BinLayer {
  int64_t below;   // layer, or -1
  int64_t before;  // bins of that layer before these
  int64_t length;
  int64_t each;  // pieces in each bin
  int64_t rank;  // of the first piece
  int64_t bins;
};

// Bins that are packed alike: those of a layer that no other covers.
struct BinRun {
  int64_t layer;
  int64_t before;  // bins of the layer before these
  int64_t first;   // number of the first bin
};

namespace detail {

// A set of numbers in [0, size), of which the next from any number on is found in four steps.
class NumberSet {
 public:
  explicit NumberSet(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(static_cast<size_t>(size));
    } while (size > 1);
  }
  void insert(int64_t number) {
    for (auto& level : levels_) {
      level[static_cast<size_t>(number / 64)] |= uint64_t{1} << (number % 64);
      number /= 64;
    }
  }
  void erase(int64_t number) {
    for (auto& level : levels_) {
      uint64_t& word = level[static_cast<size_t>(number / 64)];
      word &= ~(uint64_t{1} << (number % 64));
      if (word != 0) return;
      number /= 64;
    }
  }
  // Return the least number of the set from `number` on, or -1.
  int64_t next(int64_t number) const {
    for (size_t l = 0; l < levels_.size(); ++l, number = number / 64 + 1) {
      if (number / 64 >= static_cast<int64_t>(levels_[l].size())) return -1;
      const uint64_t word = levels_[l][static_cast<size_t>(number / 64)] >> (number % 64);
      if (word == 0) continue;
      number += __builtin_ctzll(word);
      while (l-- > 0) {
        number = number * 64 + __builtin_ctzll(levels_[l][static_cast<size_t>(number)]);
      }
      return number;
    }
    return -1;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

// Layers whose bins have room, by room and, where pieces are limited, by pieces; first come, first
// served among equals.
class OpenBins {
 public:
  explicit OpenBins(int64_t capacity)
      : rooms_(capacity + 1), ends_(static_cast<size_t>(capacity + 1), {-1, -1}) {}

  struct Entry {
    int64_t layer, room, held, next;
  };

  // Return the entry with the least room from `least` on, or null.
  const Entry* find(int64_t least) const {
    const int64_t room = rooms_.next(least);
    if (room < 0) return nullptr;
    return &entries_[static_cast<size_t>(ends_[static_cast<size_t>(room)][0])];
  }
  void remove(const Entry& first) {
    auto& [head, tail] = ends_[static_cast<size_t>(first.room)];
    head = first.next;
    if (head >= 0) return;
    tail = -1;
    rooms_.erase(first.room);
  }
  void add(int64_t layer, int64_t room, int64_t held) {
    const auto number = static_cast<int64_t>(entries_.size());
    auto& [head, tail] = ends_[static_cast<size_t>(room)];
    int64_t after = tail;
    if (after >= 0 && at(after).held > held) {
      after = -1;
      for (int64_t e = head; at(e).held <= held; e = at(e).next) after = e;
    }
    entries_.push_back({layer, room, held, after < 0 ? head : at(after).next});
    (after < 0 ? head : at(after).next) = number;
    if (after == tail) tail = number;
    rooms_.insert(room);
  }

 private:
  Entry& at(int64_t entry) { return entries_[static_cast<size_t>(entry)]; }

  NumberSet rooms_;
  std::vector<Entry> entries_;
  std::vector<std::array<int64_t, 2>> ends_;  // first and last entry of each room
};

}  // namespace detail

struct PackedPieces {
  std::vector<BinLayer> layers;
  std::vector<BinRun> runs;  // the last row holds the number of bins
};

// Pack counts[l] pieces of each length l, 1 <= l <= capacity, by best-fit decreasing.
template <class Poll = NoPoll>
PackedPieces pack_pieces(const int64_t* counts, int64_t capacity, int64_t max_pieces,
                         int64_t least_room, bool stacked, Poll poll = {}) {
  PackedPieces packed;
  auto& layers = packed.layers;
  std::vector<int64_t> covered;  // bins of each layer below another
  detail::OpenBins open(capacity);
  for (int64_t length = capacity; length > 0; --length) {
    if (length % 4096 == 0) poll();
    for (int64_t left = counts[length], rank = 0; left > 0;) {
      const auto* found = open.find(length);
      const int64_t room = found ? found->room : capacity, held = found ? found->held : 0;
      const int64_t below = found ? found->layer : -1;
      const auto b = static_cast<size_t>(below);
      int64_t each = stacked || !found ? room / length : 1;
      if (max_pieces > 0) each = std::min(each, max_pieces - held);
      each = std::min(each, left);
      const int64_t free = found ? layers[b].bins - covered[b] : left;
      const int64_t bins = std::min(free, left / each);
      const auto layer = static_cast<int64_t>(layers.size());
      layers.push_back({below, found ? covered[b] : 0, length, each, rank, bins});
      covered.push_back(0);
      if (found) {
        covered[b] += bins;
        if (covered[b] == layers[b].bins) open.remove(*found);
      }
      rank += bins * each;
      left -= bins * each;
      const int64_t holds = max_pieces > 0 ? held + each : 0, rest = room - each * length;
      if (rest >= least_room && (holds < max_pieces || max_pieces == 0)) {
        open.add(layer, rest, holds);
      }
    }
  }
  int64_t first = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const int64_t bins = layers[l].bins - covered[l];
    if (bins > 0) packed.runs.push_back({static_cast<int64_t>(l), covered[l], first});
    first += bins;
  }
  packed.runs.push_back({static_cast<int64_t>(layers.size()), 0, first});
  return packed;
}

}  // namespace megaindex
