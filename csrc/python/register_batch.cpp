// Batches: gathered tokens, loss masks and document boundaries.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "megaindex/gather.hpp"
#include "megaindex/masks.hpp"

namespace megaindex::python {
namespace {

// Tokens, pointers and lengths of every source, and references that keep the arrays alive.
struct TokenTable {
  std::vector<TokenSource> sources;
  py::list owners;
};

template <class T>
TokenSource token_source(const py::array& tokens, TokenType type, int itemsize_log2) {
  const auto* data = reinterpret_cast<const unsigned char*>(input<T>(tokens, "tokens"));
  return {data, tokens.nbytes(), type, itemsize_log2, nullptr, nullptr, 0};
}

TokenSource token_source(const py::array& tokens) {
  if (is<uint8_t>(tokens)) return token_source<uint8_t>(tokens, TokenType::kU8, 0);
  if (is<int8_t>(tokens)) return token_source<int8_t>(tokens, TokenType::kI8, 0);
  if (is<uint16_t>(tokens)) return token_source<uint16_t>(tokens, TokenType::kU16, 1);
  if (is<int16_t>(tokens)) return token_source<int16_t>(tokens, TokenType::kI16, 1);
  if (is<uint32_t>(tokens)) return token_source<uint32_t>(tokens, TokenType::kU32, 2);
  if (is<int32_t>(tokens)) return token_source<int32_t>(tokens, TokenType::kI32, 2);
  if (is<uint64_t>(tokens)) return token_source<uint64_t>(tokens, TokenType::kU64, 3);
  if (is<float>(tokens)) return token_source<float>(tokens, TokenType::kF32, 2);
  if (is<double>(tokens)) return token_source<double>(tokens, TokenType::kF64, 3);
  return token_source<int64_t>(tokens, TokenType::kI64, 3);
}

TokenTable token_table(const py::sequence& sources) {
  TokenTable table;
  for (const auto& item : sources) {
    const auto [tokens, pointers, lengths] =
        py::cast<std::tuple<py::array, py::array, py::array>>(item);
    TokenSource source = token_source(tokens);
    source.pointers = unaligned_input<int64_t>(pointers, "pointers");
    source.lengths = unaligned_input<int32_t>(lengths, "lengths");
    require(pointers.size() == lengths.size(), "pointers, lengths: must have equal lengths");
    source.sequences = lengths.size();
    table.sources.push_back(source);
    table.owners.append(py::make_tuple(tokens, pointers, lengths));
  }
  return table;
}

// Rows of a two-dimensional array: contiguous each, with any distance between them.
template <class T>
Rows<T> rows_of(py::array& a, const char* name, int64_t rows, int64_t width) {
  if (!is<T>(a) || a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != width) {
    throw InvalidInput(std::string(name) + ": expected " +
                       std::string(py::str(py::dtype::of<T>())) + "(" + std::to_string(rows) +
                       ", " + std::to_string(width) + "), got " + describe(a));
  }
  constexpr auto kSize = static_cast<py::ssize_t>(sizeof(T));
  const bool contiguous = width <= 1 || a.strides(1) == kSize || rows == 0;
  require(contiguous && a.strides(0) % kSize == 0, name,
          ": the cells of a row must be contiguous; use a copy");
  check_aligned<T>(a, name);
  check_writeable(a, name);
  return {static_cast<T*>(a.mutable_data()), a.strides(0) / kSize};
}

template <class T>
Rows<T> optional_rows(const py::object& object, const char* name, int64_t rows, int64_t width) {
  if (object.is_none()) return {nullptr, 0};
  auto array = as_numpy(object);
  return rows_of<T>(array, name, rows, width);
}

void check_splits(const int64_t* row_splits, int64_t rows, int64_t runs) {
  bool inside = row_splits[0] == 0 && row_splits[rows] == runs;
  for (int64_t k = 0; k < rows; ++k) inside &= row_splits[k] <= row_splits[k + 1];
  require(inside, "row_splits: must rise from 0 to the number of runs");
}

template <class Out>
int64_t gather_into(const TokenTable& table, const TokenRuns& runs, py::array& out,
                    const py::object& labels, int64_t pad_id, int num_threads) {
  for (const TokenSource& source : table.sources) {
    require(copier<Out>(source.type) != nullptr,
            "out: its dtype does not hold every token of a source; use int64");
  }
  require(std::is_floating_point_v<Out> || pad_id == static_cast<int64_t>(static_cast<Out>(pad_id)),
          "pad_id: does not fit the dtype of out");
  require(out.ndim() == 2, "out: expected a two-dimensional array");
  const int64_t width = out.shape(1);
  const auto tokens = rows_of<Out>(out, "out", runs.rows, width);
  const auto shifted = optional_rows<Out>(labels, "labels", runs.rows, width);
  py::gil_scoped_release unlocked;
  return gather(table.sources, runs, width, static_cast<Out>(pad_id), num_threads, tokens, shifted);
}

int64_t gather_tokens(const TokenTable& table, const py::array& source, const py::array& document,
                      const py::array& offset, const py::array& length, const py::array& row_splits,
                      py::array& out, const py::object& labels, int64_t pad_id, int num_threads) {
  const int64_t count = document.size(), rows = row_splits.size() - 1;
  const TokenRuns runs{input_of_size<int32_t>(source, "source", count),
                       input_of_size<int64_t>(document, "document", count),
                       input_of_size<int64_t>(offset, "offset", count),
                       input_of_size<int64_t>(length, "length", count),
                       input<int64_t>(row_splits, "row_splits"),
                       rows};
  require(rows >= 0, "row_splits: must have at least one entry");
  check_splits(runs.row_splits, rows, count);
  require_no_overlap(out, "out", {source, document, offset, length, row_splits});
  require_no_overlap(labels, "labels", {source, document, offset, length, row_splits});
  if (is<int32_t>(out)) return gather_into<int32_t>(table, runs, out, labels, pad_id, num_threads);
  if (is<float>(out)) return gather_into<float>(table, runs, out, labels, pad_id, num_threads);
  return gather_into<int64_t>(table, runs, out, labels, pad_id, num_threads);
}

// Call body(Token{}) with the type of the array's cells.
template <class Body>
void with_tokens(const py::array& tokens, Body&& body) {
  require(tokens.ndim() == 2, "tokens: expected a two-dimensional array");
  if (is<int32_t>(tokens)) return body(int32_t{});
  body(int64_t{});
}

void mask_batch_loss(py::array& tokens, py::array& labels, int64_t pad_id, const py::object& eod_id,
                     py::array& loss_mask) {
  with_tokens(tokens, [&](auto zero) {
    using Token = decltype(zero);
    const int64_t rows = tokens.shape(0), width = tokens.shape(1);
    const MaskIds ids{pad_id, !eod_id.is_none(), eod_id.is_none() ? 0 : py::cast<int64_t>(eod_id)};
    for (const int64_t id : {ids.pad, ids.end}) {
      require(id == static_cast<Token>(id), "pad_id, eod_id: must fit the dtype of tokens");
    }
    const auto read = rows_of<Token>(tokens, "tokens", rows, width);
    const auto wanted = rows_of<Token>(labels, "labels", rows, width);
    const auto counted = rows_of<float>(loss_mask, "loss_mask", rows, width);
    py::gil_scoped_release unlocked;
    mask_loss(ids, rows, width, read, wanted, counted);
  });
}

DocumentFields document_fields(const py::object& position_ids, const py::object& cu_seqlens,
                               const py::object& max_seqlen, int64_t rows, int64_t width,
                               std::initializer_list<py::handle> inputs) {
  require(width <= INT32_MAX, "cu_seqlens: int32 counts at most 2**31 - 1 tokens");
  DocumentFields fields{optional_rows<int64_t>(position_ids, "position_ids", rows, width),
                        optional_rows<int32_t>(cu_seqlens, "cu_seqlens", rows, width + 1), nullptr};
  if (!max_seqlen.is_none()) {
    auto longest = as_numpy(max_seqlen);
    fields.max_seqlen = output<int32_t>(longest, "max_seqlen");
    require(longest.size() == rows, "max_seqlen: must have one entry for each row");
  }
  require_no_overlap(position_ids, "position_ids", inputs);
  require_no_overlap(cu_seqlens, "cu_seqlens", inputs);
  require_no_overlap(max_seqlen, "max_seqlen", inputs);
  return fields;
}

void split_by_token(py::array& tokens, int64_t eod_id, const py::object& position_ids,
                    const py::object& cu_seqlens, const py::object& max_seqlen) {
  with_tokens(tokens, [&](auto zero) {
    using Token = decltype(zero);
    const int64_t rows = tokens.shape(0), width = tokens.shape(1);
    require(eod_id == static_cast<Token>(eod_id), "eod_id: must fit the dtype of tokens");
    const auto text = rows_of<Token>(tokens, "tokens", rows, width);
    const auto fields = document_fields(position_ids, cu_seqlens, max_seqlen, rows, width, {tokens});
    py::gil_scoped_release unlocked;
    documents_by_token<Token>(rows, width, {text.data, text.stride}, eod_id, fields);
  });
}

void split_by_run(const py::array& length, const py::array& row_splits, int64_t width,
                  const py::object& position_ids, const py::object& cu_seqlens,
                  const py::object& max_seqlen) {
  const auto* lengths = input<int64_t>(length, "length");
  const auto* splits = input<int64_t>(row_splits, "row_splits");
  const int64_t runs = length.size(), rows = row_splits.size() - 1;
  require(rows >= 0 && width >= 0, "row_splits: must have at least one entry; width: must be >= 0");
  check_splits(splits, rows, runs);
  for (int64_t r = 0; r < runs; ++r) {
    require(0 <= lengths[r] && lengths[r] <= int64_t{1} << 40, "length: must be 0 to 2**40");
  }
  const auto fields =
      document_fields(position_ids, cu_seqlens, max_seqlen, rows, width, {length, row_splits});
  py::gil_scoped_release unlocked;
  documents_by_run(lengths, splits, rows, width, fields);
}

}  // namespace

void register_batch(py::module_& m) {
  using namespace py::literals;
  py::class_<TokenTable>(m, "TokenTable");
  m.def("token_table", &token_table, "sources"_a);
  m.def("gather", &gather_tokens, "table"_a, "source"_a, "document"_a, "offset"_a, "length"_a,
        "row_splits"_a, "out"_a, "labels"_a, "pad_id"_a, "num_threads"_a = 1);
  m.def("mask_loss", &mask_batch_loss, "tokens"_a, "labels"_a, "pad_id"_a, "eod_id"_a,
        "loss_mask"_a);
  m.def("documents_by_token", &split_by_token, "tokens"_a, "eod_id"_a, "position_ids"_a,
        "cu_seqlens"_a, "max_seqlen"_a);
  m.def("documents_by_run", &split_by_run, "length"_a, "row_splits"_a, "width"_a, "position_ids"_a,
        "cu_seqlens"_a, "max_seqlen"_a);
}

}  // namespace megaindex::python
