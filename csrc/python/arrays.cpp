// Checks of NumPy arguments that need no type, compiled once.
#include "python/arrays.hpp"

namespace megaindex::python {
namespace {

// Addresses of the first byte of an array and of the byte after its last.
std::pair<uintptr_t, uintptr_t> address_range(const py::array& a) {
  auto low = reinterpret_cast<uintptr_t>(a.data());
  if (a.size() == 0) return {low, low};
  uintptr_t high = low + static_cast<uintptr_t>(a.itemsize());
  for (py::ssize_t d = 0; d < a.ndim(); ++d) {
    const py::ssize_t reach = (a.shape(d) - 1) * a.strides(d);
    (reach < 0 ? low : high) += static_cast<uintptr_t>(reach);
  }
  return {low, high};
}

}  // namespace

void refuse(const char* name, const char* rule) { throw InvalidInput(std::string(name) + rule); }

std::string describe(const py::array& a) {
  return std::string(py::str(a.dtype())) + std::string(py::str(a.attr("shape")));
}

bool has_dtype(const py::array& a, int number) {
  const auto& api = py::detail::npy_api::get();
  return api.PyArray_EquivTypes_(a.dtype().ptr(), py::dtype(number).ptr());
}

void check_array_of(const py::array& a, int number, py::ssize_t ndim, const char* name) {
  if (!has_dtype(a, number) || a.ndim() != ndim) {
    throw InvalidInput(std::string(name) + ": expected a " + std::to_string(ndim) +
                       "-dimensional " + std::string(py::str(py::dtype(number))) +
                       " array, got " + describe(a) +
                       "; convert it with numpy.ascontiguousarray(…, dtype)");
  }
  require(a.flags() & py::array::c_style, name,
          ": expected a contiguous array; use numpy.ascontiguousarray");
}

void require_no_overlap(const py::object& out, const char* name,
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

}  // namespace megaindex::python
