// Spans of packed bins, found without a table of bins or of the order of an epoch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "megaindex/bijection.hpp"
#include "megaindex/invalid_input.hpp"
#include "megaindex/pieces.hpp"
#include "megaindex/runs.hpp"

namespace megaindex {

// The rank permutations of an epoch, one for each length; reference/packing.py has the rules.
class RankPermutations {
 public:
  explicit RankPermutations(const uint64_t* key) : key_{key[0], key[1]} {
    for (uint64_t r = 0; r < kRounds; ++r) {
      const uint64_t word = key_word(key, kRoundWords + r);
      pair_[r] = static_cast<uint32_t>(word);
      swap_[r] = static_cast<uint32_t>(word >> 32);
    }
  }

  // Replace ranks[k], one of n[k] of length lengths[k], by its place in document order.
  void apply(const int64_t* lengths, const int64_t* n, int64_t count, int64_t* ranks) const {
    Batch few, many;
    for (int64_t k = 0; k < count; ++k) {
      if (n[k] == 1) continue;
      const uint64_t word = key_word(key_, static_cast<uint64_t>(lengths[k]));
      if (n[k] > INT32_MAX) {
        ranks[k] = shuffle_one(word, n[k], ranks[k]);
      } else if (n[k] < kBijectionTableBelow) {
        if (few.add(k, ranks[k], n[k], word)) shuffle_few(few, ranks);
      } else {
        if (many.add(k, ranks[k], n[k], word)) shuffle_many(many, ranks);
      }
    }
    shuffle_few(few, ranks);
    shuffle_many(many, ranks);
  }

 private:
  static constexpr uint64_t kRounds = 48;
  static constexpr uint64_t kRoundWords = uint64_t{1} << 32;
  static constexpr int64_t kAtOnce = 64;
  static constexpr int64_t kLanes = 32;  // with 4 registers the latencies of instructions overlap

  // Ranks that are permuted together, each among those of its length.
  struct Batch {
    int64_t count = 0;
    int64_t of[kAtOnce];
    uint32_t rank[kAtOnce] = {}, n[kAtOnce], low[kAtOnce] = {}, high[kAtOnce] = {};

    Batch() { std::fill(n, n + kAtOnce, 1); }
    // Return true if the batch is full.
    bool add(int64_t k, int64_t at, int64_t size, uint64_t word) {
      of[count] = k;
      rank[count] = static_cast<uint32_t>(at);
      n[count] = static_cast<uint32_t>(size);
      low[count] = static_cast<uint32_t>(word);
      high[count] = static_cast<uint32_t>(word >> 32);
      return ++count == kAtOnce;
    }
  };

  int64_t shuffle_one(uint64_t word, int64_t n, int64_t rank) const {
    Feistel network(n);
    for (size_t r = 0; r < kBijectionRounds; ++r) {
      network.rounds[r] = {static_cast<uint32_t>(word) ^ pair_[r],
                           (static_cast<uint32_t>(word >> 32) ^ swap_[r]) | 1};
    }
    return static_cast<int64_t>(network.at(static_cast<uint64_t>(rank)));
  }

  void shuffle_many(Batch& batch, int64_t* ranks) const {
    has_avx2() ? networks_avx2(batch) : networks(batch);
    for (int64_t i = 0; i < batch.count; ++i) {
      int64_t& rank = ranks[batch.of[i]];
      rank = batch.rank[i];
      if (batch.rank[i] < batch.n[i]) continue;  // else mapped again, see bijection.hpp
      rank = shuffle_one(uint64_t{batch.high[i]} << 32 | batch.low[i], batch.n[i], rank);
    }
    batch.count = 0;
  }
  void shuffle_few(Batch& batch, int64_t* ranks) const {
    has_avx2() ? rounds_avx2(batch) : rounds(batch);
    for (int64_t i = 0; i < batch.count; ++i) ranks[batch.of[i]] = batch.rank[i];
    batch.count = 0;
  }

  MEGAINDEX_AVX2 void networks_avx2(Batch& batch) const { networks(batch); }
  MEGAINDEX_AVX2 void rounds_avx2(Batch& batch) const { rounds(batch); }

  __attribute__((always_inline)) void networks(Batch& batch) const {
    int64_t i = 0;
    for (; i + 8 < batch.count; i += kLanes) networks<kLanes>(batch, i);
    for (; i < batch.count; i += 8) networks<8>(batch, i);
  }
  __attribute__((always_inline)) void rounds(Batch& batch) const {
    int64_t i = 0;
    for (; i + 8 < batch.count; i += kLanes) rounds<kLanes>(batch, i);
    for (; i < batch.count; i += 8) rounds<8>(batch, i);
  }

  __attribute__((always_inline)) static uint32_t hash(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
  }

