// The documents of one complete pass, in an order that is computed and not stored.
//
// Stored is the token at which every `stride`-th document starts. With lengths 3 0 4 2, the order
// 2 0 3 1 and stride 2:  documents  2 0 | 3 1   tokens 4+3 | 2+0   starts 0 7 9
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
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

// Rows of the table: `stride` positions each.
class Rows {
 public:
  explicit Rows(int64_t stride) : stride_(stride) {
    while ((int64_t{1} << shift_) < stride) ++shift_;
    if (int64_t{1} << shift_ != stride) shift_ = -1;
  }
  // Replace positions by their rows.
  template <class T>
  void of(T* positions, int64_t count) const {
    if (shift_ >= 0) {
      for (int64_t k = 0; k < count; ++k) positions[k] >>= shift_;
    } else {
      for (int64_t k = 0; k < count; ++k) positions[k] /= static_cast<T>(stride_);
    }
  }

 private:
  int64_t stride_;
  int shift_ = 0;  // -1 unless the stride is a power of two
};

// Call add(row, length) for entries [begin, end) of the concatenated copies; request(row) is called
// for a batch of them before.
template <class T, class Poll, class Request, class Add>
void each_row(const PermutedDocuments& documents, const Rows& rows, int64_t begin, int64_t end,
              const SharedPoll<Poll>& poll, const Request& request, const Add& add) {
  constexpr int64_t kBatch = 256;  // what a batch reads and writes fits the L1 cache
  T batch[kBatch];
  for (int64_t first = begin; first < end; first += kBatch) {
    if ((first - begin) % kPollEvery == kPollEvery - kBatch) poll();
    const int64_t count = std::min(kBatch, end - first);
    documents.positions(first, count, batch);
    rows.of(batch, count);
    for (int64_t k = 0; k < count; ++k) request(batch[k]);
    int64_t document = first % documents.num_documents();
    for (int64_t k = 0; k < count; ++k) {
      add(batch[k], documents.length(document));
      if (++document == documents.num_documents()) document = 0;
    }
  }
}

// Sums of rows whose table fits a cache: each thread adds to a table of its own.
template <class T, class Poll>
void add_to_tables(const PermutedDocuments& documents, const Rows& rows, int64_t num_rows,
                   int64_t parts, int64_t* sums, const SharedPoll<Poll>& poll) {
  std::vector<std::vector<int64_t>> others(static_cast<size_t>(parts - 1));
  for (auto& other : others) other.resize(static_cast<size_t>(num_rows));
  run_parallel(parts, [&](int64_t part) {
    int64_t* own = part == 0 ? sums : others[static_cast<size_t>(part - 1)].data();
    const int64_t size = documents.size();
    each_row<T>(
        documents, rows, size * part / parts, size * (part + 1) / parts, poll,
        [&](T row) { __builtin_prefetch(own + row, 1); },
        [&](T row, int64_t length) { own[row] += length; });
  });
  for (const auto& other : others) {
    for (size_t j = 0; j < other.size(); ++j) sums[j] += other[j];
  }
}

// Sums of the rows of a large table, in which every addition would be a cache miss. Documents are
// written into bands of rows first, one stream of writes each, by rounds of documents; the sums of
// a band fit a cache. Threads divide the documents of a round, and then the bands.
template <class Poll>
class BandedSums {
 public:
  static bool is_worth(const PermutedDocuments& documents, int64_t num_rows) {
    return num_rows >= int64_t{1} << 17 && num_rows <= kMostBands << kMostBits &&
           documents.size() <= INT32_MAX;
  }

  BandedSums(const PermutedDocuments& documents, const Rows& rows, int64_t num_rows, int64_t parts,
             int64_t* sums, const SharedPoll<Poll>& poll)
      : documents_(documents), rows_(rows), parts_(parts), sums_(sums), poll_(poll) {
    while ((num_rows >> bits_) >= kMostBands) ++bits_;
    num_bands_ = (num_rows >> bits_) + 1;
    // as many documents as there are rows, several times: then a band is summed at once
    round_ = std::min(documents.size(), std::max<int64_t>(int64_t{1} << 20, 2 * num_rows));
    const int64_t each = (round_ + parts - 1) / parts;
    room_ = static_cast<int64_t>(1.1 * static_cast<double>(each) *
                                 static_cast<double>(int64_t{1} << bits_) /
                                 static_cast<double>(num_rows)) + 1024;
    for (int64_t p = 0; p < parts; ++p) streams_.emplace_back(num_bands_, room_);
  }

