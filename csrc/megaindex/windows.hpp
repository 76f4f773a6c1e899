// Token runs of ranges of a .bin whose sequences are contiguous.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "megaindex/invalid_input.hpp"
#include "megaindex/runs.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex {

// Sequences first ... stop - 1 of a .bin of items of 1, 2, 4 … bytes.
struct Sequences {
  const unsigned char* pointers;  // int64, in bytes, not aligned: where each begins
  detail::FileLengths lengths;    // in items
  int64_t first, stop;
  int item_bits;  // an item is 2^item_bits bytes

  int64_t begin_of(int64_t sequence) const {
    int64_t pointer;
    std::memcpy(&pointer, pointers + sizeof(pointer) * static_cast<size_t>(sequence), sizeof(pointer));
    return pointer;
  }
  int64_t end_of(int64_t sequence) const {
    return begin_of(sequence) + (lengths[static_cast<uint64_t>(sequence)] << item_bits);
  }
};

namespace detail {

// Set at[k] to the last sequence that begins at or before byte[k]; bisecting for all requests
// together lets their cache misses overlap.
inline void bisect_sequences(const Sequences& sequences, const int64_t* byte, int64_t count,
                             int64_t* at) {
  std::fill(at, at + count, sequences.first);
  for (int64_t left = sequences.stop - sequences.first; left > 1; left -= left / 2) {
    for (int64_t k = 0; k < count; ++k) {
      const int64_t middle = at[k] + left / 2;
      at[k] = sequences.begin_of(middle) <= byte[k] ? middle : at[k];
    }
  }
}

// Throw if a sequence does not end where the next one begins, unless it is the last.
inline void check_seam(const Sequences& sequences, int64_t sequence) {
  const int64_t stop = sequences.end_of(sequence);
  if (sequence + 1 == sequences.stop || sequences.begin_of(sequence + 1) == stop) return;
  throw InvalidInput("sequence " + std::to_string(sequence) + " fills bytes " +
                     std::to_string(sequences.begin_of(sequence)) + " to " + std::to_string(stop) +
                     " of the .bin, and the next one does not begin there");
}

// Add the runs of bytes `at` to `end`, the first of which is in or after `sequence`; return the
// sequence of the last one. Both ends of each sequence used are checked.
inline int64_t add_window(const Sequences& sequences, int64_t sequence, int64_t at, int64_t end,
                          Runs& runs) {
  if (sequence > sequences.first) check_seam(sequences, sequence - 1);
  for (;; ++sequence) {
    const int64_t begin = sequences.begin_of(sequence), stop = sequences.end_of(sequence);
    const int64_t to = std::min(stop, end);
    const int64_t part = (int64_t{1} << sequences.item_bits) - 1;
    const bool whole = begin <= at && ((at - begin) & part) == 0;
    if (whole && at < to) {
      runs.add(sequence, (at - begin) >> sequences.item_bits, (to - at) >> sequences.item_bits);
      at = to;
    }
    check_seam(sequences, sequence);
    if (at == end) return sequence;
    if (!whole || sequence + 1 == sequences.stop) {
      throw InvalidInput("sequence " + std::to_string(sequence) + " fills bytes " +
                         std::to_string(begin) + " to " + std::to_string(stop) +
                         " of the .bin, and the next one does not begin there");
    }
  }
}

}  // namespace detail

// Find the runs of tokens begins[k] ... ends[k] - 1 of the .bin, 0 <= begins[k] < ends[k]; those of
// request k are row_splits[k] ... row_splits[k + 1] - 1. The sequences used must be contiguous.
inline void window_spans(const Sequences& sequences, const int64_t* begins, const int64_t* ends,
                         int64_t n, Runs& runs, int64_t* row_splits) {
  constexpr int64_t kAtOnce = 16;
  int64_t bytes[kAtOnce], found[kAtOnce], last = sequences.first;
  row_splits[0] = 0;
  for (int64_t first = 0; first < n; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - first);
    bool follows = first > 0;  // each request begins within or at the end of the one before
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = first + k;
      bytes[k] = begins[at] << sequences.item_bits;
      follows = follows && begins[at - 1] <= begins[at] && begins[at] <= ends[at - 1];
    }
    if (!follows) detail::bisect_sequences(sequences, bytes, count, found);
    for (int64_t k = 0; k < count; ++k) {
      if (follows) {
        while (last > sequences.first && sequences.begin_of(last) > bytes[k]) --last;
      } else {
        last = found[k];
      }
      const int64_t end = ends[first + k] << sequences.item_bits;
      last = detail::add_window(sequences, last, bytes[k], end, runs);
      row_splits[first + k + 1] = runs.size();
    }
  }
}

}  // namespace megaindex
