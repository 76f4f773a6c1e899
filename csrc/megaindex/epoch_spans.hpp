// Token runs of ranges of a pass over permuted documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megaindex/epoch.hpp"
#include "megaindex/invalid_input.hpp"
#include "megaindex/runs.hpp"

namespace megaindex {

namespace detail {

[[noreturn]] inline void throw_foreign_starts() {
  throw InvalidInput("starts: must be those of these lengths; make them with epoch_starts");
}

// Documents of a row of the table, or of one half of a long row. The start of a second half is
// computed back from the next row, once its lengths are read. So finding any token reads the
// lengths of about half a row.
template <class T>
struct EpochPiece {
  int64_t number = -1;
  int64_t count = 0;        // documents; fewer in the last piece
  int64_t cursor = 0;       // the last document read, where the next request often continues
  int64_t known = -1;       // documents whose end is computed; -1 without the first start
  T* documents = nullptr;   // [size]
  int64_t* ends = nullptr;  // [size + 1]: ends[i] is the first token of document i
};

// Walks a pass from the first request to the last. Requests are in the order of the pass, and each
// begins at or behind the last token of the one before. The lengths of a block of documents are
// prefetched while those of the block before are read.
template <class T>
class EpochWalk {
 public:
  EpochWalk(const PermutedDocuments& documents, int64_t stride, const int64_t* starts)
      : documents_(documents), stride_(stride), starts_(starts) {}

  // Return whether requests are in this order, and reading all documents from the first to the last
  // of them takes less time than finding each request by itself.
  static bool is_worth(const PermutedDocuments& documents, int64_t stride, const int64_t* starts,
                       const int64_t* begins, const int64_t* ends, int64_t n) {
    if (n < kFewest) return false;
    int64_t tokens = ends[0] - begins[0];
    bool in_order = true;
    for (int64_t k = 1; k < n; ++k) {
      in_order &= begins[k] >= ends[k - 1] - 1;
      tokens += ends[k] - begins[k];
    }
    const int64_t range = ends[n - 1] - begins[0];
    if (!in_order || range <= 0) return false;
    const int64_t rows = (documents.size() + stride - 1) / stride;
    const auto row_of = [&](int64_t token) {
      return std::upper_bound(starts + 1, starts + rows, token) - starts;
    };
    const auto walked = static_cast<double>((row_of(ends[n - 1]) - row_of(begins[0])) * stride);
    const double unread = 1 - static_cast<double>(tokens) / static_cast<double>(range);
    return walked * unread <= static_cast<double>(n * std::min(stride, kSought));
  }

  void read(const int64_t* begins, const int64_t* ends, int64_t n, Runs& runs,
            int64_t* row_splits) {
    start(begins[0]);
    int64_t i = 0;  // the current document of the block
    row_splits[0] = runs.size();
    for (int64_t k = 0; k < n; ++k) {
      int64_t at = begins[k];
      while (true) {
        while (i < count_ && ends_[i + 1] <= at) ++i;
        if (i == count_) {
          load();
          i = 0;
          continue;
        }
        const int64_t to = std::min(ends[k], ends_[i + 1]);
        runs.add(static_cast<int64_t>(read_[i]), at - ends_[i], to - at);
        at = to;
        if (at == ends[k]) break;
      }
      row_splits[k + 1] = runs.size();
    }
  }

 private:
  static constexpr int64_t kBlock = 256;   // documents
  static constexpr int64_t kFewest = 64;   // requests; fewer share no block
  static constexpr int64_t kSought = 64;   // documents read in the time of finding a request

  void start(int64_t token) {
    const int64_t rows = (documents_.size() + stride_ - 1) / stride_;
    const int64_t row = std::upper_bound(starts_ + 1, starts_ + rows, token) - starts_ - 1;
    next_ = row * stride_;
    ends_[0] = starts_[row];
    requested_ = std::min(kBlock, documents_.size() - next_);
    documents_.request(next_, requested_, ahead_);
    load();
  }
  // Read the block that was requested, and request the next one.
  void load() {
    if (requested_ == 0) throw_foreign_starts();
    ends_[0] = ends_[count_];
    std::swap(read_, ahead_);
    count_ = requested_;
    for (int64_t i = 0; i < count_; ++i) ends_[i + 1] = ends_[i] + documents_.length(read_[i]);
    for (int64_t p = (next_ + stride_ - 1) / stride_ * stride_; p <= next_ + count_; p += stride_) {
      if (starts_[p / stride_] != ends_[p - next_]) throw_foreign_starts();
    }
    next_ += count_;
    requested_ = std::min(kBlock, documents_.size() - next_);
    documents_.request(next_, requested_, ahead_);
  }

