// Token runs of samples of Megatron's three arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "megaindex/invalid_input.hpp"
#include "megaindex/runs.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex {

// Sample i of training is sample s = shuffle[i] of the concatenated documents, from row s of
// `samples` to row s + 1. All values are checked, since cache files may be damaged.
template <class Shuffle, class Cell>
struct IndexArrays {
  const Shuffle* shuffle;
  int64_t num_samples;
  const Cell* samples;  // rows of (position in documents, offset)
  int64_t num_rows;
  const int32_t* documents;
  int64_t num_documents;
  detail::FileLengths lengths;
  int64_t extra;
};

namespace detail {

// From offset `begin` of the document at position `first` to offset `end` of that at `last`.
struct Extent {
  int64_t first, begin, last, end;
};

// A batch of samples that takes each step together: every step prefetches what the next one reads,
// so that the cache misses of the samples overlap.
template <class Shuffle, class Cell>
class ArrayBatch {
 public:
  static constexpr int64_t kSamples = 64;

  ArrayBatch(const IndexArrays<Shuffle, Cell>& index, const int64_t* ids, int64_t count)
      : index_(index), ids_(ids), count_(count), neighbours_(are_neighbours()) {
    if (neighbours_) return;
    request_rows();
    request_documents();
    request_lengths();
  }

  void add_to(Runs& runs, int64_t* row_splits) const {
    for (int64_t k = 0; k < count_; ++k) {
      if (neighbours_) {
        add_sample(extent_of(static_cast<int64_t>(index_.shuffle[ids_[0] + k])), runs);
      } else {
        add_sample(extents_[k], runs);
      }
      row_splits[k] = runs.size();
    }
  }

 private:
  static constexpr int64_t kDocumentsAhead = 16;

  // Return whether these are nearly successive samples in order, which the hardware prefetches.
  bool are_neighbours() const {
    const int64_t first = ids_[0], last = ids_[count_ - 1];
    if (first < 0 || last != first + count_ - 1 || last >= index_.num_samples) return false;
    bool follow = true;
    for (int64_t k = 1; k < count_; ++k) {
      follow &= ids_[k - 1] < ids_[k] && index_.shuffle[first + k - 1] < index_.shuffle[first + k];
    }
    const auto begin = static_cast<int64_t>(index_.shuffle[first]);
    const auto end = static_cast<int64_t>(index_.shuffle[last]);
    return follow && begin >= 0 && end < index_.num_rows - 1 && end - begin < 16 * kSamples;
  }

  void request_rows() {
    for (int64_t k = 0; k < count_; ++k) {
      if (ids_[k] < 0 || ids_[k] >= index_.num_samples) {
        throw InvalidInput("sample_ids: sample " + std::to_string(ids_[k]) + " of " +
                           std::to_string(index_.num_samples) + " samples");
      }
      __builtin_prefetch(index_.shuffle + ids_[k]);
    }
    for (int64_t k = 0; k < count_; ++k) {
      const auto row = static_cast<int64_t>(index_.shuffle[ids_[k]]);
      if (row < 0 || row >= index_.num_rows - 1) {
        throw InvalidInput("shuffle_index: entry " + std::to_string(ids_[k]) + " is " +
                           std::to_string(row) + ", sample_index holds " +
                           std::to_string(index_.num_rows - 1) + " samples; build the index again");
      }
      extents_[k].first = row;
      __builtin_prefetch(index_.samples + 2 * row);
      __builtin_prefetch(index_.samples + 2 * row + 3);
    }
  }

  void request_documents() {
    for (int64_t k = 0; k < count_; ++k) {
      extents_[k] = extent_of(extents_[k].first);
      __builtin_prefetch(index_.documents + extents_[k].first);
    }
  }

  Extent extent_of(int64_t row) const {
    const Cell* cells = index_.samples + 2 * row;
    Extent extent{cells[0], cells[1], cells[2], cells[3]};
    if (extent.first < 0 || extent.first > extent.last || extent.last >= index_.num_documents ||
        extent.end > INT32_MAX) {
      throw_damaged(extent);
    }
    extent.end += index_.extra;
    return extent;
  }

  void request_lengths() const {
    for (int64_t k = 0; k < count_; ++k) {
      const Extent& extent = extents_[k];
      const int64_t last = std::min(extent.last, extent.first + kDocumentsAhead - 1);
      for (int64_t p = extent.first; p <= last; ++p) request_length(p);
    }
  }

  void request_length(int64_t position) const {
    const auto document = static_cast<uint64_t>(int64_t{index_.documents[position]});
    __builtin_prefetch(index_.lengths.address(exists(document) ? document : 0));
  }

  // As unsigned, a negative id is too large.
  bool exists(uint64_t document) const {
    return document < static_cast<uint64_t>(index_.lengths.count);
  }

  void add_sample(const Extent& extent, Runs& runs) const {
    // the documents of neighbours follow each other too
    const int64_t ahead = neighbours_ ? 4 * kDocumentsAhead : kDocumentsAhead;
    const int64_t stop = neighbours_ ? index_.num_documents : extent.last + 1;
    for (int64_t p = extent.first; p <= extent.last; ++p) {
      if (p + ahead < stop) request_length(p + ahead);
      const auto document = static_cast<uint64_t>(int64_t{index_.documents[p]});
      if (!exists(document)) throw_damaged(extent);
      const int64_t length = index_.lengths[document];
      const int64_t from = p == extent.first ? extent.begin : 0;
      const int64_t to = p == extent.last ? extent.end : length;
      if (from < 0 || from > to || to > length) throw_damaged(extent);
      if (from < to) runs.add(static_cast<int64_t>(document), from, to - from);
    }
  }

  [[noreturn]] static void throw_damaged(const Extent& extent) {
    throw InvalidInput(
        "sample_index: a sample from offset " + std::to_string(extent.begin) + " at position " +
        std::to_string(extent.first) + " to offset " + std::to_string(extent.end) +
        " at position " + std::to_string(extent.last) +
        " of document_index leaves its documents; build the index again");
  }

  const IndexArrays<Shuffle, Cell>& index_;
  const int64_t* ids_;
  const int64_t count_;
  const bool neighbours_;
  Extent extents_[kSamples];  // `first` is the row between two steps; unused for neighbours
};

}  // namespace detail

// Add the runs of n samples, none empty; those of sample k are row_splits[k] ... row_splits[k + 1]
// - 1.
template <class Shuffle, class Cell>
void array_spans(const IndexArrays<Shuffle, Cell>& index, const int64_t* ids, int64_t n, Runs& runs,
                 int64_t* row_splits) {
  using Batch = detail::ArrayBatch<Shuffle, Cell>;
  row_splits[0] = 0;
  for (int64_t first = 0; first < n; first += Batch::kSamples) {
    const Batch batch(index, ids + first, std::min(Batch::kSamples, n - first));
    batch.add_to(runs, row_splits + first + 1);
  }
}

}  // namespace megaindex