  // The swap-or-not shuffle.
  template <int64_t kCount>
  __attribute__((always_inline)) void rounds(Batch& batch, int64_t begin) const {
    uint32_t x[kCount], size[kCount], low[kCount], high[kCount];
    std::copy_n(batch.rank + begin, kCount, x);
    std::copy_n(batch.n + begin, kCount, size);
    std::copy_n(batch.low + begin, kCount, low);
    std::copy_n(batch.high + begin, kCount, high);
    for (uint64_t r = 0; r < kRounds; ++r) {
      for (int64_t i = 0; i < kCount; ++i) {
        // n is below 2^12 and the hash is cut to its 20 upper bits, so 32 bits hold the product
        const uint32_t sum = ((hash(low[i] ^ pair_[r]) >> 12) * size[i]) >> 20;
        const uint32_t apart = sum - x[i];
        const uint32_t partner = std::min(apart, apart + size[i]);  // modulo n
        const uint32_t larger = std::max(x[i], partner);
        const uint32_t swaps = 0U - (hash(larger ^ high[i] ^ swap_[r]) >> 31);
        x[i] ^= (x[i] ^ partner) & swaps;
      }
    }
    std::copy_n(x, kCount, batch.rank + begin);
  }

  // The networks of bijections, once; a result may be a cell beyond n.
  template <int64_t kCount>
  __attribute__((always_inline)) void networks(Batch& batch, int64_t begin) const {
    uint32_t half[2][kCount], size[2][kCount], low[kCount], high[kCount];
    for (int64_t i = 0; i < kCount; ++i) {
      // n is below 2^31: these square roots and quotients of doubles are exact when rounded down
      const auto n = static_cast<int32_t>(batch.n[begin + i]);
      const auto root = static_cast<int32_t>(std::sqrt(static_cast<double>(n)));
      const int32_t rows = root + (root * root < n);
      const auto columns = static_cast<int32_t>(static_cast<double>(n - 1) / rows) + 1;
      const auto rank = static_cast<int32_t>(batch.rank[begin + i]);
      const auto left = static_cast<int32_t>(static_cast<double>(rank) / columns);
      half[0][i] = static_cast<uint32_t>(left);
      half[1][i] = static_cast<uint32_t>(rank - left * columns);
      size[0][i] = static_cast<uint32_t>(rows);
      size[1][i] = static_cast<uint32_t>(columns);
    }
    std::copy_n(batch.low + begin, kCount, low);
    std::copy_n(batch.high + begin, kCount, high);
    for (int64_t r = 0; r < kBijectionRounds; ++r) {
      uint32_t* to = half[r % 2];
      const uint32_t *from = half[1 - r % 2], *most = size[r % 2];
      for (int64_t i = 0; i < kCount; ++i) {
        const FeistelRound round{low[i] ^ pair_[r], (high[i] ^ swap_[r]) | 1};
        const uint32_t sum = to[i] + round(from[i], most[i]);
        to[i] = std::min(sum, sum - most[i]);  // modulo the size
      }
    }
    for (int64_t i = 0; i < kCount; ++i) {
      batch.rank[begin + i] = half[0][i] * size[1][i] + half[1][i];
    }
  }

  uint64_t key_[2];
  uint32_t pair_[kRounds], swap_[kRounds];
};

// The arrays of packed bins, of any origin: all numbers are checked when they are used.
struct PackedArrays {
  const uint64_t* key;
  detail::FileLengths lengths;
  LongDocuments long_documents;
  int64_t extra;
  const int64_t* piece_starts;  // capacity + 1: first entry of each length in `documents`
  int64_t capacity;
  const int32_t* documents;
  int64_t num_documents;  // of that array
  const int64_t* sample_starts;
  int64_t num_starts;
  const BinLayer* layers;
  int64_t num_layers;
  const BinRun* runs;
  int64_t num_runs;  // without the last row
};

class PackedReader {
 public:
  explicit PackedReader(const PackedArrays& arrays)
      : a_(arrays),
        cut_(arrays.capacity, arrays.long_documents),
        permutations_(arrays.key) {
    if (a_.num_runs < 0 || a_.runs[0].first != 0) throw_foreign("runs");
  }

  void read(const int64_t* bins, int64_t n, Runs& runs, int64_t* row_splits) {
    row_splits[0] = 0;
    for (int64_t first = 0; first < n; first += kAtOnce) {
      const int64_t count = std::min(kAtOnce, n - first);
      lengths_.clear();
      sizes_.clear();
      ranks_.clear();
      const BinRun* found[kAtOnce];
      find_runs(bins + first, count, found);
      for (int64_t k = first; k < first + count; ++k) {
        add_pieces(bins[k], found[k - first]);
        row_splits[k + 1] = row_splits[first] + static_cast<int64_t>(lengths_.size());
      }
      add_spans(runs);
    }
  }

 private:
  static constexpr int64_t kAtOnce = 128;

  [[noreturn]] static void throw_foreign(const char* name) {
    throw InvalidInput(std::string(name) +
                       ": the arrays do not belong together; sort and pack the pieces again");
  }

  int64_t pieces_of(int64_t length) const {
    if (length == a_.capacity) return a_.sample_starts[a_.num_starts - 1];
    const int64_t begin = a_.piece_starts[length], end = a_.piece_starts[length + 1];
    if (begin < 0 || end < begin || end > a_.num_documents) throw_foreign("piece_starts");
    return end - begin;
  }

