// Token runs as NumPy arrays.
#pragma once

#include "megaindex/runs.hpp"

#include <cstdint>
#include <utility>

#include "python/arrays.hpp"

namespace megaindex::python {

// Return an array that owns the column and gives it back to the pool.
inline py::array_t<int64_t> as_array(Runs::Column column, int64_t size) {
  int64_t* data = column.get();
  const py::capsule owner(data, [](void* memory) {
    Runs::GiveBack()(static_cast<int64_t*>(memory));
  });
  column.release();
  return py::array_t<int64_t>(size, data, owner);
}

// Call find(runs, row_splits) without the GIL and return (document, offset, length, row_splits).
template <class Find>
py::tuple found_runs(int64_t requests, Find&& find) {
  py::array_t<int64_t> row_splits(requests + 1);
  int64_t* splits = row_splits.mutable_data();
  Runs runs(2 * requests + 16);  // most samples span few documents
  {
    py::gil_scoped_release unlocked;
    find(runs, splits);
  }
  const int64_t size = runs.size();
  return py::make_tuple(as_array(std::move(runs.documents), size),
                        as_array(std::move(runs.offsets), size),
                        as_array(std::move(runs.lengths), size), row_splits);
}

}  // namespace megaindex::python