  const PermutedDocuments& documents_;
  const int64_t stride_;
  const int64_t* starts_;
  int64_t next_ = 0;                    // position of the block that is requested
  int64_t count_ = 0, requested_ = 0;   // documents of the block that is read, and of the next one
  T room_[2][kBlock];
  T *read_ = room_[0], *ahead_ = room_[1];
  int64_t ends_[kBlock + 1];  // ends_[i] is the first token of document i of the block
};

// Answers requests in groups: the pieces of the next group are prefetched before those of this
// group are read.
template <class T>
class EpochReader {
 public:
  EpochReader(const PermutedDocuments& documents, int64_t stride, const int64_t* starts,
              int64_t num_requests)
      : documents_(documents),
        starts_(starts),
        num_rows_((documents.size() + stride - 1) / stride),
        halves_(stride % 2 == 0 && stride >= kWorthHalving ? 2 : 1),
        size_(stride / halves_),
        num_pieces_((documents.size() + size_ - 1) / size_),
        group_(std::clamp<int64_t>(std::min(kRoom / size_, num_requests), 1, kMostAtOnce)),
        pieces_(static_cast<size_t>(2 * group_ + 2)),
        piece_documents_(pieces_.size() * static_cast<size_t>(size_)),
        piece_ends_(pieces_.size() * static_cast<size_t>(size_ + 1)) {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      pieces_[i].documents = piece_documents_.data() + i * static_cast<size_t>(size_);
      pieces_[i].ends = piece_ends_.data() + i * static_cast<size_t>(size_ + 1);
    }
  }

  void read(const int64_t* begins, const int64_t* ends, int64_t n, Runs& runs, int64_t* row_splits) {
    row_splits[0] = 0;
    std::vector<int64_t> numbers(static_cast<size_t>(n));
    int64_t requested = 0;  // requests before this one have their pieces prefetched
    for (int64_t k = 0; k < n; ++k) {
      if (in_last_document(begins[k], ends[k])) {
        runs.add(static_cast<int64_t>(last_->documents[last_->cursor]),
                 begins[k] - last_->ends[last_->cursor], ends[k] - begins[k]);
      } else {
        // prefetch only this piece if the requests before were all in one long document
        const int64_t ahead = requested < k ? 0 : group_;
        requested = std::max(requested, k);
        while (requested < std::min(n, k + ahead + 1)) {
          const int64_t count = std::clamp<int64_t>(ahead, 1, n - requested);
          guess_pieces(begins + requested, count, numbers.data() + requested);
          for (const int64_t stop = requested + count; requested < stop; ++requested) {
            request(numbers[static_cast<size_t>(requested)]);
          }
        }
        add_request(numbers[static_cast<size_t>(k)], begins[k], ends[k], runs);
      }
      row_splits[k + 1] = runs.size();
    }
  }

 private:
  static constexpr int64_t kWorthHalving = 64;  // a vector of the bijection is 32 documents
  static constexpr int64_t kMostAtOnce = 16;
  static constexpr int64_t kRoom = 1024;  // documents requested at once
  static constexpr int64_t kNear = 4;     // rows

