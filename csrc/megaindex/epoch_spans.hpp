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
    if (piece.number == 0) throw_foreign();
    return piece.number - 1;
  }
  EpochPiece<T>& opened_after(const EpochPiece<T>& piece) {
    const int64_t end = piece.ends[piece.count];
    if (piece.number + 1 == num_pieces_) throw_foreign();
    EpochPiece<T>& next = opened(piece.number + 1);
    if (next.ends[0] != end) throw_foreign();
    return next;
  }
  [[noreturn]] static void throw_foreign() {
    throw InvalidInput("starts: must be those of these lengths; make them with epoch_starts");
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
  if (documents.size() <= INT32_MAX) {
    detail::EpochReader<int32_t> reader(documents, stride, starts, num_requests);
    reader.read(begins, ends, num_requests, runs, row_splits);
  } else {
    detail::EpochReader<int64_t> reader(documents, stride, starts, num_requests);
    reader.read(begins, ends, num_requests, runs, row_splits);
  }
}

}  // namespace megaindex
