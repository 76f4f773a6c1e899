// sample_index: the beginning of every sample in the concatenated documents.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "megaindex/invalid_input.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

// Row k of the index is (position in document_index, offset in that document) of the last token
// that sample k shares with sample k-1: token k*S - 1 + extra of the concatenated documents, with
// the offset counted one further when no token is shared (extra = 0).
//
//   lengths 3 0 4, S = 2, extra = 1:   tokens  a b c | | d e f g
//   rows (0,0) (0,2) (2,1) (2,3):      samples a b c / c d e / e f g
struct SampleGeometry {
  int64_t sequence_length;  // S >= 1
  int64_t extra;            // 1 if a sample holds one token more for the shifted label, else 0
  int64_t num_samples;      // rows - 1
  int64_t total_tokens;     // of all documents, by the caller's count
};

namespace detail {

constexpr int64_t kLookAhead = 32;  // documents between the request of a length and its use

// The int32 lengths of an .idx file. They are read as bytes because they begin at byte 34 and so
// are not aligned.
struct FileLengths {
  const unsigned char* bytes;
  int64_t count;

  const void* address(uint64_t document) const { return bytes + sizeof(int32_t) * document; }
  int64_t operator[](uint64_t document) const {
    int32_t length;
    std::memcpy(&length, address(document), sizeof(length));
    return length;
  }
};

// The same lengths in 16 bits, of which more fit a cache; those that are larger or negative are
// read from the file.
struct ShortLengths {
  const uint16_t* values;
  FileLengths file;
  int64_t count;

  static constexpr uint16_t kInFile = 0xffff;

  ShortLengths(const FileLengths& from, uint16_t* room)
      : values(room), file(from), count(from.count) {
    for (int64_t i = 0; i < count; ++i) {
      const auto length = static_cast<uint64_t>(file[static_cast<uint64_t>(i)]);
      room[i] = length < kInFile ? static_cast<uint16_t>(length) : kInFile;
    }
  }
  const void* address(uint64_t document) const { return values + document; }
  int64_t operator[](uint64_t document) const {
    const uint16_t value = values[document];
    return __builtin_expect(value == kInFile, 0) ? file[document] : value;
  }
};

// Lengths of documents in the order of document_index, prefetched ahead of their use.
template <class Lengths, class Poll>
class LengthReader {
 public:
  LengthReader(const Lengths& lengths, const int32_t* documents, const SharedPoll<Poll>& poll)
      : lengths_(lengths), documents_(documents), poll_(poll) {}

  void poll() const { poll_(); }

  void request(int64_t position) const {
    const auto document = static_cast<uint64_t>(int64_t{documents_[position]});
    __builtin_prefetch(lengths_.address(exists(document) ? document : 0));
  }
  int64_t at(int64_t position) const {
    const auto document = static_cast<uint64_t>(int64_t{documents_[position]});
    if (__builtin_expect(!exists(document), 0)) {
      throw InvalidInput("document_index names a sequence that has no length");
    }
    const int64_t length = lengths_[document];
    if (__builtin_expect(length < 0, 0)) throw InvalidInput("a length is negative");
    return length;
  }

 private:
  // As unsigned, a negative id is too large.
  bool exists(uint64_t document) const { return document < static_cast<uint64_t>(lengths_.count); }

  const Lengths lengths_;
  const int32_t* documents_;
  const SharedPoll<Poll>& poll_;
};

constexpr int64_t kPollEvery = int64_t{1} << 20;  // documents

// Call visit(position, length) for begin, begin+1, ..., end-1.
template <class Reader, class Visit>
void forward(const Reader& lengths, int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t d = begin; d < std::min(end, begin + kLookAhead); ++d) lengths.request(d);
  int64_t d = begin;
  while (d < end - kLookAhead) {
    for (const int64_t stop = std::min(end - kLookAhead, d + kPollEvery); d < stop; ++d) {
      lengths.request(d + kLookAhead);
      visit(d, lengths.at(d));
    }
    lengths.poll();
  }
  for (; d < end; ++d) visit(d, lengths.at(d));
}

