// Samples of sentence corpora: build_mapping (BERT, T5) and build_blocks_mapping (REALM).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>

#include "megaindex/invalid_input.hpp"
#include "megaindex/mt19937.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

// Documents with a longer sentence are left out.
constexpr int32_t kLongestSentence = 512;

struct MappingArgs {
  const int64_t* docs;  // num_docs + 1 bounds: document d is the sentences docs[d] .. docs[d+1]-1
  int64_t num_docs;
  const int32_t* sizes;  // tokens of each sentence
  int64_t num_epochs;
  int64_t max_num_samples;  // no further epoch is begun once there are this many
  int64_t max_seq_length;
  int32_t seed;
  int64_t min_num_sent;  // of a document that is used, and of each sample but its last
};

// The sentences [start, end) of one document; `number` counts samples within the epoch.
struct MappedSample {
  int64_t start, end, target, document, number;
};

// build_mapping: rows (start, end, target), one target in 1 / short_seq_prob drawn short.
class SentenceMapping {
 public:
  static constexpr int64_t kWidth = 3;

  SentenceMapping(const MappingArgs& args, double short_seq_prob)
      : rng_(static_cast<uint32_t>(args.seed)),
        longest_(static_cast<uint32_t>(args.max_seq_length)),
        draws_(short_seq_prob > 0),
        divisor_(draws_ ? UINT64_MAX / ratio(short_seq_prob) + 1 : 0) {}

  bool epochs_alike() const { return !draws_; }
  // Sentences that a sample leaves to its document, unless it takes all.
  int64_t min_left() const { return 2; }
  // A document of one long sentence is kept, since it can be cut to length.
  bool refuses_long(int64_t sentences) const { return sentences > 1; }

  int64_t target(int64_t /*document*/) {
    if (!draws_) return longest_;
    const uint32_t word = rng_.next32();
    return is_multiple(word) ? 2 + word % (longest_ - 1) : longest_;
  }

  template <class Index>
  static void write(const MappedSample& sample, Index* row) {
    row[0] = static_cast<Index>(sample.start);
    row[1] = static_cast<Index>(sample.end);
    row[2] = static_cast<Index>(sample.target);
  }

 private:
  // At most 2^32: a 32-bit word is a multiple of larger ratios only if it is 0.
  static uint64_t ratio(double short_seq_prob) {
    return static_cast<uint64_t>(std::min(std::round(1 / short_seq_prob), 4294967296.0));
  }

  // word % ratio == 0 without dividing: with c = ceil(2^64 / ratio), word * c modulo 2^64 is below
  // c for multiples only (Lemire, Kaser, Kurz 2019). A ratio of 1 gives c = 2^64, stored as 0.
  bool is_multiple(uint32_t word) const { return word * divisor_ <= divisor_ - 1; }

  Mt19937 rng_;  // the same stream as std::mt19937
  uint32_t longest_;
  bool draws_;
  uint64_t divisor_;
};

// build_blocks_mapping: rows (start, end, document, number), leaving room for the document's title.
class BlockMapping {
 public:
  static constexpr int64_t kWidth = 4;

  BlockMapping(const MappingArgs& args, const int32_t* titles_sizes)
      : longest_(args.max_seq_length), min_left_(args.min_num_sent), titles_(titles_sizes) {}

  bool epochs_alike() const { return true; }
  int64_t min_left() const { return min_left_; }
  bool refuses_long(int64_t /*sentences*/) const { return true; }
  int64_t target(int64_t document) const { return longest_ - titles_[document]; }

  template <class Index>
  static void write(const MappedSample& sample, Index* row) {
    row[0] = static_cast<Index>(sample.start);
    row[1] = static_cast<Index>(sample.end);
    row[2] = static_cast<Index>(sample.document);
    row[3] = static_cast<Index>(sample.number);
  }

 private:
  int64_t longest_;
  int64_t min_left_;
  const int32_t* titles_;
};

// The Fisher-Yates shuffle of both mappings. Positions are drawn and prefetched one chunk ahead of
// the swaps, so that cache misses overlap.
template <int64_t kWidth, class Index, class Poll>
void shuffle_rows(uint64_t seed, Index* rows, int64_t num_rows, Poll& poll) {
  constexpr int64_t kChunk = 128;
  std::mt19937_64 rng(seed);
  std::array<Index*, kChunk> partners;
  int64_t last = num_rows - 1;
  for (int64_t chunk = 0; last > 0; ++chunk) {
    const int64_t count = std::min(kChunk, last);
    for (int64_t k = 0; k < count; ++k) {
      const uint64_t position = rng() % static_cast<uint64_t>(last - k + 1);
      Index* partner = rows + static_cast<int64_t>(position) * kWidth;
      __builtin_prefetch(partner, 1);
      partners[static_cast<size_t>(k)] = partner;
    }
    for (int64_t k = 0; k < count; ++k) {
      Index* row = rows + (last - k) * kWidth;
      Index* partner = partners[static_cast<size_t>(k)];
      for (int64_t column = 0; column < kWidth; ++column) std::swap(row[column], partner[column]);
    }
    last -= count;
    if (chunk % 4096 == 4095) poll();  // about every million swaps
  }
}

