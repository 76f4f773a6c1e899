// The extension module megaindex.kernels._native.
#include <pybind11/pybind11.h>

#include <exception>

#include "megaindex/invalid_input.hpp"
#include "python/register.hpp"

namespace py = pybind11;
using namespace megaindex;

namespace {

// Version of the functions and their arguments, as in megaindex/kernels/protocol.py.
constexpr int kInterface = 8;

void raise_invalid_argument(const char* message) {
  const auto type = py::module_::import("megaindex.errors").attr("InvalidArgument");
  PyErr_SetString(type.ptr(), message);
}

// Register the functions of the frameworks' helpers modules. megaindex.helpers has their signatures
// and checks their arguments for all backends, then calls the kernels of the one it is given.
void register_helpers(py::module_& m) {
  const py::handle core = m;
  for (const char* name :
       {"build_sample_idx", "build_sample_idx_int32", "build_sample_idx_int64",
        "build_blending_indices", "build_exhaustive_blending_indices", "build_mapping",
        "build_blocks_mapping"}) {
    const auto call = [name, core](const py::args& args, const py::kwargs& kwargs) {
      kwargs["backend"] = core;
      return py::module_::import("megaindex.helpers").attr(name)(*args, **kwargs);
    };
    m.def(name, call, "megaindex.helpers's function of this name, run by this module's kernels.");
  }
}

}  // namespace

// Calls share nothing but the pool of run columns, which has a lock, so the module does not need
// the GIL of a free-threaded Python.
PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
  m.doc() = "megaindex's native core, with the functions of megaindex.kernels.reference";
  m.attr("INTERFACE") = kInterface;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const InvalidInput& e) {
      raise_invalid_argument(e.what());
    } catch (const py::cast_error&) {  // pybind11 would raise RuntimeError
      raise_invalid_argument("expected a tuple of arrays, or a whole number");
    }
  });
  python::register_shuffle(m);
  python::register_samples(m);
  python::register_spans(m);
  python::register_bijection(m);
  python::register_packing(m);
  python::register_receipt(m);
  python::register_balance(m);
  python::register_batch(m);
  python::register_rows(m);
  python::register_blending(m);
  python::register_mapping(m);
  python::register_mapped_files(m);
  register_helpers(m);
}