template <class Reader, class Visit>
void backward(const Reader& lengths, int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t d = end - 1; d >= std::max(begin, end - kLookAhead); --d) lengths.request(d);
  int64_t d = end - 1;
  while (d >= begin + kLookAhead) {
    for (const int64_t stop = std::max(begin + kLookAhead, d - kPollEvery); d >= stop; --d) {
      lengths.request(d - kLookAhead);
      visit(d, lengths.at(d));
    }
    lengths.poll();
  }
  for (; d >= begin; --d) visit(d, lengths.at(d));
}

// Set a row to (document, offset) in one store.
inline void put(int32_t* rows, int64_t row, int64_t document, int64_t offset) {
  const uint64_t pair = static_cast<uint32_t>(document) | static_cast<uint64_t>(offset) << 32;
  std::memcpy(rows + 2 * row, &pair, sizeof(pair));
}
inline void put(int64_t* rows, int64_t row, int64_t document, int64_t offset) {
  rows[2 * row] = document;
  rows[2 * row + 1] = offset;
}

// A buffer of rows. Whether a document holds the next boundary would be mispredicted as a branch,
// so its row is always written and then kept or not. A row that is not kept must not touch memory
// that another thread fills, hence the buffer. Rows outside 1 ... last_row are dropped.
template <class T, int Step>  // Step: +1 rows ascend, -1 rows descend
class RowStage {
 public:
  RowStage(T* rows, int64_t next_row, int64_t last_row)
      : rows_(rows), next_row_(next_row), last_row_(last_row) {}

  void offer(int64_t document, int64_t offset, bool keep) {
    put(stage_, Step > 0 ? kept_ : kCapacity - 1 - kept_, document, offset);
    kept_ += keep;
    if (__builtin_expect(kept_ == kCapacity, 0)) flush();
  }
  void flush() {
    const int64_t count = allowed(kept_);
    const int64_t first = Step > 0 ? next_row_ : next_row_ - count + 1;
    const T* from = stage_ + 2 * (Step > 0 ? 0 : kCapacity - count);
    std::copy(from, from + 2 * count, rows_ + 2 * first);
    next_row_ += Step * kept_;
    kept_ = 0;
  }
  // Add `count` rows in one document, `stride` tokens apart.
  void fill(int64_t document, int64_t offset, int64_t stride, int64_t count) {
    if (count <= 8) {
      for (int64_t j = 0; j < count; ++j) offer(document, offset + stride * j, true);
      return;
    }
    flush();
    const int64_t writable = allowed(count);
    for (int64_t j = 0; j < writable; ++j) {
      put(rows_, next_row_ + Step * j, document, offset + stride * j);
    }
    next_row_ += Step * count;
  }

 private:
  static constexpr int64_t kCapacity = 512;

  int64_t allowed(int64_t count) const {
    const int64_t room = Step > 0 ? last_row_ + 1 - next_row_ : next_row_;
    return std::max<int64_t>(0, std::min(count, room));
  }

  T stage_[2 * kCapacity];
  T* const rows_;
  int64_t next_row_;
  const int64_t last_row_;
  int64_t kept_ = 0;
};

// Cut documents [begin, end), the first of which starts at token `start`: write the rows from 1 to
// num_samples in them, and return the token at which the last one ends.
template <class Reader, class T>
int64_t cut_forward(const Reader& lengths, const SampleGeometry& g, int64_t begin,
                    int64_t end, int64_t start, T* rows) {
  const int64_t S = g.sequence_length;
  const int64_t shift = 1 - g.extra;
  // The first row k >= 1 whose token k*S - 1 + extra is at or after `start`.
  const int64_t row = std::max<int64_t>(1, (start + shift + S - 1) / S);
  int64_t ahead = row * S - 1 + g.extra - start;  // tokens from here to the next row's token
  RowStage<T, +1> stage(rows, row, g.num_samples);
  int64_t position = start;
  forward(lengths, begin, end, [&](int64_t d, int64_t length) {
    position += length;
    const bool hit = ahead < length;
    stage.offer(d, ahead + shift, hit);
    ahead += (hit ? S : 0) - length;
    if (__builtin_expect(ahead < 0, 0)) {  // a long document holds several rows
      const int64_t more = (S - 1 - ahead) / S;
      stage.fill(d, ahead + length + shift, S, more);
      ahead += more * S;
    }
  });
  stage.flush();
  return position;
}

