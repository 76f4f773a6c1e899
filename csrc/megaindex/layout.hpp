// The check of an .idx against the size of its .bin.
#pragma once

#include <cstdint>

#include "megaindex/windows.hpp"

namespace megaindex {

// Return the tokens of sequences first ... stop - 1, or -1 if one has a negative length, is not
// within the first nbytes of the .bin, or begins inside an item.
inline int64_t tokens_within(const Sequences& sequences, int64_t nbytes) {
  const auto most = static_cast<uint64_t>(nbytes);
  const uint64_t inside_item = (uint64_t{1} << sequences.item_bits) - 1;
  int64_t tokens = 0;
  bool broken = false;
  for (int64_t i = sequences.first; i < sequences.stop; ++i) {
    const int64_t length = sequences.lengths[static_cast<uint64_t>(i)];
    const auto begin = static_cast<uint64_t>(sequences.begin_of(i));  // as unsigned, a negative one is too large
    const uint64_t end = begin + (static_cast<uint64_t>(length) << sequences.item_bits);
    broken |= length < 0 || begin > most || end > most || (begin & inside_item) != 0;
    tokens += length;
  }
  return broken ? -1 : tokens;
}

}  // namespace megaindex
