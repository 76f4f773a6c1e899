// The documents of one complete pass, in an order that is computed and not stored.
//
// Stored is the token at which every `stride`-th document starts. With lengths 3 0 4 2, the order
// 2 0 3 1 and stride 2:  documents  2 0 | 3 1   tokens 4+3 | 2+0   starts 0 7 9
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "megaindex/bijection.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/poll.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex {

// Position p of the pass holds document order.at(p) % num_documents: `copies` epochs are shuffled
// together.
class PermutedDocuments {
 public:
  PermutedDocuments(const detail::FileLengths& lengths, int64_t copies, const uint64_t* key)
      : lengths_(lengths), order_(key, copies * lengths.count), copies_(copies) {}

  int64_t size() const { return order_.size(); }
  int64_t num_documents() const { return lengths_.count; }

  // Compute the positions of entries begin ... begin + count - 1 of the concatenated copies.
  template <class T>
  void positions(int64_t begin, int64_t count, T* out) const {
    order_.inverse_range(begin, count, reinterpret_cast<std::make_signed_t<T>*>(out));
  }
  // Compute the documents at positions begin ... begin + count - 1, and prefetch their lengths.
  template <class T>
  void request(int64_t begin, int64_t count, T* documents) const {
    documents_at(begin, count, documents);
    prefetch(documents, count);
  }
  template <class T>
  void documents_at(int64_t begin, int64_t count, T* documents) const {
    order_.range(begin, count, documents);
    if (copies_ > 1) {
      for (int64_t k = 0; k < count; ++k) documents[k] %= static_cast<T>(lengths_.count);
    }
  }
  template <class T>
  void prefetch(const T* documents, int64_t count) const {
    for (int64_t k = 0; k < count; ++k) {
      __builtin_prefetch(lengths_.address(static_cast<uint64_t>(documents[k])));
    }
  }
  // Return the position of an entry of the concatenated copies.
  int64_t position(int64_t entry) const { return order_.invert(entry); }
  template <class T>
  int64_t length(T document) const {
    return lengths_[static_cast<uint64_t>(document)];
  }

 private:
  const detail::FileLengths lengths_;
  const Bijection order_;
  const int64_t copies_;
};

namespace detail {

// Add the tokens of entries [begin, end) of the concatenated copies to the sums of their strides.
// Computed stride by stride instead, every length would be a cache miss; the sums fit a cache.
template <class T, class Poll>
void add_to_strides(const PermutedDocuments& documents, int64_t stride, int64_t begin, int64_t end,
                    int64_t* sums, const SharedPoll<Poll>& poll) {
  constexpr int64_t kBatch = 256;  // the sums of a batch fit the L1 cache
  T positions[kBatch];
  for (int64_t first = begin; first < end; first += kBatch) {
    if ((first - begin) % kPollEvery == kPollEvery - kBatch) poll();
    const int64_t count = std::min(kBatch, end - first);
    documents.positions(first, count, positions);
    int64_t document = first % documents.num_documents();
    for (int64_t k = 0; k < count; ++k) {
      positions[k] /= static_cast<T>(stride);
      __builtin_prefetch(sums + positions[k], 1);
    }
    for (int64_t k = 0; k < count; ++k) {
      sums[positions[k]] += documents.length(document);
      if (++document == documents.num_documents()) document = 0;
    }
  }
}

}  // namespace detail

// Fill starts, ceil(size / stride) + 1 entries, with the tokens before position j * stride; the
// last entry is the tokens of the pass.
template <class Poll = NoPoll>
void epoch_starts(const PermutedDocuments& documents, int64_t stride, int num_threads,
                  int64_t* starts, Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const int64_t size = documents.size(), strides = (size + stride - 1) / stride;
  const auto add = [&](int64_t begin, int64_t end, int64_t* sums) {
    if (size <= INT32_MAX) {
      detail::add_to_strides<uint32_t>(documents, stride, begin, end, sums, shared);
    } else {
      detail::add_to_strides<uint64_t>(documents, stride, begin, end, sums, shared);
    }
  };
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, size / (1 << 17)));
  std::vector<std::vector<int64_t>> others(static_cast<size_t>(parts - 1));
  for (auto& sums : others) sums.resize(static_cast<size_t>(strides));
  std::fill(starts, starts + strides + 1, 0);
  run_parallel(parts, [&](int64_t part) {
    int64_t* sums = part == 0 ? starts + 1 : others[static_cast<size_t>(part - 1)].data();
    add(size * part / parts, size * (part + 1) / parts, sums);
  });
  for (int64_t j = 0; j < strides; ++j) {
    for (const auto& sums : others) starts[j + 1] += sums[static_cast<size_t>(j)];
    starts[j + 1] += starts[j];
  }
}

namespace detail {

// As epoch_begins, for documents numbered by T; the lengths of a group are prefetched together.
template <class T, class Poll>
void find_begins(const PermutedDocuments& documents, int64_t stride, const int64_t* starts,
                 const int64_t* entries, int64_t count, int64_t* out,
                 const SharedPoll<Poll>& poll) {
  constexpr int64_t kGroup = 16;
  const int64_t size = documents.size(), half = stride / 2, room = stride - half;
  std::vector<T> read(static_cast<size_t>(kGroup * room));
  int64_t positions[kGroup], begins[kGroup];
  for (int64_t first = 0; first < count; first += kGroup) {
    if (first % kPollEvery == 0) poll();
    const int64_t group = std::min(kGroup, count - first);
    for (int64_t k = 0; k < group; ++k) {
      positions[k] = documents.position(entries[first + k]);
      // the half of the row in which the entry lies
      const int64_t within = positions[k] % stride;
      begins[k] = positions[k] - within + (within < half ? 0 : half);
      const int64_t at = within < half ? within : within - half;
      const int64_t end = std::min(within < half ? half : room, size - begins[k]);
      T* half_row = read.data() + k * room;
      documents.documents_at(begins[k], end, half_row);
      within < half ? documents.prefetch(half_row, at) : documents.prefetch(half_row + at, end - at);
    }
    for (int64_t k = 0; k < group; ++k) {
      const T* half_row = read.data() + k * room;
      const int64_t row = positions[k] / stride, at = positions[k] - begins[k];
      auto token = static_cast<uint64_t>(starts[row]);  // foreign starts may overflow
      if (begins[k] == row * stride && half > 0) {
        for (int64_t i = 0; i < at; ++i) token += static_cast<uint64_t>(documents.length(half_row[i]));
      } else {
        token = static_cast<uint64_t>(starts[row + 1]);
        const int64_t end = std::min(room, size - begins[k]);
        for (int64_t i = at; i < end; ++i) token -= static_cast<uint64_t>(documents.length(half_row[i]));
      }
      out[first + k] = static_cast<int64_t>(token);
    }
  }
}

}  // namespace detail

// Set out[k] to the token of the pass at which entry entries[k] of the concatenated copies begins.
// `starts` is filled by epoch_starts; every entry is in [0, size).
template <class Poll = NoPoll>
void epoch_begins(const PermutedDocuments& documents, int64_t stride, const int64_t* starts,
                  const int64_t* entries, int64_t count, int num_threads, int64_t* out,
                  Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, count / (1 << 12)));
  run_parallel(parts, [&](int64_t part) {
    const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
    if (documents.size() <= INT32_MAX) {
      detail::find_begins<int32_t>(documents, stride, starts, entries + begin, end - begin,
                                    out + begin, shared);
    } else {
      detail::find_begins<int64_t>(documents, stride, starts, entries + begin, end - begin,
                                    out + begin, shared);
    }
  });
}

}  // namespace megaindex