// Write the same rows backwards, where the last document ends before token `stop`; return the token
// at which the first one starts.
template <class Reader, class T>
int64_t cut_backward(const Reader& lengths, const SampleGeometry& g, int64_t begin,
                     int64_t end, int64_t stop, T* rows) {
  const int64_t S = g.sequence_length;
  const int64_t shift = 1 - g.extra;
  // The last row whose token lies before `stop`.
  const int64_t row = std::min(g.num_samples, (stop - g.extra) / S);
  int64_t behind = stop - (row * S - 1 + g.extra);  // tokens from that token to here
  RowStage<T, -1> stage(rows, row, g.num_samples);
  int64_t position = stop;
  backward(lengths, begin, end, [&](int64_t d, int64_t length) {
    position -= length;
    const bool hit = behind <= length;
    stage.offer(d, length - behind + shift, hit);
    behind += (hit ? S : 0) - length;
    if (__builtin_expect(behind <= 0, 0)) {
      const int64_t more = -behind / S + 1;
      stage.fill(d, shift - behind, -S, more);
      behind += more * S;
    }
  });
  stage.flush();
  return position;
}

template <class Reader>
int64_t sum_lengths(const Reader& lengths, int64_t begin, int64_t end) {
  int64_t sum = 0;
  forward(lengths, begin, end, [&](int64_t, int64_t length) { sum += length; });
  return sum;
}

// Cut [0, n) with two threads, one from the front and one from the back, until they meet: where one
// shares its core with another program, it cuts less. Return false if the lengths contradict the
// total of tokens.
template <class Reader, class T>
bool cut_from_both_ends(const Reader& lengths, const SampleGeometry& g, int64_t n, T* rows) {
  constexpr int64_t kBlock = 1 << 14;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::atomic<int64_t> begun{0};
  int64_t tokens[2] = {0, g.total_tokens};  // where each thread is
  run_parallel(2, [&](int64_t side) {
    int64_t at = tokens[side];
    try {
      for (int64_t b = 0; begun.fetch_add(1, std::memory_order_relaxed) < blocks; ++b) {
        if (side == 0) {
          at = cut_forward(lengths, g, b * kBlock, std::min(n, (b + 1) * kBlock), at, rows);
        } else {
          const int64_t begin = (blocks - 1 - b) * kBlock;
          at = cut_backward(lengths, g, begin, std::min(n, begin + kBlock), at, rows);
        }
      }
    } catch (...) {
      begun.store(blocks, std::memory_order_relaxed);  // the other side need not go on
      throw;
    }
    tokens[side] = at;
  });
  return tokens[0] == tokens[1];
}

