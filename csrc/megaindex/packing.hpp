// Packing of whole documents: a sample ends before the document that would not fit.
#pragma once

#include <cstdint>

#include "megaindex/poll.hpp"

namespace megaindex {

struct Packed {
  int64_t samples;  // begun
  int64_t tokens;   // of the last sample
};

// Write to begins, which has room for `most`, the documents with which samples begin. `tokens` are
// those of the sample to continue; 0 begins a new one. Stop once `most` samples have begun.
template <class Poll = NoPoll>
Packed pack_documents(const int32_t* lengths, int64_t documents, int64_t capacity, int64_t tokens,
                      int64_t most, int64_t* begins, Poll poll = {}) {
  int64_t samples = 0;
  for (int64_t d = 0; d < documents && samples < most; ++d) {
    if (d % (int64_t{1} << 24) == 0) poll();
    const int64_t length = lengths[d];
    const bool opens = tokens == 0 || length > capacity - tokens;
    begins[samples] = d;  // kept if the document begins a sample, which cannot be predicted
    samples += opens;
    tokens = opens ? length : tokens + length;
  }
  return {samples, tokens};
}

}  // namespace megaindex
