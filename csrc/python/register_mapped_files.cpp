// Files of a dataset mapped in one call: index arrays that a sidecar describes, and .bin/.idx pairs.
//
// Both functions return None for all that is not as expected: the caller then maps the files one by
// one in Python, which finds the reason and raises or warns.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megaindex/mapped_file.hpp"
#include "python/register.hpp"

namespace py = pybind11;

namespace megaindex::python {

namespace {

// Returns the path as the file system's bytes; empty for one that may be a URL or holds a zero byte.
std::string plain_path(py::handle path) {
  if (!PyUnicode_Check(path.ptr())) return {};
  const auto encoded = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(path.ptr()));
  if (!encoded) throw py::error_already_set();
  auto text = static_cast<std::string>(encoded);
  return text.find_first_of(std::string(":\0", 2)) == std::string::npos ? text : std::string();
}

// Returns an object that unmaps the file when the last array of it is deleted.
py::capsule owner_of(MappedFile&& file) {
  auto owned = std::make_unique<MappedFile>(std::move(file));
  py::capsule owner(owned.get(), [](void* mapping) { delete static_cast<MappedFile*>(mapping); });
  owned.release();
  return owner;
}

py::array read_only(const py::dtype& dtype, std::vector<py::ssize_t> shape, const void* data,
                    py::handle owner) {
  py::array array(dtype, std::move(shape), data, owner);
  py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

std::optional<py::dtype> array_dtype(py::handle name) {
  if (!PyUnicode_Check(name.ptr())) return std::nullopt;
  const auto is = [&](const char* text) {
    return PyUnicode_CompareWithASCIIString(name.ptr(), text) == 0;
  };
  if (is("int32")) return py::dtype::of<int32_t>();
  if (is("int64")) return py::dtype::of<int64_t>();
  if (is("uint32")) return py::dtype::of<uint32_t>();
  if (is("int16")) return py::dtype::of<int16_t>();
  if (is("uint8")) return py::dtype::of<uint8_t>();
  return std::nullopt;
}

// Reads a whole number from 0; returns -1 for anything else.
int64_t whole(py::handle value) {
  if (!PyLong_CheckExact(value.ptr())) return -1;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  return overflow != 0 || number < 0 ? -1 : number;
}

// An array as a sidecar describes it.
struct ArrayFile {
  std::string path;
  py::dtype dtype;
  std::vector<py::ssize_t> shape;
  int64_t offset;
  int64_t size;
  int64_t modified;
  int64_t inode;
  MappedFile file;
};

std::optional<ArrayFile> described(py::handle path, PyObject* record, PyObject* state) {
  if (record == nullptr || !PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != 3) return {};
  if (state == nullptr || !PyList_CheckExact(state) || PyList_GET_SIZE(state) != 3) return {};
  const auto dtype = array_dtype(PyTuple_GET_ITEM(record, 0));
  PyObject* sizes = PyTuple_GET_ITEM(record, 1);
  if (!dtype || !PyTuple_CheckExact(sizes)) return {};
  ArrayFile array{plain_path(path), *dtype, {}, whole(PyTuple_GET_ITEM(record, 2)),
                  whole(PyList_GET_ITEM(state, 0)), whole(PyList_GET_ITEM(state, 1)),
                  whole(PyList_GET_ITEM(state, 2)), {}};
  if (array.path.empty() || array.offset < 0 || array.size < array.offset) return {};
  int64_t left = array.size - array.offset;  // bytes of the elements
  if (left % dtype->itemsize() != 0) return {};
  left /= dtype->itemsize();
  int64_t elements = 1;
  for (py::ssize_t k = 0; k < PyTuple_GET_SIZE(sizes); ++k) {
    const int64_t size = whole(PyTuple_GET_ITEM(sizes, k));
    if (size <= 0 || size > left / elements) return {};  // empty arrays are left to Python
    elements *= size;
    array.shape.push_back(size);
  }
  if (elements != left) return {};
  return array;
}

py::object map_index_arrays(const py::dict& paths, const py::dict& records,
                            const py::dict& states) {
  std::vector<ArrayFile> files;
  files.reserve(paths.size());
  for (const auto& [name, path] : paths) {
    auto file = described(path, PyDict_GetItem(records.ptr(), name.ptr()),
                          PyDict_GetItem(states.ptr(), name.ptr()));
    if (!file) return py::none();
    files.push_back(std::move(*file));
  }
  bool are_recorded = true;
  {
    py::gil_scoped_release unlocked;
    for (ArrayFile& array : files) {
      are_recorded = are_recorded && array.file.map(OpenFile(array.path.c_str())) &&
                     array.file.size() == array.size && array.file.modified() == array.modified &&
                     array.file.inode() == static_cast<uint64_t>(array.inode);
    }
  }
  if (!are_recorded) return py::none();
  py::dict arrays;
  auto file = files.begin();
  for (const auto& [name, path] : paths) {
    const unsigned char* data = file->file.data() + file->offset;
    arrays[name] = read_only(file->dtype, std::move(file->shape), data,
                             owner_of(std::move(file->file)));
    ++file;
  }
  return arrays;
}

py::object map_pair_files(const py::str& bin_path, const py::str& idx_path,
                          const py::dict& dtypes) {
  const std::string bin_name = plain_path(bin_path), idx_name = plain_path(idx_path);
  if (bin_name.empty() || idx_name.empty()) return py::none();
  int64_t itemsizes[256] = {};
  for (const auto& [code, dtype] : dtypes) {
    itemsizes[code.cast<uint8_t>()] = dtype.cast<py::dtype>().itemsize();
  }
  MappedFile index, tokens;
  PairHeader header;
  bool is_sound = false;
  {
    py::gil_scoped_release unlocked;
    const OpenFile idx(idx_name.c_str());
    is_sound = index.map(idx) && read_pair_header(idx, index.size(), header) &&
               itemsizes[header.dtype_code] > 0 && tokens.map(OpenFile(bin_name.c_str())) &&
               ends_are_sound(idx, header, itemsizes[header.dtype_code], tokens.size());
  }
  if (!is_sound || tokens.size() == 0) return py::none();
  const auto n = header.num_sequences, m = header.num_bounds;
  const auto dtype = dtypes[py::int_(header.dtype_code)].cast<py::dtype>();
  const bool has_modes = index.size() > header.modes_offset();
  const unsigned char* entries = index.data();
  const unsigned char* first_token = tokens.data();
  const int64_t idx_nbytes = index.size(), bin_nbytes = tokens.size();
  const int64_t idx_modified = index.modified(), bin_modified = tokens.modified();
  const py::capsule idx_owner = owner_of(std::move(index));
  const auto view = [&](const py::dtype& type, int64_t count, int64_t offset) {
    return read_only(type, {count}, entries + offset, idx_owner);
  };
  const py::object modes = has_modes
                               ? py::object(view(py::dtype::of<int8_t>(), n, header.modes_offset()))
                               : py::object(py::none());
  return py::make_tuple(
      header.dtype_code, dtype, view(py::dtype::of<int32_t>(), n, PairHeader::kBytes),
      view(py::dtype::of<int64_t>(), n, header.pointers_offset()),
      view(py::dtype::of<int64_t>(), m, header.bounds_offset()), modes,
      read_only(dtype, {bin_nbytes / dtype.itemsize()}, first_token, owner_of(std::move(tokens))),
      idx_nbytes, bin_nbytes, idx_modified, bin_modified);
}

}  // namespace

void register_mapped_files(py::module_& m) {
  using namespace py::literals;
  m.def("map_index_arrays", &map_index_arrays, "paths"_a, "records"_a, "states"_a);
  m.def("map_pair_files", &map_pair_files, "bin_path"_a, "idx_path"_a, "dtypes"_a);
}

}  // namespace megaindex::python