// Cut [0, n) with `threads` >= 3 threads: one cuts a block at the front and one a block at the back;
// meanwhile the blocks between are summed, then cut. Return false as cut_from_both_ends.
template <class Reader, class T>
bool cut_parallel(const Reader& lengths, const SampleGeometry& g, int64_t n, int threads,
                  T* rows) {
  const int64_t blocks = threads;
  auto bound = [&](int64_t b) { return n / blocks * b + std::min(b, n % blocks); };
  std::vector<int64_t> tokens(static_cast<size_t>(blocks));  // of each block; last: its start
  run_parallel(blocks, [&](int64_t b) {
    const auto i = static_cast<size_t>(b);
    if (b == 0) {
      tokens[i] = cut_forward(lengths, g, bound(0), bound(1), 0, rows);
    } else if (b == blocks - 1) {
      tokens[i] = cut_backward(lengths, g, bound(b), n, g.total_tokens, rows);
    } else {
      tokens[i] = sum_lengths(lengths, bound(b), bound(b + 1));
    }
  });
  std::vector<int64_t> starts(static_cast<size_t>(blocks), 0);
  for (size_t b = 1; b < starts.size(); ++b) starts[b] = starts[b - 1] + tokens[b - 1];
  if (starts.back() != tokens.back()) return false;
  run_parallel(blocks - 2, [&](int64_t b) {
    const int64_t start = starts[static_cast<size_t>(b) + 1];
    cut_forward(lengths, g, bound(b + 1), bound(b + 2), start, rows);
  });
  return true;
}

// Set the last row to the last token, for drop_last_partial=false.
template <class Reader, class T>
void put_last_partial(const Reader& lengths, const SampleGeometry& g, int64_t n, T* rows) {
  int64_t d = n - 1;
  // an empty document has no token to share
  if (g.extra == 1) {
    while (d > 0 && lengths.at(d) == 0) --d;
  }
  put(rows, g.num_samples, d, lengths.at(d) - g.extra);
}

template <class Reader, class T>
void cut(const Reader& reader, int64_t num_documents, const SampleGeometry& g, int num_threads,
         T* rows) {
  put(rows, 0, 0, 0);
  constexpr int64_t kWorthAThread = 1 << 16;
  const auto threads = static_cast<int>(
      std::min<int64_t>(std::max(num_threads, 1), 1 + num_documents / kWorthAThread));
  int64_t tokens = g.total_tokens;
  const bool is_cut = threads == 2
                          ? cut_from_both_ends(reader, g, num_documents, rows)
                          : threads > 2 && cut_parallel(reader, g, num_documents, threads, rows);
  if (!is_cut) {
    tokens = cut_forward(reader, g, 0, num_documents, 0, rows);
  }
  const int64_t needed = g.num_samples * g.sequence_length + g.extra;
  if (tokens < std::min(needed, g.total_tokens)) {
    throw InvalidInput("the documents hold fewer tokens than num_epochs * tokens_per_epoch");
  }
  if (tokens < needed && g.num_samples > 0) put_last_partial(reader, g, num_documents, rows);
}

}  // namespace detail

// Return whether cut_samples should use short_lengths: if each length is read several times, and
// their 2 bytes each are less than a twelfth of the arrays of the index.
inline bool short_lengths_pay(int64_t num_lengths, int64_t num_documents, int64_t num_samples) {
  constexpr int64_t kFitsAnyCache = 1 << 20;
  const int64_t arrays = 4 * num_documents + 8 * num_samples;
  return num_lengths > kFitsAnyCache && num_documents >= 3 * num_lengths &&
         12 * 2 * num_lengths <= arrays;
}

// Fill rows[num_samples + 1][2]. `lengths` are int32, aligned or not; `short_lengths` is null or
// has room for as many uint16. Throw InvalidInput if an id, a length or the number of tokens is
// invalid, or the exception of poll; rows is unspecified then.
template <class T, class Poll = NoPoll>
void cut_samples(const unsigned char* lengths, int64_t num_lengths, const int32_t* document_index,
                 int64_t num_documents, const SampleGeometry& g, int num_threads,
                 uint16_t* short_lengths, T* rows, Poll poll = {}) {
  const SharedPoll<Poll> shared(poll);
  const auto cut = [&](const auto& sizes) {
    const detail::LengthReader reader(sizes, document_index, shared);
    detail::cut(reader, num_documents, g, num_threads, rows);
  };
  const detail::FileLengths file{lengths, num_lengths};
  if (short_lengths == nullptr) return cut(file);
  cut(detail::ShortLengths(file, short_lengths));
}

}  // namespace megaindex
