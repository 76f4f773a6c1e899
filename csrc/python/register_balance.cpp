// Assignment of rows by work.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include "megaindex/balance.hpp"

namespace megaindex::python {
namespace {

void squared(const py::array& length, const py::array& row_splits, int64_t width, py::array& out) {
  const int64_t samples = out.size(), runs = length.size();
  const int64_t* tokens = input<int64_t>(length, "length");
  const int64_t* splits = input_of_size<int64_t>(row_splits, "row_splits", samples + 1);
  int64_t* sums = output<int64_t>(out, "out");
  require_no_overlap(out, "out", {length, row_splits});
  require(0 <= width && width <= INT32_MAX, "width: must be from 0 to 2**31 - 1");
  py::gil_scoped_release unlocked;
  bool inside = splits[0] == 0 && splits[samples] == runs;
  for (int64_t k = 0; k < samples; ++k) inside &= splits[k] <= splits[k + 1];
  require(inside, "row_splits: must lie inside the runs");
  for (int64_t at = 0; at < runs; ++at) inside &= tokens[at] >= 0;
  require(inside, "length: must not be negative");
  squared_lengths(tokens, splits, samples, width, sums);
}

void balance(const py::array& work, int64_t served, int64_t rows_served, int64_t ranks,
             int64_t micro_batch_size, py::array& out) {
  const int64_t* each = input<int64_t>(work, "work");
  int64_t* numbers = output<int64_t>(out, "out");
  require_no_overlap(out, "out", {work});
  const int64_t samples = work.size(), rows = out.size();
  require(ranks >= 1 && micro_batch_size >= 1 && ranks <= INT32_MAX &&
              micro_batch_size <= INT32_MAX,
          "ranks, micro_batch_size: must be from 1 to 2**31 - 1");
  require(rows % (ranks * micro_batch_size) == 0 && rows_served >= 0 &&
              rows_served % (ranks * micro_batch_size) == 0,
          "out, rows_served: must be multiples of ranks * micro_batch_size rows");
  require(0 <= served && served <= std::min(samples, rows_served) && samples - served <= rows,
          "served: must leave no more samples than there are rows");
  py::gil_scoped_release unlocked;
  int64_t left = INT64_MAX;
  for (int64_t k = 0; k < samples; ++k) {
    require(0 <= each[k] && each[k] <= left, "work: must be >= 0, with a sum below 2**63");
    left -= each[k];
  }
  balance_rows(each, samples, served, rows_served, ranks, micro_batch_size, rows, numbers);
}

}  // namespace

void register_balance(py::module_& m) {
  using namespace py::literals;
  m.def("squared_lengths", &squared, "length"_a, "row_splits"_a, "width"_a, "out"_a);
  m.def("balance_rows", &balance, "work"_a, "served"_a, "rows_served"_a, "ranks"_a,
        "micro_batch_size"_a, "out"_a);
}

}  // namespace megaindex::python
