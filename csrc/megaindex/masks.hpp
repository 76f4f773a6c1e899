// Loss masks and document boundaries of a batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megaindex/cpu.hpp"
#include "megaindex/rows.hpp"

namespace megaindex {

struct MaskIds {
  int64_t pad;
  bool has_end;
  int64_t end;  // of a document, if has_end
};

namespace detail {

constexpr int64_t kMaskBlock = 64;

template <class Token>
__attribute__((always_inline)) inline void mask_row(const MaskIds& ids, int64_t width,
                                                    Token* __restrict tokens,
                                                    Token* __restrict labels,
                                                    float* __restrict loss_mask) {
  const auto pad = static_cast<Token>(ids.pad), end = static_cast<Token>(ids.end);
  const bool has_end = ids.has_end;
  for (int64_t begin = 0; begin < width; begin += kMaskBlock) {
    const int64_t stop = std::min(width, begin + kMaskBlock);
    int pads = 0;
    for (int64_t j = begin; j < stop; ++j) {
      const int padded = labels[j] == pad;
      loss_mask[j] = padded | (has_end & (tokens[j] == end)) ? 0.0F : 1.0F;
      pads |= padded | (tokens[j] == pad);
    }
    if (pads == 0) continue;  // most blocks have no padding to replace
    for (int64_t j = begin; j < stop; ++j) {
      tokens[j] = tokens[j] == pad ? Token{0} : tokens[j];
      labels[j] = labels[j] == pad ? Token{0} : labels[j];
    }
  }
}

// Return the first position from `begin` on that holds `id`, or `width`.
template <class Token>
__attribute__((always_inline)) inline int64_t find_id(const Token* tokens, int64_t begin,
                                                      int64_t width, Token id) {
  for (; begin + kMaskBlock <= width; begin += kMaskBlock) {
    int found = 0;
    for (int64_t i = 0; i < kMaskBlock; ++i) found |= tokens[begin + i] == id;
    if (found) break;
  }
  while (begin < width && tokens[begin] != id) ++begin;
  return begin;
}

template <class Token>
void mask_row_portable(const MaskIds& ids, int64_t width, Token* tokens, Token* labels,
                       float* loss_mask) {
  mask_row(ids, width, tokens, labels, loss_mask);
}

template <class Token>
int64_t find_id_portable(const Token* tokens, int64_t begin, int64_t width, Token id) {
  return find_id(tokens, begin, width, id);
}

// The same loops, 32 bytes at a time.
template <class Token>
MEGAINDEX_AVX2 void mask_row_avx2(const MaskIds& ids, int64_t width, Token* tokens, Token* labels,
                                  float* loss_mask) {
  mask_row(ids, width, tokens, labels, loss_mask);
}

template <class Token>
MEGAINDEX_AVX2 int64_t find_id_avx2(const Token* tokens, int64_t begin, int64_t width, Token id) {
  return find_id(tokens, begin, width, id);
}

}  // namespace detail

// Set loss_mask to 0 where the label is pad or the token ends a document, else 1; then replace pad
// in tokens and labels by 0, an id that every embedding has.
template <class Token>
void mask_loss(const MaskIds& ids, int64_t rows, int64_t width, Rows<Token> tokens,
               Rows<Token> labels, Rows<float> loss_mask) {
  auto* mask = has_avx2() ? detail::mask_row_avx2<Token> : detail::mask_row_portable<Token>;
  for (int64_t k = 0; k < rows; ++k) {
    mask(ids, width, tokens[k], labels[k], loss_mask[k]);
  }
}

// Fields that separate the documents of a row; each may be null.
struct DocumentFields {
  Rows<int64_t> position_ids;  // position in the document
  Rows<int32_t> cu_seqlens;    // width + 1 cells: starts of documents, then width
  int32_t* max_seqlen;         // for each row the tokens of its longest document
};

namespace detail {

// Fill the fields of a row; end_of(begin) is the end of the document at begin, at most width.
template <class EndOf>
void document_row(const DocumentFields& fields, int64_t row, int64_t width, EndOf&& end_of) {
  int64_t* positions = fields.position_ids[row];
  int32_t* starts = fields.cu_seqlens[row];
  int64_t documents = 0, longest = 0;
  for (int64_t begin = 0, end; begin < width; begin = end) {
    end = end_of(begin);
    if (positions != nullptr) {
      for (int64_t j = begin; j < end; ++j) positions[j] = j - begin;
    }
    if (starts != nullptr) starts[documents++] = static_cast<int32_t>(begin);
    longest = std::max(longest, end - begin);
  }
  if (starts != nullptr) {
    std::fill(starts + documents, starts + width + 1, static_cast<int32_t>(width));
  }
  if (fields.max_seqlen != nullptr) fields.max_seqlen[row] = static_cast<int32_t>(longest);
}

}  // namespace detail

// Fill the fields of documents that end with the token end_id or with the row.
template <class Token>
void documents_by_token(int64_t rows, int64_t width, Rows<const Token> tokens, int64_t end_id,
                        const DocumentFields& fields) {
  auto* find = has_avx2() ? detail::find_id_avx2<Token> : detail::find_id_portable<Token>;
  for (int64_t k = 0; k < rows; ++k) {
    detail::document_row(fields, k, width, [&](int64_t begin) {
      return std::min(width, find(tokens[k], begin, width, static_cast<Token>(end_id)) + 1);
    });
  }
}

// Fill the fields of documents that are runs: those of row k are row_splits[k] ... row_splits[k +
// 1] - 1. Empty runs are skipped, and cells after the runs belong to the last document.
inline void documents_by_run(const int64_t* lengths, const int64_t* row_splits, int64_t rows,
                             int64_t width, const DocumentFields& fields) {
  for (int64_t k = 0; k < rows; ++k) {
    int64_t run = row_splits[k], last = row_splits[k + 1], end = 0;
    while (last > run && lengths[last - 1] == 0) --last;
    detail::document_row(fields, k, width, [&](int64_t begin) {
      // a run may end one token after the row, with the extra token of the label
      while (run < last && end <= begin) end += lengths[run++];
      return run == last ? width : std::min(end, width);
    });
  }
}

}  // namespace megaindex
