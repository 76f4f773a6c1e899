// Checks of NumPy arguments, shared by all bindings.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "megaindex/invalid_input.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex::python {

namespace py = pybind11;

// Message parts are joined only on failure: a batch passes dozens of checks, and composing a
// message takes longer than its check.
inline void require(bool valid, const char* rule) {
  if (!valid) throw InvalidInput(rule);
}

inline void require(bool valid, const char* name, const char* rule) {
  if (!valid) throw InvalidInput(std::string(name) + rule);
}

inline void require(bool valid, const std::string& rule) {
  if (!valid) throw InvalidInput(rule);
}

inline std::string describe(const py::array& a) {
  return std::string(py::str(a.dtype())) + std::string(py::str(a.attr("shape")));
}

template <class T>
bool is(const py::array& a) {
  return py::isinstance<py::array_t<T>>(a);
}

// Requires a C-contiguous array of exactly this dtype: a converted copy would lose what a kernel
// writes and hide what it costs.
template <class T>
void check_array(const py::array& a, py::ssize_t ndim, const char* name) {
  if (!is<T>(a) || a.ndim() != ndim) {
    throw InvalidInput(std::string(name) + ": expected a " + std::to_string(ndim) +
                       "-dimensional " + std::string(py::str(py::dtype::of<T>())) +
                       " array, got " + describe(a) +
                       "; convert it with numpy.ascontiguousarray(…, dtype)");
  }
  require(a.flags() & py::array::c_style, name,
          ": expected a contiguous array; use numpy.ascontiguousarray");
}

template <class T>
void check_aligned(const py::array& a, const char* name) {
  require(reinterpret_cast<uintptr_t>(a.data()) % alignof(T) == 0, name,
          ": expected an aligned array; use a copy");
}

inline void check_writeable(const py::array& a, const char* name) {
  require(a.writeable(), name, ": the array is read-only; pass one to write into");
}

template <class T>
const T* input(const py::array& a, const char* name, py::ssize_t ndim = 1) {
  check_array<T>(a, ndim, name);
  check_aligned<T>(a, name);
  return static_cast<const T*>(a.data());
}

template <class T>
const T* input_of_size(const py::array& a, const char* name, int64_t size) {
  const T* data = input<T>(a, name);
  if (a.size() != size) {
    throw InvalidInput(std::string(name) + ": expected " + std::to_string(size) +
                       " entries, got " + describe(a));
  }
  return data;
}

template <class T>
T* output(py::array& a, const char* name, py::ssize_t ndim = 1) {
  check_array<T>(a, ndim, name);
  check_aligned<T>(a, name);
  check_writeable(a, name);
  return static_cast<T*>(a.mutable_data());
}

// Bytes of an array that may be unaligned, as the arrays of a mapped .idx are.
template <class T>
const unsigned char* unaligned_input(const py::array& a, const char* name) {
  check_array<T>(a, 1, name);
  return static_cast<const unsigned char*>(a.data());
}

inline detail::FileLengths file_lengths(const py::array& lengths) {
  return {unaligned_input<int32_t>(lengths, "lengths"), lengths.size()};
}

// Addresses of the first byte of an array and of the byte after its last.
inline std::pair<uintptr_t, uintptr_t> address_range(const py::array& a) {
  auto low = reinterpret_cast<uintptr_t>(a.data());
  if (a.size() == 0) return {low, low};
  uintptr_t high = low + static_cast<uintptr_t>(a.itemsize());
  for (py::ssize_t d = 0; d < a.ndim(); ++d) {
    const py::ssize_t reach = (a.shape(d) - 1) * a.strides(d);
    (reach < 0 ? low : high) += static_cast<uintptr_t>(reach);
  }
  return {low, high};
}

// Requires that an output overlaps no input, since kernels check their inputs before they write.
// Arguments that are not arrays, such as None, overlap nothing.
inline void require_no_overlap(const py::object& out, const char* name,
                               std::initializer_list<py::handle> others) {
  if (!py::isinstance<py::array>(out)) return;
  const auto [low, high] = address_range(py::reinterpret_borrow<py::array>(out));
  for (const py::handle other : others) {
    if (!py::isinstance<py::array>(other)) continue;
    const auto [begin, end] = address_range(py::reinterpret_borrow<py::array>(other));
    require(end <= low || high <= begin, name,
            ": shares memory with another argument; pass an array of its own");
  }
}

inline py::array as_numpy(const py::object& object) {
  require(py::isinstance<py::array>(object), "expected a numpy array or None");
  return py::reinterpret_borrow<py::array>(object);
}

// The Poll of all kernels, which handles pending signals such as Ctrl-C; called without the GIL.
//
// The unnamed namespace gives kernels instantiated with it internal linkage: GCC then optimises them
// for their only caller, without which cut_samples takes twice as long.
namespace {
struct Signals {
  void operator()() const {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
};
}  // namespace

}  // namespace megaindex::python
