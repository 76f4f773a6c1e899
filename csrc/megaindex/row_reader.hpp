// Rows of a blend of stored samples, from sample ids to tokens in one call.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megaindex/blended_spans.hpp"
#include "megaindex/gather.hpp"

namespace megaindex {

// The source and the sample of each id; without arrays, sample k of the only source.
struct BlendDraws {
  const uint8_t* narrow;  // sources; one of both, or none
  const int16_t* wide;
  const int64_t* samples;
  int64_t size;

  bool holds(int64_t id) const { return 0 <= id && id < size; }
  bool is_stored() const { return samples != nullptr; }
  int64_t source(int64_t id) const {
    return narrow != nullptr ? narrow[id] : wide != nullptr ? wide[id] : 0;
  }
  int64_t sample(int64_t id) const { return is_stored() ? samples[id] : id; }
  void prefetch(int64_t id) const {
    if (!is_stored()) return;
    __builtin_prefetch(samples + id);
    __builtin_prefetch(narrow != nullptr ? static_cast<const void*>(narrow + id) : wide + id);
  }
};

namespace detail {

// Read bytes of a file; return false where it ends or cannot be read.
inline bool read_bytes(int descriptor, unsigned char* into, int64_t count, int64_t offset) {
  while (count > 0) {
    const ssize_t read = ::pread(descriptor, into, static_cast<size_t>(count), offset);
    if (read <= 0) return false;
    into += read;
    count -= read;
    offset += read;
  }
  return true;
}

}  // namespace detail

// The arrays and tokens of every source of a blend, and the files of the tokens.
struct RowSources {
  BlendDraws draws;
  std::vector<AnyIndexArrays> indices;
  std::vector<TokenSource> tokens;
  // Of each source; -1 where the tokens are read from memory. Without any, empty.
  std::vector<int> descriptors;

  // Copy the tokens of runs to the rows; return false if a run is not in its sequence and file.
  //
  // A page of a mapping costs a fault at its first use, several microseconds, where a read copies
  // it in less than one, and samples of a large corpus seldom come back to a page.
  bool copy(const TokenRuns& runs, int64_t width, int64_t pad_id, Rows<int64_t> out) const {
    if (descriptors.empty()) {
      return gather<int64_t>(tokens, runs, width, pad_id, 1, out, {nullptr, 0}) < 0;
    }
    detail::RunBegins begins(static_cast<size_t>(runs.row_splits[runs.rows]));
    if (detail::find_runs(tokens, runs, begins) >= 0) return false;
    std::vector<unsigned char> buffer;
    for (int64_t row = 0; row < runs.rows; ++row) {
      int64_t at = 0;
      for (int64_t r = runs.row_splits[row]; r < runs.row_splits[row + 1] && at < width; ++r) {
        const auto number = static_cast<size_t>(runs.source[r]);
        const TokenSource& source = tokens[number];
        const int64_t count = std::min(runs.length[r], width - at);
        const unsigned char* from = begins[static_cast<size_t>(r)];
        if (descriptors[number] >= 0) {
          const int64_t bytes = count << source.itemsize_log2;
          if (static_cast<int64_t>(buffer.size()) < bytes) {
            buffer.resize(static_cast<size_t>(std::max(bytes, width << source.itemsize_log2)));
          }
          if (!detail::read_bytes(descriptors[number], buffer.data(), bytes,
                                  from - source.tokens)) {
            return false;
          }
          from = buffer.data();
        }
        copier<int64_t>(source.type)(from, count, at, width, out[row], nullptr);
        at += count;
      }
      std::fill(out[row] + at, out[row] + width, pad_id);
    }
    return true;
  }

  // Fill row k of `out` with the tokens of sample ids[k], and with pad_id after them. Return false,
  // with rows undefined, if an id does not exist or a run cannot be read; throw InvalidInput if a
  // source or its arrays do not hold a sample.
  bool read(const int64_t* ids, int64_t n, int64_t width, int64_t pad_id, int64_t* out) const {
    for (int64_t k = 0; k < n; ++k) {
      if (!draws.holds(ids[k])) return false;
      draws.prefetch(ids[k]);
    }
    const auto rows = static_cast<size_t>(n);
    std::vector<int64_t> columns(3 * rows + 1);
    int64_t* which = columns.data();
    int64_t* samples = which + n;
    int64_t* row_splits = samples + n;
    for (int64_t k = 0; k < n; ++k) {
      which[k] = draws.source(ids[k]);
      samples[k] = draws.sample(ids[k]);
    }
    Runs runs(4 * n + 16);
    std::vector<int32_t> source;
    blended_spans(indices, which, samples, n, runs, source, row_splits);
    const TokenRuns found{source.data(),      runs.documents.get(), runs.offsets.get(),
                          runs.lengths.get(), row_splits,           n};
    return copy(found, width, pad_id, {out, width});
  }
};

}  // namespace megaindex
