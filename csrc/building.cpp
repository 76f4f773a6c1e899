// The module and its bindings of kernels that build indices, compiled as one unit: pybind11's headers
// cost 4 seconds a unit, more than half of it for functions that every unit compiles unused.
#include "python/arrays.cpp"
#include "python/module.cpp"
#include "python/register_bijection.cpp"
#include "python/register_blending.cpp"
#include "python/register_mapping.cpp"
#include "python/register_samples.cpp"
#include "python/register_shuffle.cpp"
