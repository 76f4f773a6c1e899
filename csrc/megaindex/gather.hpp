// Gathering of token runs into the rows of a batch, in a wider dtype and with shifted labels.
//
// The text of row k is the tokens of its runs: out[k][j] = text[j], labels[k][j] = text[j + 1].
// Cells after the text are pad_id; text after the row is left out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "megaindex/cpu.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/rows.hpp"

namespace megaindex {

enum class TokenType { kU8, kI8, kU16, kI16, kU32, kI32, kU64, kI64, kF32, kF64 };

// One dataset: the tokens of its .bin, and the unaligned pointers and lengths of its .idx.
struct TokenSource {
  const unsigned char* tokens;
  int64_t bytes;
  TokenType type;
  int itemsize_log2;
  const unsigned char* pointers;  // int64[sequences], bytes
  const unsigned char* lengths;   // int32[sequences], tokens
  int64_t sequences;
};

struct TokenRuns {
  const int32_t* source;
  const int64_t* document;
  const int64_t* offset;
  const int64_t* length;
  const int64_t* row_splits;  // runs of row k: row_splits[k] ... row_splits[k + 1] - 1
  int64_t rows;
};

namespace detail {

template <class T>
inline T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Return the byte of the .bin at which tokens offset ... offset + length - 1 of a sequence begin,
// or -1 if they are not in the sequence and the file. Values are compared with differences, so that
// no sum can overflow.
inline int64_t run_begin(const TokenSource& source, int64_t document, int64_t offset,
                         int64_t length) {
  if (document < 0 || document >= source.sequences) return -1;
  const int64_t size = load<int32_t>(source.lengths + 4 * document);
  if (offset < 0 || length < 0 || offset > size || length > size - offset) return -1;
  const int64_t pointer = load<int64_t>(source.pointers + 8 * document);
  if (pointer < 0 || pointer > source.bytes) return -1;
  const int64_t begin = pointer >> source.itemsize_log2;
  if (begin << source.itemsize_log2 != pointer) return -1;
  if (offset + length > (source.bytes >> source.itemsize_log2) - begin) return -1;
  return (begin + offset) << source.itemsize_log2;
}

// Whether Out holds every value of T; floats take any number, rounded.
template <class T, class Out>
constexpr bool kFits = std::is_floating_point_v<Out> ||
                       (std::is_integral_v<T> &&
                        std::numeric_limits<T>::digits <= std::numeric_limits<Out>::digits);

// Copy a run whose n tokens are text[at] ... text[at + n - 1] of a row of `width` cells, at <=
// width.
template <class T, class Out>
__attribute__((always_inline)) inline void copy_run(const T* __restrict from, int64_t n, int64_t at,
                                                    int64_t width, Out* __restrict out,
                                                    Out* __restrict labels) {
  const int64_t cells = std::min(n, width - at);
  if (labels == nullptr) {
    for (int64_t i = 0; i < cells; ++i) out[at + i] = static_cast<Out>(from[i]);
    return;
  }
  if (n > 0 && at > 0) labels[at - 1] = static_cast<Out>(from[0]);
  const int64_t both = std::min(n - 1, cells);
  for (int64_t i = 0; i < both; ++i) {
    out[at + i] = static_cast<Out>(from[i]);
    labels[at + i] = static_cast<Out>(from[i + 1]);
  }
  if (0 <= both && both < cells) out[at + both] = static_cast<Out>(from[both]);
}

template <class Out>
using CopyRun = void (*)(const unsigned char* from, int64_t n, int64_t at, int64_t width, Out* out,
                         Out* labels);

template <class T, class Out>
void copy_run_portable(const unsigned char* from, int64_t n, int64_t at, int64_t width, Out* out,
                       Out* labels) {
  copy_run(reinterpret_cast<const T*>(from), n, at, width, out, labels);
}

// The same loops with 32-byte stores.
template <class T, class Out>
MEGAINDEX_AVX2 void copy_run_avx2(const unsigned char* from, int64_t n, int64_t at, int64_t width,
                                  Out* out, Out* labels) {
  copy_run(reinterpret_cast<const T*>(from), n, at, width, out, labels);
}

template <class T, class Out>
CopyRun<Out> copy_run_of() {
  if constexpr (kFits<T, Out>) {
    return has_avx2() ? copy_run_avx2<T, Out> : copy_run_portable<T, Out>;
  } else {
    return nullptr;
  }
}

}  // namespace detail

// Return the function that copies tokens of that type, or null if Out does not hold all of them.
template <class Out>
detail::CopyRun<Out> copier(TokenType type) {
  switch (type) {
    case TokenType::kU8: return detail::copy_run_of<uint8_t, Out>();
    case TokenType::kI8: return detail::copy_run_of<int8_t, Out>();
    case TokenType::kU16: return detail::copy_run_of<uint16_t, Out>();
    case TokenType::kI16: return detail::copy_run_of<int16_t, Out>();
    case TokenType::kU32: return detail::copy_run_of<uint32_t, Out>();
    case TokenType::kI32: return detail::copy_run_of<int32_t, Out>();
    case TokenType::kU64: return detail::copy_run_of<uint64_t, Out>();
    case TokenType::kI64: return detail::copy_run_of<int64_t, Out>();
    case TokenType::kF32: return detail::copy_run_of<float, Out>();
    case TokenType::kF64: return detail::copy_run_of<double, Out>();
  }
  return nullptr;
}

namespace detail {

using RunBegins = std::vector<const unsigned char*>;

// Find the address of each run; return the number of the first invalid run, or -1.
inline int64_t find_runs(const std::vector<TokenSource>& sources, const TokenRuns& runs,
                         RunBegins& begins) {
  constexpr int64_t kAhead = 16;
  const auto count = static_cast<int64_t>(begins.size());
  const auto source_of = [&](int64_t r) -> const TokenSource* {
    if (runs.source[r] < 0 || runs.source[r] >= static_cast<int64_t>(sources.size())) return nullptr;
    const TokenSource& source = sources[static_cast<size_t>(runs.source[r])];
    return 0 <= runs.document[r] && runs.document[r] < source.sequences ? &source : nullptr;
  };
  for (int64_t r = 0; r < count; ++r) {
    if (r + kAhead < count) {
      if (const TokenSource* next = source_of(r + kAhead)) {
        __builtin_prefetch(next->pointers + 8 * runs.document[r + kAhead]);
        __builtin_prefetch(next->lengths + 4 * runs.document[r + kAhead]);
      }
    }
    const TokenSource* source = source_of(r);
    if (source == nullptr) return r;
    const int64_t begin = run_begin(*source, runs.document[r], runs.offset[r], runs.length[r]);
    if (begin < 0) return r;
    begins[static_cast<size_t>(r)] = source->tokens + begin;
    __builtin_prefetch(begins[static_cast<size_t>(r)]);
  }
  return -1;
}

// Prefetch the first bytes of a run; the hardware prefetches the others.
inline void prefetch(const unsigned char* begin, int64_t bytes) {
  constexpr int64_t kLine = 64, kMost = 2048;
  const int64_t end = std::min(bytes, kMost);
  for (int64_t i = 0; i < end; i += kLine) __builtin_prefetch(begin + i, 0, 2);  // into L2
}

template <class Out>
void gather_row(const std::vector<TokenSource>& sources, const TokenRuns& runs,
                const RunBegins& begins, int64_t row, int64_t width, Out pad_id, Out* out,
                Out* labels) {
  const auto source_of = [&](int64_t r) -> const TokenSource& {
    return sources[static_cast<size_t>(runs.source[r])];
  };
  const int64_t count = runs.row_splits[runs.rows];
  int64_t at = 0;  // tokens of the text so far; its token `width` is a label too
  for (int64_t r = runs.row_splits[row]; r < runs.row_splits[row + 1] && at <= width; ++r) {
    if (r + 1 < count) {
      prefetch(begins[static_cast<size_t>(r + 1)],
               runs.length[r + 1] << source_of(r + 1).itemsize_log2);
    }
    copier<Out>(source_of(r).type)(begins[static_cast<size_t>(r)], runs.length[r], at, width, out,
                                   labels);
    at += runs.length[r];
  }
  if (at < width) std::fill(out + at, out + width, pad_id);
  if (labels == nullptr || at > width) return;
  std::fill(labels + std::max<int64_t>(0, at - 1), labels + width, pad_id);
}

}  // namespace detail

// Fill the rows and return -1, or write nothing and return the number of the first run that is not
// in its sequence, its file or the sources. Every source must have a copier<Out>.
template <class Out>
int64_t gather(const std::vector<TokenSource>& sources, const TokenRuns& runs, int64_t width,
               Out pad_id, int num_threads, Rows<Out> out, Rows<Out> labels) {
  // starting a thread takes as long as writing a few hundred kilobytes
  constexpr int64_t kBytesPerThread = int64_t{1} << 20;
  detail::RunBegins begins(static_cast<size_t>(runs.row_splits[runs.rows]));
  if (const int64_t bad = detail::find_runs(sources, runs, begins); bad >= 0) return bad;
  const int64_t bytes = runs.rows * width * static_cast<int64_t>(sizeof(Out));
  const int64_t parts =
      std::max<int64_t>(1, std::min({int64_t{num_threads}, bytes / kBytesPerThread, runs.rows}));
  run_parallel(parts, [&](int64_t part) {
    const int64_t end = runs.rows * (part + 1) / parts;
    for (int64_t k = runs.rows * part / parts; k < end; ++k) {
      detail::gather_row(sources, runs, begins, k, width, pad_id, out[k], labels[k]);
    }
  });
  return -1;
}

}  // namespace megaindex
