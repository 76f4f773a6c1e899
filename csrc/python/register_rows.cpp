// Rows of token ids, read by sample id; compiled with register_batch.cpp and register_spans.cpp.
#include "python/arrays.hpp"
#include "python/register.hpp"
#include "python/runs.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "megaindex/row_reader.hpp"

namespace megaindex::python {
namespace {

// What rows are read from, and references that keep the arrays alive.
struct RowTable {
  RowSources sources;
  py::list owners;
};

void set_draws(RowTable& table, const py::object& dataset_index,
               const py::object& dataset_sample_index) {
  BlendDraws& draws = table.sources.draws;
  const auto& indices = table.sources.indices;
  if (dataset_index.is_none() && dataset_sample_index.is_none()) {
    require(indices.size() == 1, "dataset_index: must be given for several sources");
    draws.size = std::visit([](const auto& index) { return index.num_samples; }, indices[0]);
    return;
  }
  const py::array which = as_numpy(dataset_index), samples = as_numpy(dataset_sample_index);
  draws.size = which.size();
  draws.samples = input_of_size<int64_t>(samples, "dataset_sample_index", draws.size);
  if (is<uint8_t>(which)) {
    draws.narrow = input<uint8_t>(which, "dataset_index");
  } else {
    draws.wide = input<int16_t>(which, "dataset_index");
  }
  table.owners.append(py::make_tuple(which, samples));
}

RowTable row_table(const py::sequence& indices, const py::sequence& sources,
                   const py::object& dataset_index, const py::object& dataset_sample_index,
                   const py::sequence& descriptors) {
  SpanTable spans = span_table(indices);
  TokenTable tokens = token_table(sources);
  require(!spans.indices.empty() && spans.indices.size() == tokens.sources.size(),
          "indices, sources: must be as many, and at least one");
  for (const TokenSource& source : tokens.sources) {
    require(copier<int64_t>(source.type) != nullptr,
            "sources: int64 does not hold every token of a source");
  }
  RowTable table;
  table.owners.append(spans.owners);
  table.owners.append(tokens.owners);
  table.sources = {{nullptr, nullptr, nullptr, 0}, std::move(spans.indices),
                   std::move(tokens.sources), {}};
  for (const auto& item : descriptors) {
    table.sources.descriptors.push_back(py::cast<int>(item));
  }
  const size_t files = table.sources.descriptors.size();
  require(files == 0 || files == table.sources.tokens.size(),
          "descriptors: must be one for each source, or none");
  set_draws(table, dataset_index, dataset_sample_index);
  return table;
}

// Read integers from a list, or return false if it holds anything else, such as a bool.
bool read_integers(const py::list& items, std::vector<int64_t>& values) {
  for (py::ssize_t k = 0; k < PyList_GET_SIZE(items.ptr()); ++k) {
    // an __index__ in Python may change the list
    const auto item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(items.ptr(), k));
    if (!PyIndex_Check(item.ptr()) || PyBool_Check(item.ptr())) return false;
    const py::ssize_t value = PyNumber_AsSsize_t(item.ptr(), PyExc_OverflowError);
    if (value == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    values.push_back(value);
  }
  return true;
}

py::object read_table_rows(const RowTable& table, const py::list& sample_ids, int64_t width,
                           int64_t pad_id) {
  require(0 <= width && width <= int64_t{1} << 40, "width: must be from 0 to 2**40");
  std::vector<int64_t> ids;
  ids.reserve(sample_ids.size());
  if (!read_integers(sample_ids, ids)) return py::none();
  const auto count = static_cast<int64_t>(ids.size());
  require(width < int64_t{1} << 40 && count < int64_t{1} << 20, "sample_ids, width: too many");
  Runs::Column memory(ColumnPool::shared().take(std::max<int64_t>(1, count * width)));
  bool are_read = false;
  try {
    py::gil_scoped_release unlocked;
    are_read = table.sources.read(ids.data(), count, width, pad_id, memory.get());
  } catch (const InvalidInput&) {  // the caller finds the reason
  }
  if (!are_read) return py::none();
  return as_array(std::move(memory), count * width).reshape({count, width});
}

}  // namespace

void register_rows(py::module_& m) {
  using namespace py::literals;
  py::class_<RowTable>(m, "RowTable");
  m.def("row_table", &row_table, "indices"_a, "sources"_a, "dataset_index"_a,
        "dataset_sample_index"_a, "descriptors"_a);
  m.def("read_rows", &read_table_rows, "table"_a, "sample_ids"_a, "width"_a, "pad_id"_a);
}

}  // namespace megaindex::python
