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
[[noreturn]] void refuse(const char* name, const char* rule);

inline void require(bool valid, const char* rule) {
  if (!valid) refuse("", rule);
}

inline void require(bool valid, const char* name, const char* rule) {
  if (!valid) refuse(name, rule);
}

inline void require(bool valid, const std::string& rule) {
  if (!valid) refuse("", rule.c_str());
}

// The dtype and shape of an array.
std::string describe(const py::array& a);

// As is<T> and check_array<T>, for the dtype of this number.
bool has_dtype(const py::array& a, int number);
void check_array_of(const py::array& a, int number, py::ssize_t ndim, const char* name);

template <class T>
bool is(const py::array& a) {
  return has_dtype(a, py::detail::npy_format_descriptor<T>::value);
}

// Requires a C-contiguous array of exactly this dtype: a converted copy would lose what a kernel
// writes and hide what it costs.
template <class T>
void check_array(const py::array& a, py::ssize_t ndim, const char* name) {
  check_array_of(a, py::detail::npy_format_descriptor<T>::value, ndim, name);
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

// Requires that an output overlaps no input, since kernels check their inputs before they write.
// Arguments that are not arrays, such as None, overlap nothing.
void require_no_overlap(const py::object& out, const char* name,
                        std::initializer_list<py::handle> others);

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