  void add_all() {
    for (int64_t begin = 0; begin < documents_.size(); begin += round_) {
      const int64_t count = std::min(round_, documents_.size() - begin);
      run_parallel(parts_, [&](int64_t part) {
        divide(begin + count * part / parts_, begin + count * (part + 1) / parts_,
               streams_[static_cast<size_t>(part)]);
      });
      run_parallel(parts_, [&](int64_t part) {
        for (int64_t band = num_bands_ * part / parts_; band < num_bands_ * (part + 1) / parts_;
             ++band) {
          add_band(band);
        }
      });
      for (Streams& streams : streams_) {
        for (const auto& [row, length] : streams.others) sums_[row] += length;
        streams.others.clear();
      }
    }
  }

 private:
  static constexpr int64_t kMostBands = 256;  // streams of writes
  static constexpr int kMostBits = 18;
  static constexpr int64_t kAhead = 32;       // entries: two cache lines

  // What one thread writes: a row of the band and a length in 32 bits, by band. Lengths without
  // room in them, and documents without room in their band, stand among the others.
  struct Streams {
    std::unique_ptr<uint32_t[]> entries;
    std::vector<uint32_t*> ends;
    std::vector<std::pair<uint32_t, int64_t>> others;

    Streams(int64_t bands, int64_t room)
        : entries(new uint32_t[static_cast<size_t>(bands * room + kAhead)]),
          ends(static_cast<size_t>(bands)) {}
  };

  void divide(int64_t begin, int64_t end, Streams& streams) const {
    for (size_t b = 0; b < streams.ends.size(); ++b) {
      streams.ends[b] = streams.entries.get() + static_cast<int64_t>(b) * room_;
    }
    const int bits = bits_, free = 32 - bits_;
    const uint64_t most = (uint64_t{1} << free) - 1;
    uint32_t** ends = streams.ends.data();
    const uint32_t* first = streams.entries.get();
    each_row<uint32_t>(
        documents_, rows_, begin, end, poll_, [](uint32_t) {},
        [&](uint32_t row, int64_t length) {
          const uint32_t band = row >> bits;
          uint32_t* at = ends[band];
          const bool fits = static_cast<uint64_t>(length) <= most &&
                            at < first + (int64_t{band} + 1) * room_;
          if (__builtin_expect(!fits, 0)) {
            streams.others.emplace_back(row, length);
            return;
          }
          __builtin_prefetch(at + kAhead, 1);
          *at = row << free | static_cast<uint32_t>(length);
          ends[band] = at + 1;
        });
  }

  void add_band(int64_t band) {
    const int free = 32 - bits_;
    int64_t* sums = sums_ + (band << bits_);
    for (const Streams& streams : streams_) {
      const uint32_t* end = streams.ends[static_cast<size_t>(band)];
      for (const uint32_t* at = streams.entries.get() + band * room_; at < end; ++at) {
        sums[*at >> free] += *at & ((uint32_t{1} << free) - 1);
      }
    }
  }

  const PermutedDocuments& documents_;
  const Rows& rows_;
  const int64_t parts_;
  int64_t* const sums_;
  const SharedPoll<Poll>& poll_;
  int bits_ = 16;  // of a row within its band
  int64_t num_bands_, round_, room_;
  std::vector<Streams> streams_;
};

}  // namespace detail

// Fill starts, ceil(size / stride) + 1 entries, with the tokens before position j * stride; the
// last entry is the tokens of the pass. Lengths are read in the order of the file: row by row, every
// length would be a cache miss.
template <class Poll = NoPoll>
void epoch_starts(const PermutedDocuments& documents, int64_t stride, int num_threads,
                  int64_t* starts, Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const detail::Rows rows(stride);
  const int64_t size = documents.size(), num_rows = (size + stride - 1) / stride;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, size / (1 << 17)));
  std::fill(starts, starts + num_rows + 1, 0);
  if (detail::BandedSums<Poll>::is_worth(documents, num_rows)) {
    detail::BandedSums<Poll>(documents, rows, num_rows, parts, starts + 1, shared).add_all();
  } else if (size <= INT32_MAX) {
    detail::add_to_tables<uint32_t>(documents, rows, num_rows, parts, starts + 1, shared);
  } else {
    detail::add_to_tables<uint64_t>(documents, rows, num_rows, parts, starts + 1, shared);
  }
  for (int64_t j = 0; j < num_rows; ++j) starts[j + 1] += starts[j];
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
