// Functions that add bindings to the module, one for each register_*.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace megaindex::python {

void register_balance(pybind11::module_& m);
void register_batch(pybind11::module_& m);
void register_bijection(pybind11::module_& m);
void register_blending(pybind11::module_& m);
void register_mapped_files(pybind11::module_& m);
void register_mapping(pybind11::module_& m);
void register_packing(pybind11::module_& m);
void register_receipt(pybind11::module_& m);
void register_rows(pybind11::module_& m);
void register_samples(pybind11::module_& m);
void register_shuffle(pybind11::module_& m);
void register_spans(pybind11::module_& m);

}  // namespace megaindex::python