  // Set numbers[k] to the piece that most likely holds token begins[k]: the half of its row in
  // which it would be if all documents were equally long.
  void guess_pieces(const int64_t* begins, int64_t count, int64_t* numbers) {
    find_rows(begins, count, numbers);
    if (halves_ == 1) return;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = numbers[k], middle = starts_[row] + (starts_[row + 1] - starts_[row]) / 2;
      numbers[k] = std::min(2 * row + (begins[k] >= middle), num_pieces_ - 1);
    }
  }
  // Set numbers[k] to the last row that starts at or before begins[k].
  void find_rows(const int64_t* begins, int64_t count, int64_t* numbers) {
    const int64_t near = std::min(last_found_ + kNear, num_rows_);
    bool all_near = true;
    for (int64_t k = 0; k < count; ++k) {
      all_near &= starts_[last_found_] <= begins[k] && begins[k] < starts_[near];
    }
    if (all_near) {
      for (int64_t k = 0; k < count; ++k) {
        numbers[k] = last_found_;
        while (starts_[numbers[k] + 1] <= begins[k]) ++numbers[k];
      }
    } else {
      bisect(begins, count, numbers);
    }
    last_found_ = numbers[count - 1];
  }
  // Bisect for all requests together, so that their cache misses overlap.
  void bisect(const int64_t* begins, int64_t count, int64_t* numbers) const {
    std::fill(numbers, numbers + count, 0);
    for (int64_t left = num_rows_; left > 1; left -= left / 2) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t middle = numbers[k] + left / 2;
        numbers[k] = starts_[middle] <= begins[k] ? middle : numbers[k];
      }
    }
  }

  // Return the piece of that number, replacing the oldest if it is not loaded.
  EpochPiece<T>& request(int64_t number) {
    if (pieces_[newest_].number == number) return pieces_[newest_];
    for (auto& piece : pieces_) {
      if (piece.number == number) return piece;
    }
    newest_ = (newest_ + 1) % pieces_.size();
    EpochPiece<T>& piece = pieces_[newest_];
    if (last_ == &piece) last_ = nullptr;
    piece.number = number;
    piece.count = std::min(size_, documents_.size() - number * size_);
    piece.cursor = 0;
    piece.known = -1;
    documents_.request(number * size_, piece.count, piece.documents);
    return piece;
  }
  // Return the piece of that number with its first token computed.
  EpochPiece<T>& opened(int64_t number) {
    EpochPiece<T>& piece = request(number);
    if (piece.known >= 0) return piece;
    const int64_t row = number / halves_;
    piece.known = 0;
    piece.ends[0] = starts_[row];
    if (number % halves_ == 1) {
      piece.ends[0] = 0;
      piece.ends[0] = starts_[row + 1] - end_of(piece, piece.count - 1);
      piece.known = 0;
    }
    return piece;
  }
  int64_t end_of(EpochPiece<T>& piece, int64_t i) const {
    for (; piece.known <= i; ++piece.known) {
      piece.ends[piece.known + 1] =
          piece.ends[piece.known] + documents_.length(piece.documents[piece.known]);
    }
    return piece.ends[i + 1];
  }

  // Return whether these tokens are in the last document of the previous request.
  bool in_last_document(int64_t begin, int64_t end) const {
    return last_ != nullptr && last_->ends[last_->cursor] <= begin &&
           end <= last_->ends[last_->cursor + 1];
  }

  void add_request(int64_t guess, int64_t at, int64_t end, Runs& runs) {
    EpochPiece<T>* piece = &opened(guess);
    while (piece->ends[0] > at) piece = &opened(before(*piece));
    for (;;) {
      if (piece->ends[piece->cursor] > at) piece->cursor = 0;
      for (; piece->cursor < piece->count; ++piece->cursor) {
        const int64_t to = std::min(end, end_of(*piece, piece->cursor));
        if (at >= to) continue;
        runs.add(static_cast<int64_t>(piece->documents[piece->cursor]),
                 at - piece->ends[piece->cursor], to - at);
        at = to;
        if (at == end) {
          last_ = piece;
          return;
        }
      }
      piece = &opened_after(*piece);
    }
  }
  int64_t before(const EpochPiece<T>& piece) const {
    if (piece.number == 0) throw_foreign_starts();
    return piece.number - 1;
  }
  EpochPiece<T>& opened_after(const EpochPiece<T>& piece) {
    const int64_t end = piece.ends[piece.count];
    if (piece.number + 1 == num_pieces_) throw_foreign_starts();
    EpochPiece<T>& next = opened(piece.number + 1);
    if (next.ends[0] != end) throw_foreign_starts();
    return next;
  }
  const PermutedDocuments& documents_;
  const int64_t* starts_;
  const int64_t num_rows_;
  const int64_t halves_, size_, num_pieces_, group_;  // pieces of a row, documents of a piece
  int64_t last_found_ = 0;
  size_t newest_ = 0;
  const EpochPiece<T>* last_ = nullptr;  // the last piece of the previous request, until it is replaced
  std::vector<EpochPiece<T>> pieces_;
  std::vector<T> piece_documents_;
  std::vector<int64_t> piece_ends_;
};

}  // namespace detail

// Find the runs of tokens begins[k] ... ends[k] - 1 of a pass, 0 <= begins[k] < ends[k] <= its
// tokens. Requests in the order of the pass are fastest, since each document is then found once.
inline void epoch_spans(const PermutedDocuments& documents, int64_t stride, const int64_t* starts,
                        const int64_t* begins, const int64_t* ends, int64_t num_requests, Runs& runs,
                        int64_t* row_splits) {
  const auto read = [&](auto document) {
    using T = decltype(document);
    if (detail::EpochWalk<T>::is_worth(documents, stride, starts, begins, ends, num_requests)) {
      detail::EpochWalk<T>(documents, stride, starts)
          .read(begins, ends, num_requests, runs, row_splits);
    } else {
      detail::EpochReader<T>(documents, stride, starts, num_requests)
          .read(begins, ends, num_requests, runs, row_splits);
    }
  };
  documents.size() <= INT32_MAX ? read(int32_t{}) : read(int64_t{});
}

}  // namespace megaindex