  // Set found[k] to the run of bins[k]; bisecting for all together lets their steps overlap.
  void find_runs(const int64_t* bins, int64_t count, const BinRun** found) const {
    const int64_t end = a_.runs[a_.num_runs].first;
    for (int64_t k = 0; k < count; ++k) {
      if (bins[k] < 0 || bins[k] >= end) {
        throw InvalidInput("bins: bin " + std::to_string(bins[k]) + " of " + std::to_string(end));
      }
      found[k] = a_.runs;
    }
    for (int64_t left = a_.num_runs; left > 1; left -= left / 2) {
      for (int64_t k = 0; k < count; ++k) {
        const BinRun* middle = found[k] + left / 2;
        found[k] = middle->first <= bins[k] ? middle : found[k];
      }
    }
  }

  // Return a + b, wrapped where foreign arrays overflow it; the caller checks its range.
  static int64_t sum(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }

  // Append the lengths and ranks of the pieces of a bin.
  void add_pieces(int64_t bin, const BinRun* run) {
    int64_t layer = run->layer, room = a_.capacity;
    int64_t place = sum(run->before, sum(sum(bin, ~run->first), 1));  // before + bin - first
    const size_t begin = lengths_.size();
    while (layer >= 0) {
      if (layer >= a_.num_layers) throw_foreign("runs");
      const BinLayer& l = a_.layers[layer];
      if (place < 0 || place >= l.bins || l.before < 0 || l.below >= layer || l.length < 1 ||
          l.length > room || l.each < 1 || l.each > room || l.each * l.length > room) {
        throw_foreign("layers");
      }
      const int64_t size = pieces_of(l.length);
      if (l.rank < 0 || l.rank > size || l.bins > (size - l.rank) / l.each) throw_foreign("layers");
      room -= l.each * l.length;
      for (int64_t r = l.rank + (place + 1) * l.each; r-- > l.rank + place * l.each;) {
        lengths_.push_back(l.length);
        sizes_.push_back(l.length == a_.capacity ? 1 : size);  // whole samples are not permuted
        ranks_.push_back(r);
      }
      place = sum(place, l.before);
      layer = l.below;
    }
    std::reverse(lengths_.begin() + static_cast<int64_t>(begin), lengths_.end());
    std::reverse(sizes_.begin() + static_cast<int64_t>(begin), sizes_.end());
    std::reverse(ranks_.begin() + static_cast<int64_t>(begin), ranks_.end());
  }

  void add_spans(Runs& runs) {
    const auto count = static_cast<int64_t>(lengths_.size());
    permutations_.apply(lengths_.data(), sizes_.data(), count, ranks_.data());
    for (int64_t k = 0; k < count; ++k) {
      const auto i = static_cast<size_t>(k);
      if (lengths_[i] < a_.capacity) {
        ranks_[i] += a_.piece_starts[lengths_[i]];
        __builtin_prefetch(a_.documents + ranks_[i]);
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      const auto i = static_cast<size_t>(k);
      if (lengths_[i] == a_.capacity) continue;
      ranks_[i] = a_.documents[ranks_[i]];
      if (ranks_[i] < 0 || ranks_[i] >= a_.lengths.count) throw_foreign("documents");
      __builtin_prefetch(a_.lengths.address(static_cast<uint64_t>(ranks_[i])));
    }
    for (int64_t k = 0; k < count; ++k) {
      const auto i = static_cast<size_t>(k);
      if (lengths_[i] == a_.capacity) {
        add_whole_sample(ranks_[i], runs);
        continue;
      }
      const int64_t used = cut_.used(a_.lengths[static_cast<uint64_t>(ranks_[i])]);
      if (used < lengths_[i]) throw_foreign("documents");
      runs.add(ranks_[i], used - lengths_[i], lengths_[i]);
    }
  }

  void add_whole_sample(int64_t rank, Runs& runs) const {
    const int64_t* stop = a_.sample_starts + a_.num_starts;
    const int64_t* found = std::upper_bound(a_.sample_starts, stop, rank);
    if (found == a_.sample_starts || found == stop) throw_foreign("sample_starts");
    if (*--found < 0) throw_foreign("sample_starts");
    rank -= *found;
    const int64_t first = (found - a_.sample_starts) * kPieceStride;
    for (int64_t d = first; d < std::min(first + kPieceStride, a_.lengths.count); ++d) {
      const int64_t length = a_.lengths[static_cast<uint64_t>(d)];
      const int64_t samples = length < a_.capacity ? 0 : cut_(length).samples;
      if (rank < samples) {
        const int64_t end = (rank + 1) * a_.capacity;
        runs.add(d, rank * a_.capacity, a_.capacity + (end < length ? a_.extra : 0));
        return;
      }
      rank -= samples;
    }
    throw_foreign("sample_starts");
  }

  const PackedArrays a_;
  const Cutter cut_;
  const RankPermutations permutations_;
  std::vector<int64_t> lengths_, sizes_, ranks_;  // of the pieces of the current bins
};

}  // namespace megaindex
