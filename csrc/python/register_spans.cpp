// Token runs of samples in stored arrays and in windows of a .bin.
#include "python/arrays.hpp"
#include "python/register.hpp"
#include "python/runs.hpp"

#include <tuple>
#include <variant>
#include <vector>

#include "megaindex/blended_spans.hpp"
#include "megaindex/layout.hpp"
#include "megaindex/spans.hpp"
#include "megaindex/windows.hpp"

namespace megaindex::python {
namespace {

template <class Shuffle, class Cell>
IndexArrays<Shuffle, Cell> index_arrays(const py::array& shuffle_index,
                                        const py::array& sample_index,
                                        const py::array& document_index, const py::array& lengths,
                                        int64_t extra) {
  const IndexArrays<Shuffle, Cell> index{input<Shuffle>(shuffle_index, "shuffle_index"),
                                         shuffle_index.size(),
                                         input<Cell>(sample_index, "sample_index", 2),
                                         sample_index.shape(0),
                                         input<int32_t>(document_index, "document_index"),
                                         document_index.size(),
                                         file_lengths(lengths),
                                         extra};
  require(sample_index.shape(1) == 2, "sample_index: expected rows of position and offset");
  require(lengths.size() >= 1 && (extra == 0 || extra == 1),
          "lengths, extra: need at least one sequence, and extra 0 or 1");
  return index;
}

// The arrays of an index in their own dtypes.
AnyIndexArrays any_index_arrays(const py::array& shuffle_index, const py::array& sample_index,
                                const py::array& document_index, const py::array& lengths,
                                int64_t extra) {
  const auto of = [&](auto shuffle, auto cell) -> AnyIndexArrays {
    return index_arrays<decltype(shuffle), decltype(cell)>(shuffle_index, sample_index,
                                                           document_index, lengths, extra);
  };
  const bool narrow = is<int32_t>(sample_index);
  if (is<uint32_t>(shuffle_index)) {
    return narrow ? of(uint32_t{}, int32_t{}) : of(uint32_t{}, int64_t{});
  }
  return narrow ? of(int64_t{}, int32_t{}) : of(int64_t{}, int64_t{});
}

py::tuple find_array_spans(const py::array& shuffle_index, const py::array& sample_index,
                           const py::array& document_index, const py::array& lengths, int64_t extra,
                           const py::array& sample_ids) {
  const auto arrays =
      any_index_arrays(shuffle_index, sample_index, document_index, lengths, extra);
  const int64_t* ids = input<int64_t>(sample_ids, "sample_ids");
  const int64_t n = sample_ids.size();
  return found_runs(n, [&](Runs& runs, int64_t* splits) {
    std::visit([&](const auto& index) { array_spans(index, ids, n, runs, splits); }, arrays);
  });
}

// The arrays of every source of a blend, and references that keep them alive.
struct SpanTable {
  std::vector<AnyIndexArrays> indices;
  py::list owners;
};

SpanTable span_table(const py::sequence& indices) {
  using Arrays = std::tuple<py::array, py::array, py::array, py::array, int64_t>;
  SpanTable table;
  for (const auto& item : indices) {
    const auto [shuffle, samples, documents, lengths, extra] = py::cast<Arrays>(item);
    table.indices.push_back(any_index_arrays(shuffle, samples, documents, lengths, extra));
    table.owners.append(py::make_tuple(shuffle, samples, documents, lengths));
  }
  return table;
}

py::tuple find_blended_spans(const SpanTable& table, const py::array& which,
                             const py::array& samples) {
  const int64_t n = which.size();
  const auto* sources = input_of_size<int64_t>(which, "which", n);
  const auto* ids = input_of_size<int64_t>(samples, "samples", n);
  std::vector<int32_t> source;
  const py::tuple runs = found_runs(n, [&](Runs& found, int64_t* splits) {
    blended_spans(table.indices, sources, ids, n, found, source, splits);
  });
  const auto count = static_cast<py::ssize_t>(source.size());
  return py::make_tuple(py::array_t<int32_t>(count, source.data()), runs[0], runs[1], runs[2],
                        runs[3]);
}

Sequences sequences_of(const py::array& pointers, const py::array& lengths, int64_t item_size,
                       int64_t first, int64_t stop) {
  const unsigned char* begins = unaligned_input<int64_t>(pointers, "pointers");
  const auto sizes = file_lengths(lengths);
  require(pointers.size() == sizes.count && 0 <= first && first <= stop && stop <= sizes.count,
          "first, stop: must name sequences that have a pointer and a length");
  const int bits = item_size == 1 ? 0 : item_size == 2 ? 1 : item_size == 4 ? 2 : 3;
  require(item_size == 1 << bits, "item_size: must be 1, 2, 4 or 8 bytes");
  return {begins, sizes, first, stop, bits};
}

int64_t count_tokens_within(const py::array& pointers, const py::array& lengths, int64_t item_size,
                            int64_t nbytes) {
  const auto sequences = sequences_of(pointers, lengths, item_size, 0, lengths.size());
  require(nbytes >= 0, "nbytes: must not be negative");
  py::gil_scoped_release unlocked;
  return tokens_within(sequences, nbytes);
}

py::tuple find_window_spans(const py::array& pointers, const py::array& lengths, int64_t item_size,
                            int64_t first, int64_t stop, const py::array& begins,
                            const py::array& ends) {
  const auto sequences = sequences_of(pointers, lengths, item_size, first, stop);
  require(first < stop, "first, stop: must name sequences that have a pointer and a length");
  const auto* from = input<int64_t>(begins, "begins");
  const auto* to = input<int64_t>(ends, "ends");
  const int64_t n = begins.size();
  require(ends.size() == n, "begins, ends: must have equal lengths");
  bool inside = true;
  for (int64_t k = 0; k < n; ++k) {
    inside &= 0 <= from[k] && from[k] < to[k] && to[k] <= INT64_MAX >> 4;
  }
  require(inside, "begins, ends: must be 0 <= begin < end < 2**59");
  return found_runs(n, [&](Runs& runs, int64_t* splits) {
    window_spans(sequences, from, to, n, runs, splits);
  });
}

}  // namespace

void register_spans(py::module_& m) {
  using namespace py::literals;
  m.def("array_spans", &find_array_spans, "shuffle_index"_a, "sample_index"_a, "document_index"_a,
        "lengths"_a, "extra"_a, "sample_ids"_a);
  py::class_<SpanTable>(m, "SpanTable");
  m.def("span_table", &span_table, "indices"_a);
  m.def("blended_spans", &find_blended_spans, "table"_a, "which"_a, "samples"_a);
  m.def("window_spans", &find_window_spans, "pointers"_a, "lengths"_a, "item_size"_a, "first"_a,
        "stop"_a, "begins"_a, "ends"_a);
  m.def("tokens_within", &count_tokens_within, "pointers"_a, "lengths"_a, "item_size"_a,
        "nbytes"_a);
}

}  // namespace megaindex::python