// Samples of a corpus: count() returns the number of rows that fill() writes. The arrays of `args`
// must outlive the object.
template <class Kind>
class Mapping {
 public:
  template <class... KindArgs>
  explicit Mapping(const MappingArgs& args, KindArgs... kind_args)
      : args_(args), kind_(args, kind_args...) {}

  template <class Poll = NoPoll>
  int64_t count(Poll poll = {}) {
    find_documents(poll);
    num_samples_ = num_epochs_ = 0;
    Kind kind = kind_;
    while (num_epochs_ < args_.num_epochs && num_samples_ < args_.max_num_samples) {
      const int64_t in_epoch = visit_samples(kind, [](const MappedSample&) {}, poll);
      if (in_epoch == 0) break;  // further epochs are empty too
      int64_t epochs = 1;
      if (kind.epochs_alike()) {
        const int64_t enough = (args_.max_num_samples - 1) / in_epoch + 1;
        epochs = std::min(args_.num_epochs, enough);
      }
      if (epochs > (kMostSamples - num_samples_) / in_epoch) {
        throw InvalidInput("num_epochs, max_num_samples: at most 2**40 samples");
      }
      num_epochs_ += epochs;
      num_samples_ += epochs * in_epoch;
    }
    return num_samples_;
  }

  // Fill `out` after count(), which returns its number of rows.
  template <class Index, class Poll = NoPoll>
  void fill(Index* out, Poll poll = {}) const {
    Kind kind = kind_;
    Index* end = out;
    for (int64_t epoch = 0; epoch < num_epochs_; ++epoch) {
      if (epoch > 0 && kind.epochs_alike()) {
        end = std::copy_n(out, num_samples_ / num_epochs_ * Kind::kWidth, end);
        poll();
      } else {
        const auto write = [end](const MappedSample& sample) {
          Kind::write(sample, end + sample.number * Kind::kWidth);
        };
        end += visit_samples(kind, write, poll) * Kind::kWidth;
      }
    }
    // Megatron adds in 32 bits, so 2^31 - 1 is followed by -2^31, and then extends the sign.
    const auto next_seed = static_cast<int32_t>(static_cast<uint32_t>(args_.seed) + 1);
    shuffle_rows<Kind::kWidth>(static_cast<uint64_t>(int64_t{next_seed}), out, num_samples_, poll);
  }

 private:
  // Mark the documents that are used, which are the same in every epoch.
  template <class Poll>
  void find_documents(Poll& poll) {
    takes_part_ = std::make_unique<bool[]>(static_cast<size_t>(args_.num_docs));
    for (int64_t doc = 0; doc < args_.num_docs; ++doc) {
      if (doc % kPollEvery == 0) poll();
      const int32_t* first = args_.sizes + args_.docs[doc];
      const int32_t* last = args_.sizes + args_.docs[doc + 1];
      const int64_t sentences = last - first;
      takes_part_[doc] = sentences >= args_.min_num_sent &&
                         !(kind_.refuses_long(sentences) && has_long_sentence(first, last));
    }
  }

  static bool has_long_sentence(const int32_t* first, const int32_t* last) {
    return std::any_of(first, last, [](int32_t size) { return size > kLongestSentence; });
  }

  // Call `sink` with every sample of one epoch and return their number.
  template <class Sink, class Poll>
  int64_t visit_samples(Kind& kind, Sink sink, Poll& poll) const {
    int64_t samples = 0;
    for (int64_t doc = 0; doc < args_.num_docs; ++doc) {
      if (doc % kPollEvery == 0) poll();
      if (!takes_part_[doc]) continue;
      const int64_t last = args_.docs[doc + 1];
      for (int64_t start = args_.docs[doc];;) {
        // also drawn after a document's last sample, as in Megatron
        const int64_t target = kind.target(doc);
        if (start == last) break;
        const int64_t end = cut(start, last, target);
        sink(MappedSample{start, end, target, doc, samples});
        ++samples;
        start = end;
      }
    }
    return samples;
  }

  // Return the end of a sample: where it reaches its target, or if it would have or leave too few
  // sentences, the end of the document.
  int64_t cut(int64_t start, int64_t last, int64_t target) const {
    const int64_t latest = last - kind_.min_left();
    int64_t tokens = 0;
    for (int64_t end = start; end < latest;) {
      tokens += args_.sizes[end++];
      if (tokens >= target && end - start >= args_.min_num_sent) return end;
    }
    return last;
  }

  static constexpr int64_t kPollEvery = 1 << 16;  // documents
  static constexpr int64_t kMostSamples = int64_t{1} << 40;  // more than any memory holds

  const MappingArgs args_;
  const Kind kind_;
  std::unique_ptr<bool[]> takes_part_;
  int64_t num_epochs_ = 0;
  int64_t num_samples_ = 0;
};

}  // namespace megaindex
