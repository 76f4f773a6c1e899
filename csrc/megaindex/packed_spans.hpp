// Spans of packed bins, found without a table of bins or of the order of an epoch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "megaindex/bijection.hpp"
#include "megaindex/invalid_input.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/pieces.hpp"
#include "megaindex/poll.hpp"
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

  // Return the key of the permutation of the pieces of a length.
  uint64_t word(int64_t length) const { return key_word(key_, static_cast<uint64_t>(length)); }

  // Replace ranks[k], one of n[k] of a length with the key words[k], by its place in document order.
  void apply(const uint64_t* words, const int64_t* n, int64_t count, int64_t* ranks) const {
    map<false>(words, n, count, ranks);
  }
  // Replace each place in document order by its rank.
  void invert(const uint64_t* words, const int64_t* n, int64_t count, int64_t* places) const {
    map<true>(words, n, count, places);
  }

 private:
  static constexpr uint64_t kRounds = 48;
  static constexpr uint64_t kRoundWords = uint64_t{1} << 32;
  static constexpr int64_t kAtOnce = 64;
  static constexpr int64_t kLanes = 32;  // with 4 registers the latencies of instructions overlap

  template <bool kBack>
  void map(const uint64_t* words, const int64_t* n, int64_t count, int64_t* ranks) const {
    Batch few, many;
    for (int64_t k = 0; k < count; ++k) {
      if (n[k] == 1) continue;
      if (n[k] > INT32_MAX) {
        ranks[k] = shuffle_one<kBack>(words[k], n[k], ranks[k]);
      } else if (n[k] < kBijectionTableBelow) {
        if (few.add(k, ranks[k], n[k], words[k])) shuffle_few<kBack>(few, ranks);
      } else {
        if (many.add(k, ranks[k], n[k], words[k])) shuffle_many<kBack>(many, ranks);
      }
    }
    shuffle_few<kBack>(few, ranks);
    shuffle_many<kBack>(many, ranks);
  }

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

  template <bool kBack>
  int64_t shuffle_one(uint64_t word, int64_t n, int64_t rank) const {
    Feistel network(n);
    for (size_t r = 0; r < kBijectionRounds; ++r) {
      network.rounds[r] = {static_cast<uint32_t>(word) ^ pair_[r],
                           (static_cast<uint32_t>(word >> 32) ^ swap_[r]) | 1};
    }
    const auto x = static_cast<uint64_t>(rank);
    return static_cast<int64_t>(kBack ? network.invert(x) : network.at(x));
  }

  template <bool kBack>
  void shuffle_many(Batch& batch, int64_t* ranks) const {
    has_avx2() ? networks_avx2<kBack>(batch) : networks<kBack>(batch);
    for (int64_t i = 0; i < batch.count; ++i) {
      int64_t& rank = ranks[batch.of[i]];
      rank = batch.rank[i];
      if (batch.rank[i] < batch.n[i]) continue;  // else mapped again, see bijection.hpp
      rank = shuffle_one<kBack>(uint64_t{batch.high[i]} << 32 | batch.low[i], batch.n[i], rank);
    }
    batch.count = 0;
  }
  template <bool kBack>
  void shuffle_few(Batch& batch, int64_t* ranks) const {
    has_avx2() ? rounds_avx2<kBack>(batch) : rounds<kBack>(batch);
    for (int64_t i = 0; i < batch.count; ++i) ranks[batch.of[i]] = batch.rank[i];
    batch.count = 0;
  }

  template <bool kBack>
  MEGAINDEX_AVX2 void networks_avx2(Batch& batch) const {
    networks<kBack>(batch);
  }
  template <bool kBack>
  MEGAINDEX_AVX2 void rounds_avx2(Batch& batch) const {
    rounds<kBack>(batch);
  }

  template <bool kBack>
  __attribute__((always_inline)) void networks(Batch& batch) const {
    int64_t i = 0;
    for (; i + 8 < batch.count; i += kLanes) networks<kBack, kLanes>(batch, i);
    for (; i < batch.count; i += 8) networks<kBack, 8>(batch, i);
  }
  template <bool kBack>
  __attribute__((always_inline)) void rounds(Batch& batch) const {
    int64_t i = 0;
    for (; i + 8 < batch.count; i += kLanes) rounds<kBack, kLanes>(batch, i);
    for (; i < batch.count; i += 8) rounds<kBack, 8>(batch, i);
  }

  __attribute__((always_inline)) static uint32_t hash(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
  }

  // The swap-or-not shuffle; each of its rounds is its own inverse.
  template <bool kBack, int64_t kCount>
  __attribute__((always_inline)) void rounds(Batch& batch, int64_t begin) const {
    uint32_t x[kCount], size[kCount], low[kCount], high[kCount];
    std::copy_n(batch.rank + begin, kCount, x);
    std::copy_n(batch.n + begin, kCount, size);
    std::copy_n(batch.low + begin, kCount, low);
    std::copy_n(batch.high + begin, kCount, high);
    for (uint64_t step = 0; step < kRounds; ++step) {
      const uint64_t r = kBack ? kRounds - 1 - step : step;
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
  template <bool kBack, int64_t kCount>
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
    for (int64_t step = 0; step < kBijectionRounds; ++step) {
      const int64_t r = kBack ? kBijectionRounds - 1 - step : step;
      uint32_t* to = half[r % 2];
      const uint32_t *from = half[1 - r % 2], *most = size[r % 2];
      for (int64_t i = 0; i < kCount; ++i) {
        const FeistelRound round{low[i] ^ pair_[r], (high[i] ^ swap_[r]) | 1};
        const uint32_t hashed = round(from[i], most[i]);
        const uint32_t sum = kBack ? to[i] - hashed : to[i] + hashed;
        to[i] = std::min(sum, kBack ? sum + most[i] : sum - most[i]);  // modulo the size
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

// Finds the bin of a piece: the layer of its rank, then the layers above, up to a run of bins.
class BinFinder {
 public:
  BinFinder(const BinLayer* layers, int64_t num_layers, const BinRun* runs, int64_t num_runs,
            int64_t capacity)
      : layers_(layers),
        runs_(runs),
        first_(static_cast<size_t>(capacity) + 2, num_layers),
        above_(static_cast<size_t>(num_layers)),
        ends_(static_cast<size_t>(num_layers) + 1),
        run_of_(static_cast<size_t>(num_layers), -1) {
    int64_t length = capacity + 1;
    for (int64_t l = 0; l < num_layers; ++l) {
      const BinLayer& layer = layers[l];
      if (layer.length < 1 || layer.length > length || layer.below < -1 || layer.below >= l ||
          layer.each < 1 || layer.bins < 0 || layer.rank < 0 || layer.before < 0 ||
          layer.bins > (INT64_MAX >> 26) || layer.each > capacity) {
        throw_foreign();
      }
      while (length > layer.length) first_[static_cast<size_t>(--length)] = l;
      if (layer.below >= 0) ++ends_[static_cast<size_t>(layer.below) + 1];
    }
    while (length > 0) first_[static_cast<size_t>(--length)] = num_layers;
    for (size_t l = 1; l < ends_.size(); ++l) ends_[l] += ends_[l - 1];
    std::vector<int64_t> next(ends_.begin(), ends_.end() - 1);
    for (int64_t l = 0; l < num_layers; ++l) {  // those above a layer, by the bins they begin at
      const int64_t below = layers[l].below;
      if (below >= 0) above_[static_cast<size_t>(next[static_cast<size_t>(below)]++)] = l;
    }
    for (int64_t r = 0; r < num_runs; ++r) {
      if (runs[r].layer < 0 || runs[r].layer >= num_layers) throw_foreign();
      run_of_[static_cast<size_t>(runs[r].layer)] = r;
    }
  }

  // Return the bin of the piece of a rank; length >= 1.
  int64_t find(int64_t length, int64_t rank) const {
    const auto of = static_cast<size_t>(length);
    // lengths decrease: those of a length end where the next shorter one begins
    const BinLayer* begin = layers_ + first_[of];
    const BinLayer* end = layers_ + first_[of - 1];
    const BinLayer* found = std::upper_bound(
        begin, end, rank, [](int64_t r, const BinLayer& layer) { return r < layer.rank; });
    if (found == begin) throw_foreign();
    --found;
    int64_t place = (rank - found->rank) / found->each;
    if (place >= found->bins) throw_foreign();
    auto layer = static_cast<size_t>(found - layers_);
    while (true) {
      const int64_t* first = above_.data() + ends_[layer];
      const int64_t* stop = above_.data() + ends_[layer + 1];
      const int64_t* over = std::upper_bound(
          first, stop, place, [this](int64_t p, int64_t l) { return p < layers_[l].before; });
      if (over != first) {
        const BinLayer& above = layers_[*(over - 1)];
        if (place - above.before < above.bins) {
          layer = static_cast<size_t>(*(over - 1));
          place -= above.before;
          continue;
        }
      }
      if (run_of_[layer] < 0) throw_foreign();
      const BinRun& run = runs_[run_of_[layer]];
      if (place < run.before || run.first < 0 || run.first > (INT64_MAX >> 26)) throw_foreign();
      return run.first + (place - run.before);
    }
  }

  [[noreturn]] static void throw_foreign() {
    throw InvalidInput("the arrays do not belong together; sort and pack the pieces again");
  }

 private:
  const BinLayer* layers_;
  const BinRun* runs_;
  std::vector<int64_t> first_;  // first layer of each length; those of the next shorter one follow
  std::vector<int64_t> above_, ends_;
  std::vector<int64_t> run_of_;
};

// Set bins[k] to the bin, in an epoch, of the piece of length lengths[k] that has places[k] among
// those of its length in document order.
template <class Poll = NoPoll>
void packed_bins(const uint64_t* key, const int64_t* piece_starts, const BinFinder& finder,
                 int64_t capacity, const int64_t* lengths, const int64_t* places, int64_t count,
                 int num_threads, int64_t* bins, Poll poll = {}) {
  constexpr int64_t kAtOnce = 1024;
  const SharedPoll<Poll> shared(poll);
  const RankPermutations permutations(key);
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, count / (1 << 12)));
  run_parallel(parts, [&](int64_t part) {
    int64_t sizes[kAtOnce];
    uint64_t words[kAtOnce];
    const int64_t end = count * (part + 1) / parts;
    for (int64_t first = count * part / parts; first < end; first += kAtOnce) {
      shared();
      const int64_t group = std::min(kAtOnce, end - first);
      for (int64_t k = 0; k < group; ++k) {
        const int64_t length = lengths[first + k];
        bins[first + k] = places[first + k];
        sizes[k] = 1;  // whole samples are not permuted
        words[k] = permutations.word(length);
        if (length == capacity) continue;
        const int64_t begin = piece_starts[length], stop = piece_starts[length + 1];
        if (begin < 0 || stop < begin || stop > kBijectionMost) BinFinder::throw_foreign();
        sizes[k] = stop - begin;
        if (places[first + k] >= sizes[k]) BinFinder::throw_foreign();
      }
      permutations.invert(words, sizes, group, bins + first);
      for (int64_t k = first; k < first + group; ++k) bins[k] = finder.find(lengths[k], bins[k]);
    }
  });
}

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
      words_.clear();
      ranks_.clear();
      const BinRun* found[kAtOnce];
      find_runs(bins + first, count, found);
      for (int64_t k = first; k < first + count; ++k) {
        if (found[k - first] != run_) use_run(found[k - first]);
        add_pieces(bins[k]);
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
    if (are_near(bins, count, found)) return;
    std::fill(found, found + count, a_.runs);
    for (int64_t left = a_.num_runs; left > 1; left -= left / 2) {
      for (int64_t k = 0; k < count; ++k) {
        const BinRun* middle = found[k] + left / 2;
        found[k] = middle->first <= bins[k] ? middle : found[k];
      }
    }
  }

  // Set found[k] if each of these bins is in the run of the one before or in the next one.
  bool are_near(const int64_t* bins, int64_t count, const BinRun** found) const {
    const BinRun* run = run_;
    for (int64_t k = 0; k < count && run != nullptr; ++k) {
      run += bins[k] >= run[1].first && run + 1 < a_.runs + a_.num_runs;
      if (bins[k] < run->first || bins[k] >= run[1].first) return false;
      found[k] = run;
    }
    return run != nullptr;
  }

  // Return a + b, wrapped where foreign arrays overflow it; the caller checks its range.
  static int64_t sum(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }

  // The pieces of a layer in the bins of a run: ranks from (place + shift) * each + rank on.
  struct Part {
    int64_t length, size, rank, each, shift;
    uint64_t word;
  };

  // Read the layers of a run of bins, which have the same pattern.
  void use_run(const BinRun* run) {
    run_ = nullptr;
    parts_.clear();
    end_ = INT64_MAX;
    int64_t room = a_.capacity, shift = 0;
    for (int64_t layer = run->layer; layer >= 0;) {
      if (layer >= a_.num_layers) throw_foreign("runs");
      const BinLayer& l = a_.layers[layer];
      if (shift < 0 || l.before < 0 || l.bins < 0 || l.below >= layer || l.length < 1 ||
          l.length > room || l.each < 1 || l.each > room || l.each * l.length > room) {
        throw_foreign("layers");
      }
      const int64_t size = pieces_of(l.length);
      if (l.rank < 0 || l.rank > size || l.bins > (size - l.rank) / l.each) throw_foreign("layers");
      room -= l.each * l.length;
      const bool is_whole = l.length == a_.capacity;  // whole samples are not permuted
      parts_.push_back({l.length, is_whole ? 1 : size, l.rank, l.each, shift,
                        is_whole ? 0 : permutations_.word(l.length)});
      end_ = std::min(end_, sum(l.bins, -shift));
      shift = sum(shift, l.before);
      layer = l.below;
    }
    std::reverse(parts_.begin(), parts_.end());
    run_ = run;
  }

  // Append the pieces of a bin of the current run.
  void add_pieces(int64_t bin) {
    const int64_t place = sum(run_->before, sum(bin, sum(~run_->first, 1)));  // before + bin - first
    if (place < 0 || place >= end_) throw_foreign("layers");
    for (const Part& part : parts_) {
      const int64_t first = part.rank + (place + part.shift) * part.each;
      for (int64_t r = first; r < first + part.each; ++r) {
        lengths_.push_back(part.length);
        sizes_.push_back(part.size);
        words_.push_back(part.word);
        ranks_.push_back(r);
      }
    }
  }

  void add_spans(Runs& runs) {
    const auto count = static_cast<int64_t>(lengths_.size());
    permutations_.apply(words_.data(), sizes_.data(), count, ranks_.data());
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

  // Add the whole sample of a rank. Those of successive bins follow each other, so the search goes
  // on behind the document of the last one, or in the next row of the table.
  void add_whole_sample(int64_t rank, Runs& runs) {
    const int64_t* starts = a_.sample_starts;
    const int64_t rows = a_.num_starts - 1;
    if (row_ < 0 || rank < before_ || rank >= starts[row_ + 1]) {
      if (row_ >= 0 && row_ + 1 < rows && starts[row_ + 1] <= rank && rank < starts[row_ + 2]) {
        ++row_;
      } else {
        const int64_t* found = std::upper_bound(starts, starts + a_.num_starts, rank);
        if (found == starts || found == starts + a_.num_starts) throw_foreign("sample_starts");
        row_ = found - starts - 1;
      }
      before_ = starts[row_];
      document_ = row_ * kPieceStride;
      if (before_ < 0 || rank < before_) throw_foreign("sample_starts");
    }
    const int64_t end = std::min((row_ + 1) * kPieceStride, a_.lengths.count);
    for (; document_ < end; ++document_) {
      const int64_t length = a_.lengths[static_cast<uint64_t>(document_)];
      const int64_t samples = length < a_.capacity ? 0 : cut_(length).samples;
      if (rank - before_ < samples) {
        const int64_t to = (rank - before_ + 1) * a_.capacity;
        runs.add(document_, to - a_.capacity, a_.capacity + (to < length ? a_.extra : 0));
        return;
      }
      before_ += samples;
    }
    row_ = -1;
    throw_foreign("sample_starts");
  }

  const PackedArrays a_;
  const Cutter cut_;
  const RankPermutations permutations_;
  const BinRun* run_ = nullptr;  // the run of the last bin
  std::vector<Part> parts_;      // its layers, the lowest first
  int64_t end_ = 0;              // first place that is in none of its bins
  int64_t row_ = -1;             // of the table, that holds the last whole sample
  int64_t before_ = 0;           // whole samples before its document
  int64_t document_ = 0;
  std::vector<int64_t> lengths_, sizes_, ranks_;  // of the pieces of the current bins
  std::vector<uint64_t> words_;
};

}  // namespace megaindex
