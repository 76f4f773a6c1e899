// The bindings of kernels that read samples, compiled as one unit; see building.cpp.
#include "python/register_balance.cpp"
#include "python/register_batch.cpp"
#include "python/register_mapped_files.cpp"
#include "python/register_packing.cpp"
#include "python/register_receipt.cpp"
#include "python/register_spans.cpp"
// uses the tables of register_batch.cpp and register_spans.cpp
#include "python/register_rows.cpp"
