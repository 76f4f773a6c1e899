// The only file that knows Python: check the arguments, release the GIL, call a kernel.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "megaindex/bijection.hpp"
#include "megaindex/blended_spans.hpp"
#include "megaindex/blending.hpp"
#include "megaindex/divisor.hpp"
#include "megaindex/epoch.hpp"
#include "megaindex/epoch_spans.hpp"
#include "megaindex/gather.hpp"
#include "megaindex/layout.hpp"
#include "megaindex/least_seen.hpp"
#include "megaindex/invalid_input.hpp"
#include "megaindex/mapping.hpp"
#include "megaindex/masks.hpp"
#include "megaindex/mt19937.hpp"
#include "megaindex/packing.hpp"
#include "megaindex/receipt.hpp"
#include "megaindex/sample_index.hpp"
#include "megaindex/shuffle.hpp"
#include "megaindex/sort_by_sample.hpp"
#include "megaindex/spans.hpp"
#include "megaindex/windows.hpp"

namespace py = pybind11;
using namespace megaindex;

namespace megaindex::python {
void register_mapped_files(pybind11::module_& m);
}

namespace {

void require(bool fine, const std::string& rule) {
  if (!fine) throw InvalidInput(rule);
}

// Composes no text where all is fine: a batch passes dozens of checks, each message takes longer
// than its check.
void require(bool fine, const char* rule) {
  if (!fine) throw InvalidInput(rule);
}

void require(bool fine, const char* name, const char* rule) {
  if (!fine) throw InvalidInput(std::string(name) + rule);
}

std::string describe(const py::array& a) {
  return std::string(py::str(a.dtype())) + std::string(py::str(a.attr("shape")));
}

// A C-contiguous array of exactly this dtype: nothing is ever converted into a silent copy.
template <class T>
void check_array(const py::array& a, py::ssize_t ndim, const char* name) {
  // the message takes microseconds to write: only where it is needed
  if (!py::isinstance<py::array_t<T>>(a) || a.ndim() != ndim) {
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

template <class T>
const T* input(const py::array& a, const char* name, py::ssize_t ndim = 1) {
  check_array<T>(a, ndim, name);
  check_aligned<T>(a, name);
  return static_cast<const T*>(a.data());
}

template <class T>
T* output(py::array& a, const char* name, py::ssize_t ndim = 1) {
  check_array<T>(a, ndim, name);
  check_aligned<T>(a, name);
  require(a.writeable(), name, ": the array is read-only; pass one to write into");
  return static_cast<T*>(a.mutable_data());
}

template <class T>
const T* spans_array(const py::array& a, const char* name, int64_t size) {
  const T* data = input<T>(a, name);
  if (a.size() != size) {
    throw InvalidInput(std::string(name) + ": expected " + std::to_string(size) +
                       " entries, got " + describe(a));
  }
  return data;
}

// The addresses from the first byte of an array to behind its last.
std::pair<uintptr_t, uintptr_t> addresses(const py::array& a) {
  auto low = reinterpret_cast<uintptr_t>(a.data());
  if (a.size() == 0) return {low, low};
  uintptr_t high = low + static_cast<uintptr_t>(a.itemsize());
  for (py::ssize_t d = 0; d < a.ndim(); ++d) {
    const py::ssize_t reach = (a.shape(d) - 1) * a.strides(d);
    (reach < 0 ? low : high) += static_cast<uintptr_t>(reach);
  }
  return {low, high};
}

// Kernels check what they are given, then go by it while they write: into other memory. What is no
// array, such as None, is apart from everything.
void require_apart(const py::object& out, const char* name,
                   std::initializer_list<py::handle> others) {
  if (!py::isinstance<py::array>(out)) return;
  const auto [low, high] = addresses(py::reinterpret_borrow<py::array>(out));
  for (const py::handle other : others) {
    if (!py::isinstance<py::array>(other)) continue;
    const auto [begin, end] = addresses(py::reinterpret_borrow<py::array>(other));
    require(end <= low || high <= begin, name,
            ": shares memory with another argument; pass an array of its own");
  }
}

py::array as_numpy(const py::object& object) {
  require(py::isinstance<py::array>(object), "expected a numpy array or None");
  return py::reinterpret_borrow<py::array>(object);
}

template <class T>
bool is(const py::array& a) {
  return py::isinstance<py::array_t<T>>(a);
}

// Lets Ctrl-C through now and then; runs without the GIL.
struct Signals {
  void operator()() const {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
};

// ---- numpy's legacy stream -------------------------------------------------------------------

uint32_t* stream_state(py::array& state) {
  uint32_t* words = output<uint32_t>(state, "state");
  require(state.size() == Mt19937::kStateWords && words[Mt19937::kWords] <= Mt19937::kWords,
          "state: expected uint32[625], the last a position of at most 624; make it with seed_state");
  return words;
}

py::array_t<uint32_t> seed_state(int64_t seed) {
  require(seed >= 0 && seed <= 0xffffffffLL,
          "seed: must be from 0 to 2**32 - 1, got " + std::to_string(seed));
  py::array_t<uint32_t> state(Mt19937::kStateWords);
  Mt19937(static_cast<uint32_t>(seed)).save(state.mutable_data());
  return state;
}

// Runs body(rng) on the stream without the GIL and stores where the stream got to.
template <class Body>
void with_stream(py::array& state, Body&& body) {
  uint32_t* words = stream_state(state);
  py::gil_scoped_release unlocked;
  Mt19937 rng(words);
  body(rng);
  rng.save(words);
}

// Calls body with a pointer of the array's own integer type.
template <class Body>
void with_shuffle_array(py::array& a, const char* name, Body&& body) {
  if (is<int32_t>(a)) return body(output<int32_t>(a, name));
  if (is<uint32_t>(a)) return body(output<uint32_t>(a, name));
  body(output<int64_t>(a, name));
}

void shuffle_array(py::array& state, py::array& array, int num_threads) {
  require_apart(array, "array", {state});
  with_shuffle_array(array, "array", [&](auto* x) {
    const int64_t size = array.size();
    with_stream(state, [&](Mt19937& rng) { shuffle(rng, x, size, num_threads, Signals{}); });
  });
}

void fill_shuffled_range(py::array& state, int64_t first, py::array& out, int num_threads) {
  require_apart(out, "out", {state});
  with_shuffle_array(out, "out", [&](auto* x) {
    const int64_t size = out.size();
    with_stream(state, [&](Mt19937& rng) {
      shuffled_range(rng, first, size, x, num_threads, Signals{});
    });
  });
}

void fill_shuffled_documents(py::array& state, const py::object& documents, int64_t first_document,
                             int64_t num_epochs, py::array& out, int num_threads) {
  int32_t* x = output<int32_t>(out, "out");
  require_apart(out, "out", {state, documents});
  require(num_epochs >= 1 && out.size() % num_epochs == 0,
          "out: must hold num_epochs equal rows, got " + std::to_string(out.size()) + " cells for " +
              std::to_string(num_epochs) + " epochs");
  const int64_t count = out.size() / num_epochs;
  const int32_t* ids = nullptr;
  if (documents.is_none()) {
    require(first_document >= 0 && first_document + count <= 0x80000000LL,
            "first_document: sequence ids must be from 0 to 2**31 - 1");
  } else {
    const auto array = as_numpy(documents);
    ids = input<int32_t>(array, "documents");
    require(array.size() == count, "documents: must be as many as a row of out holds");
  }
  const auto first = static_cast<int32_t>(first_document);
  with_stream(state, [&](Mt19937& rng) {
    shuffled_documents(rng, ids, first, count, num_epochs, x, num_threads, Signals{});
  });
}

py::array_t<uint64_t> positions(py::array& state, int64_t first, int64_t count) {
  require(count >= 0 && count <= first, "count: must be from 0 to first");
  py::array_t<uint64_t> drawn(count);
  uint64_t* out = drawn.mutable_data();
  with_stream(state, [&](Mt19937& rng) {
    constexpr int64_t kBlock = 1 << 20;  // between two looks for signals
    for (int64_t done = 0; done < count; done += kBlock) {
      const int64_t size = std::min(kBlock, count - done);
      rng.draw_positions(static_cast<uint64_t>(first - done), size, out + done);
      Signals{}();
    }
  });
  return drawn;
}

// ---- runs of tokens --------------------------------------------------------------------------

// An array that takes the column over and gives it back in the end.
py::array_t<int64_t> as_array(Runs::Column column, int64_t size) {
  int64_t* data = column.get();
  const py::capsule owner(data, [](void* memory) {
    Runs::GiveBack()(static_cast<int64_t*>(memory));
  });
  column.release();
  return py::array_t<int64_t>(size, data, owner);
}

// Calls find(runs, row_splits) without the GIL; (document, offset, length, row_splits).
template <class Find>
py::tuple found_runs(int64_t requests, Find&& find) {
  py::array_t<int64_t> row_splits(requests + 1);
  int64_t* splits = row_splits.mutable_data();
  Runs runs(2 * requests + 16);  // most samples lie in few documents
  {
    py::gil_scoped_release unlocked;
    find(runs, splits);
  }
  const int64_t size = runs.size();
  return py::make_tuple(as_array(std::move(runs.documents), size),
                        as_array(std::move(runs.offsets), size),
                        as_array(std::move(runs.lengths), size), row_splits);
}

template <class Shuffle, class Cell>
IndexArrays<Shuffle, Cell> index_arrays(const py::array& shuffle_index,
                                        const py::array& sample_index,
                                        const py::array& document_index, const py::array& lengths,
                                        int64_t extra) {
  check_array<int32_t>(lengths, 1, "lengths");
  const auto* bytes = static_cast<const unsigned char*>(lengths.data());
  const IndexArrays<Shuffle, Cell> index{input<Shuffle>(shuffle_index, "shuffle_index"),
                                         shuffle_index.size(),
                                         input<Cell>(sample_index, "sample_index", 2),
                                         sample_index.shape(0),
                                         input<int32_t>(document_index, "document_index"),
                                         document_index.size(),
                                         {bytes, lengths.size()},
                                         extra};
  require(sample_index.shape(1) == 2, "sample_index: expected rows of position and offset");
  require(lengths.size() >= 1 && (extra == 0 || extra == 1),
          "lengths, extra: need at least one sequence, and 0 or 1");
  return index;
}

template <class Shuffle, class Cell>
py::tuple runs_of_arrays(const py::array& shuffle_index, const py::array& sample_index,
                         const py::array& document_index, const py::array& lengths, int64_t extra,
                         const py::array& sample_ids) {
  const auto index = index_arrays<Shuffle, Cell>(shuffle_index, sample_index, document_index,
                                                 lengths, extra);
  const int64_t* ids = input<int64_t>(sample_ids, "sample_ids");
  const int64_t n = sample_ids.size();
  return found_runs(n, [&](Runs& runs, int64_t* splits) {
    array_spans(index, ids, n, runs, splits);
  });
}

py::tuple find_array_spans(const py::array& shuffle_index, const py::array& sample_index,
                           const py::array& document_index, const py::array& lengths, int64_t extra,
                           const py::array& sample_ids) {
  const auto run = [&](auto find) {
    return find(shuffle_index, sample_index, document_index, lengths, extra, sample_ids);
  };
  if (is<uint32_t>(shuffle_index)) {
    return is<int32_t>(sample_index) ? run(runs_of_arrays<uint32_t, int32_t>)
                                     : run(runs_of_arrays<uint32_t, int64_t>);
  }
  return is<int32_t>(sample_index) ? run(runs_of_arrays<int64_t, int32_t>)
                                   : run(runs_of_arrays<int64_t, int64_t>);
}

void fill_sorted(const py::array& shuffle_index, int64_t samples, int64_t begin, py::array& out) {
  const auto* shuffle = input<uint32_t>(shuffle_index, "shuffle_index");
  auto* entries = output<uint64_t>(out, "out");
  require_apart(out, "out", {shuffle_index});
  const int64_t n = out.size();
  require(0 <= begin && begin <= shuffle_index.size() && n <= shuffle_index.size() - begin &&
              n < UINT32_MAX,
          "begin, out: must lie in shuffle_index, fewer than 2**32 - 1 entries");
  require(0 <= samples && samples <= int64_t{1} << 32, "samples: must be 0 to 2**32");
  py::gil_scoped_release unlocked;
  sort_by_sample(shuffle, samples, begin, n, entries);
}

// The arrays of every source of a blend, kept alive.
struct SpanTable {
  std::vector<AnyIndexArrays> indices;
  py::list owners;
};

SpanTable span_table(const py::sequence& indices) {
  using Arrays = std::tuple<py::array, py::array, py::array, py::array, int64_t>;
  SpanTable table;
  for (const auto& item : indices) {
    const auto [shuffle, samples, documents, lengths, extra] = py::cast<Arrays>(item);
    if (is<uint32_t>(shuffle) && is<int32_t>(samples)) {
      table.indices.emplace_back(
          index_arrays<uint32_t, int32_t>(shuffle, samples, documents, lengths, extra));
    } else if (is<uint32_t>(shuffle)) {
      table.indices.emplace_back(
          index_arrays<uint32_t, int64_t>(shuffle, samples, documents, lengths, extra));
    } else if (is<int32_t>(samples)) {
      table.indices.emplace_back(
          index_arrays<int64_t, int32_t>(shuffle, samples, documents, lengths, extra));
    } else {
      table.indices.emplace_back(
          index_arrays<int64_t, int64_t>(shuffle, samples, documents, lengths, extra));
    }
    table.owners.append(py::make_tuple(shuffle, samples, documents, lengths));
  }
  return table;
}

py::tuple find_blended_spans(const SpanTable& table, const py::array& which,
                             const py::array& samples) {
  const int64_t n = which.size();
  const auto* sources = spans_array<int64_t>(which, "which", n);
  const auto* ids = spans_array<int64_t>(samples, "samples", n);
  std::vector<int32_t> source;
  const py::tuple runs = found_runs(n, [&](Runs& found, int64_t* splits) {
    blended_spans(table.indices, sources, ids, n, found, source, splits);
  });
  const auto count = static_cast<py::ssize_t>(source.size());
  return py::make_tuple(py::array_t<int32_t>(count, source.data()), runs[0], runs[1], runs[2],
                        runs[3]);
}

Sequences sequences_of(const py::array& pointers, const py::array& lengths, int64_t item_size,
                       int64_t first, int64_t stop) {
  check_array<int64_t>(pointers, 1, "pointers");
  check_array<int32_t>(lengths, 1, "lengths");
  require(pointers.size() == lengths.size() && 0 <= first && first <= stop &&
              stop <= lengths.size(),
          "first, stop: must name sequences that have a pointer and a length");
  const int bits = item_size == 1 ? 0 : item_size == 2 ? 1 : item_size == 4 ? 2 : 3;
  require(item_size == 1 << bits, "item_size: must be 1, 2, 4 or 8 bytes");
  return {static_cast<const unsigned char*>(pointers.data()),
          {static_cast<const unsigned char*>(lengths.data()), lengths.size()},
          first,
          stop,
          bits};
}

int64_t count_tokens_within(const py::array& pointers, const py::array& lengths, int64_t item_size,
                            int64_t nbytes) {
  const auto sequences = sequences_of(pointers, lengths, item_size, 0, lengths.size());
  require(nbytes >= 0, "nbytes: must not be negative");
  py::gil_scoped_release unlocked;
  return tokens_within(sequences, nbytes);
}

py::tuple find_window_spans(const py::array& pointers, const py::array& lengths, int64_t item_size,
                            int64_t first, int64_t stop, const py::array& begins,
                            const py::array& ends) {
  const auto sequences = sequences_of(pointers, lengths, item_size, first, stop);
  require(first < stop, "first, stop: must name sequences that have a pointer and a length");
  const auto* from = input<int64_t>(begins, "begins");
  const auto* to = input<int64_t>(ends, "ends");
  const int64_t n = begins.size();
  require(ends.size() == n, "begins, ends: must be as many");
  bool inside = true;
  for (int64_t k = 0; k < n; ++k) {
    inside &= 0 <= from[k] && from[k] < to[k] && to[k] <= INT64_MAX >> 4;
  }
  require(inside, "begins, ends: must be 0 <= begin < end < 2**59");
  return found_runs(n, [&](Runs& runs, int64_t* splits) {
    window_spans(sequences, from, to, n, runs, splits);
  });
}

// ---- sample_index ----------------------------------------------------------------------------

void cut(const py::array& lengths, const py::array& document_index, int64_t sequence_length,
         int64_t extra, int64_t num_samples, int64_t total_tokens, py::array& out,
         int num_threads) {
  check_array<int32_t>(lengths, 1, "lengths");
  const auto* sizes = static_cast<const unsigned char*>(lengths.data());
  const auto* documents = input<int32_t>(document_index, "document_index");
  const SampleGeometry g{sequence_length, extra, num_samples, total_tokens};
  require(sequence_length >= 1 && (extra == 0 || extra == 1) && num_samples >= 0 &&
              total_tokens >= 0 && num_samples <= total_tokens / sequence_length + 1,
          "sequence_length must be >= 1, extra 0 or 1, num_samples what total_tokens allow");
  require(document_index.size() > 0, "document_index: is empty");
  if (out.ndim() != 2 || out.shape(0) != num_samples + 1 || out.shape(1) != 2) {
    throw InvalidInput("out: expected shape (num_samples + 1, 2), got " + describe(out));
  }
  require_apart(out, "out", {lengths, document_index});
  const int64_t n = lengths.size(), m = document_index.size();
  // numpy's allocator puts large arrays on huge pages
  const bool compact = short_lengths_pay(n, m, num_samples);
  py::array_t<uint16_t> room(compact ? n : 0);
  uint16_t* short_lengths = compact ? room.mutable_data() : nullptr;
  auto run = [&](auto* rows) {
    py::gil_scoped_release unlocked;
    cut_samples(sizes, n, documents, m, g, num_threads, short_lengths, rows, Signals{});
  };
  if (is<int32_t>(out)) return run(output<int32_t>(out, "out", 2));
  run(output<int64_t>(out, "out", 2));
}

// ---- keyed bijections and passes -------------------------------------------------------------

const uint64_t* bijection_key(const py::array& key, int64_t n) {
  const auto* words = input<uint64_t>(key, "key");
  require(key.size() == 2, "key: expected uint64[2]");
  require(0 <= n && n <= kBijectionMost, "n: must be from 0 to 2**62, got " + std::to_string(n));
  return words;
}

// Calls map(bijection, x) for every x of an int64 or uint64 array.
template <class Map>
py::array_t<int64_t> bijected(const py::array& key, int64_t n, const py::array& given, Map&& map) {
  const auto* words = bijection_key(key, n);
  const bool wide = is<uint64_t>(given);
  const auto* x = wide ? input<uint64_t>(given, "indices")
                       : reinterpret_cast<const uint64_t*>(input<int64_t>(given, "indices"));
  const int64_t count = given.size();
  py::array_t<int64_t> result(count);
  int64_t* out = result.mutable_data();
  bool inside = true;
  {
    py::gil_scoped_release unlocked;
    const Bijection bijection(words, n);
    for (int64_t k = 0; k < count && inside; ++k) {
      inside = x[k] < static_cast<uint64_t>(n);  // a negative one is very high
      if (inside) out[k] = map(bijection, static_cast<int64_t>(x[k]));
    }
  }
  require(inside, "indices: must be from 0 to n - 1, n is " + std::to_string(n));
  return result;
}

py::array_t<int64_t> apply_bijection(const py::array& key, int64_t n, const py::array& indices) {
  return bijected(key, n, indices, [](const Bijection& b, int64_t x) { return b.at(x); });
}

py::array_t<int64_t> invert_bijection(const py::array& key, int64_t n, const py::array& values) {
  return bijected(key, n, values, [](const Bijection& b, int64_t x) { return b.invert(x); });
}

template <bool kBack>
void fill_bijection_range(const py::array& key, int64_t n, int64_t begin, py::array& out) {
  const auto* words = bijection_key(key, n);
  require_apart(out, "out", {key});
  const int64_t count = out.size();
  require(0 <= begin && begin <= n && count <= n - begin,
          "begin, out: begin ... begin + len(out) must lie in 0 ... n");
  const auto run = [&](auto* x) {
    py::gil_scoped_release unlocked;
    const Bijection bijection(words, n);
    if (kBack) {
      bijection.inverse_range(begin, count, x);
    } else {
      bijection.range(begin, count, x);
    }
  };
  if (!is<int32_t>(out)) return run(output<int64_t>(out, "out"));
  require(n <= int64_t{1} << 31, "out: int32 holds values below 2**31, use int64");
  run(output<int32_t>(out, "out"));
}

PermutedDocuments permuted_documents(const py::array& key, const py::array& lengths, int64_t copies,
                                     int64_t stride) {
  check_array<int32_t>(lengths, 1, "lengths");
  require(lengths.size() >= 1 && 1 <= copies && copies <= kBijectionMost / lengths.size(),
          "lengths, copies: need at least one document, and at most 2**62 positions");
  require(1 <= stride && stride <= 1 << 20, "stride: must be from 1 to 2**20");
  const auto* words = bijection_key(key, copies * lengths.size());
  const auto* bytes = static_cast<const unsigned char*>(lengths.data());
  return {detail::FileLengths{bytes, lengths.size()}, copies, words};
}

void check_starts(const py::array& starts, const PermutedDocuments& documents, int64_t stride) {
  const int64_t entries = (documents.size() + stride - 1) / stride + 1;
  require(starts.size() == entries, "starts: must hold " + std::to_string(entries) + " entries");
}

void fill_epoch_starts(const py::array& key, const py::array& lengths, int64_t copies,
                       int64_t stride, py::array& out, int num_threads) {
  const auto documents = permuted_documents(key, lengths, copies, stride);
  int64_t* starts = output<int64_t>(out, "out");
  require_apart(out, "out", {key, lengths});
  check_starts(out, documents, stride);
  py::gil_scoped_release unlocked;
  epoch_starts(documents, stride, num_threads, starts, Signals{});
}

py::tuple find_epoch_spans(const py::array& key, const py::array& lengths, int64_t copies,
                           int64_t stride, const py::array& starts, const py::array& begins,
                           const py::array& ends) {
  const auto documents = permuted_documents(key, lengths, copies, stride);
  const auto* table = input<int64_t>(starts, "starts");
  check_starts(starts, documents, stride);
  const auto* first = input<int64_t>(begins, "begins");
  const auto* last = input<int64_t>(ends, "ends");
  const int64_t rows = starts.size(), requests = begins.size();
  require(ends.size() == requests, "begins, ends: must be as many");
  bool inside = true;
  for (int64_t k = 0; k < requests; ++k) {
    inside &= table[0] <= first[k] && first[k] < last[k] && last[k] <= table[rows - 1];
  }
  require(inside, "begins, ends: must be 0 <= begin < end <= tokens of the pass");
  return found_runs(requests, [&](Runs& runs, int64_t* splits) {
    epoch_spans(documents, stride, table, first, last, requests, runs, splits);
  });
}

// ---- receipts --------------------------------------------------------------------------------

void add_receipts(const py::array& positions, const py::array& source, const py::array& document,
                  const py::array& offset, const py::array& length, const py::array& row_splits,
                  const py::array& keys, const py::array& blocks, py::array& sums) {
  const int64_t n = positions.size(), runs = document.size();
  const int64_t* at = input<int64_t>(positions, "positions");
  const ReceiptSpans spans{spans_array<int32_t>(source, "source", runs),
                           spans_array<int64_t>(document, "document", runs),
                           spans_array<int64_t>(offset, "offset", runs),
                           spans_array<int64_t>(length, "length", runs),
                           spans_array<int64_t>(row_splits, "row_splits", n + 1)};
  const uint64_t* words = input<uint64_t>(keys, "keys", 2);
  uint64_t* sum = output<uint64_t>(sums, "sums", 2);
  require_apart(sums, "sums",
                {positions, source, document, offset, length, row_splits, keys, blocks});
  const int64_t* block = spans_array<int64_t>(blocks, "blocks", n);
  const int64_t num_blocks = sums.shape(0), sources = keys.shape(0);
  require(keys.shape(1) == 2 && sums.shape(1) == 2,
          "keys, sums: expected two words for each source and each block");
  py::gil_scoped_release unlocked;
  // The sign bit tells: a vector of additions, where comparisons of 64 bits are slow.
  uint64_t outside = 0;
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t end = word(spans.row_splits[k + 1]);
    outside |= end | (end - word(spans.row_splits[k]));
    outside |= word(block[k]) | (word(num_blocks - 1) - word(block[k]));
  }
  int32_t least = 0, most = 0;
  for (int64_t k = 0; k < runs; ++k) {
    least = std::min(least, spans.source[k]);
    most = std::max(most, spans.source[k]);
  }
  const bool inside = spans.row_splits[0] == 0 && spans.row_splits[n] == runs &&
                      (outside >> 63) == 0 && least == 0 && (runs == 0 || most < sources);
  require(inside, "row_splits, source, blocks: must lie inside the runs, keys and sums");
  receipt_add(at, n, spans, words, block, sum);
}

// ---- packing ---------------------------------------------------------------------------------

py::tuple pack_whole_documents(const py::array& lengths, int64_t capacity, int64_t tokens,
                               py::array& begins) {
  const int32_t* sizes = input<int32_t>(lengths, "lengths");
  int64_t* out = output<int64_t>(begins, "begins");
  require_apart(begins, "begins", {lengths});
  const int64_t documents = lengths.size(), most = begins.size();
  require(capacity >= 1 && tokens >= 0, "capacity, tokens: must be positive, and not negative");
  Packed packed{};
  {
    py::gil_scoped_release unlocked;
    packed = pack_documents(sizes, documents, capacity, tokens, most, out, Signals{});
  }
  return py::make_tuple(packed.samples, packed.tokens);
}

// ---- batches ---------------------------------------------------------------------------------

// Tokens, pointers and lengths of every source, with the arrays they lie in.
struct TokenTable {
  std::vector<TokenSource> sources;
  py::list owners;
};

template <class T>
TokenSource token_source(const py::array& tokens, TokenType type, int itemsize_log2) {
  const auto* data = reinterpret_cast<const unsigned char*>(input<T>(tokens, "tokens"));
  return {data, tokens.nbytes(), type, itemsize_log2, nullptr, nullptr, 0};
}

TokenSource token_source(const py::array& tokens) {
  if (is<uint8_t>(tokens)) return token_source<uint8_t>(tokens, TokenType::kU8, 0);
  if (is<int8_t>(tokens)) return token_source<int8_t>(tokens, TokenType::kI8, 0);
  if (is<uint16_t>(tokens)) return token_source<uint16_t>(tokens, TokenType::kU16, 1);
  if (is<int16_t>(tokens)) return token_source<int16_t>(tokens, TokenType::kI16, 1);
  if (is<uint32_t>(tokens)) return token_source<uint32_t>(tokens, TokenType::kU32, 2);
  if (is<int32_t>(tokens)) return token_source<int32_t>(tokens, TokenType::kI32, 2);
  if (is<uint64_t>(tokens)) return token_source<uint64_t>(tokens, TokenType::kU64, 3);
  if (is<float>(tokens)) return token_source<float>(tokens, TokenType::kF32, 2);
  if (is<double>(tokens)) return token_source<double>(tokens, TokenType::kF64, 3);
  return token_source<int64_t>(tokens, TokenType::kI64, 3);
}

TokenTable token_table(const py::sequence& sources) {
  TokenTable table;
  for (const auto& item : sources) {
    const auto [tokens, pointers, lengths] =
        py::cast<std::tuple<py::array, py::array, py::array>>(item);
    check_array<int64_t>(pointers, 1, "pointers");
    check_array<int32_t>(lengths, 1, "lengths");
    require(pointers.size() == lengths.size(), "pointers, lengths: must be as many");
    TokenSource source = token_source(tokens);
    source.pointers = static_cast<const unsigned char*>(pointers.data());
    source.lengths = static_cast<const unsigned char*>(lengths.data());
    source.sequences = lengths.size();
    table.sources.push_back(source);
    table.owners.append(py::make_tuple(tokens, pointers, lengths));
  }
  return table;
}

// Rows of a two-dimensional array, which may lie apart; the cells of one do not.
template <class T>
Rows<T> rows_of(py::array& a, const char* name, int64_t rows, int64_t width) {
  // the message takes microseconds to write: only where it is needed
  if (!is<T>(a) || a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != width) {
    throw InvalidInput(std::string(name) + ": expected " +
                       std::string(py::str(py::dtype::of<T>())) + "(" + std::to_string(rows) +
                       ", " + std::to_string(width) + "), got " + describe(a));
  }
  constexpr auto kSize = static_cast<py::ssize_t>(sizeof(T));
  const bool side_by_side = width <= 1 || a.strides(1) == kSize || rows == 0;
  require(side_by_side && a.strides(0) % kSize == 0, name,
          ": the cells of a row must lie side by side; use a copy");
  check_aligned<T>(a, name);
  require(a.writeable(), name, ": the array is read-only; pass one to write into");
  return {static_cast<T*>(a.mutable_data()), a.strides(0) / kSize};
}

template <class T>
Rows<T> optional_rows(const py::object& object, const char* name, int64_t rows, int64_t width) {
  if (object.is_none()) return {nullptr, 0};
  auto array = as_numpy(object);
  return rows_of<T>(array, name, rows, width);
}

void check_splits(const int64_t* row_splits, int64_t rows, int64_t runs) {
  bool inside = row_splits[0] == 0 && row_splits[rows] == runs;
  for (int64_t k = 0; k < rows; ++k) inside &= row_splits[k] <= row_splits[k + 1];
  require(inside, "row_splits: must rise from 0 to the number of runs");
}

template <class Out>
int64_t gather_into(const TokenTable& table, const TokenRuns& runs, py::array& out,
                    const py::object& labels, int64_t pad_id, int num_threads) {
  for (const TokenSource& source : table.sources) {
    require(copier<Out>(source.type) != nullptr,
            "out: its dtype does not hold every token of a source; use int64");
  }
  require(std::is_floating_point_v<Out> || pad_id == static_cast<int64_t>(static_cast<Out>(pad_id)),
          "pad_id: does not fit the dtype of out");
  require(out.ndim() == 2, "out: expected a two-dimensional array");
  const int64_t width = out.shape(1);
  const auto tokens = rows_of<Out>(out, "out", runs.rows, width);
  const auto shifted = optional_rows<Out>(labels, "labels", runs.rows, width);
  py::gil_scoped_release unlocked;
  return gather(table.sources, runs, width, static_cast<Out>(pad_id), num_threads, tokens, shifted);
}

int64_t gather_tokens(const TokenTable& table, const py::array& source, const py::array& document,
                      const py::array& offset, const py::array& length, const py::array& row_splits,
                      py::array& out, const py::object& labels, int64_t pad_id, int num_threads) {
  const int64_t count = document.size(), rows = row_splits.size() - 1;
  const TokenRuns runs{spans_array<int32_t>(source, "source", count),
                       spans_array<int64_t>(document, "document", count),
                       spans_array<int64_t>(offset, "offset", count),
                       spans_array<int64_t>(length, "length", count),
                       input<int64_t>(row_splits, "row_splits"),
                       rows};
  require(rows >= 0, "row_splits: needs at least one entry");
  check_splits(runs.row_splits, rows, count);
  require_apart(out, "out", {source, document, offset, length, row_splits});
  require_apart(labels, "labels", {source, document, offset, length, row_splits});
  if (is<int32_t>(out)) return gather_into<int32_t>(table, runs, out, labels, pad_id, num_threads);
  if (is<float>(out)) return gather_into<float>(table, runs, out, labels, pad_id, num_threads);
  return gather_into<int64_t>(table, runs, out, labels, pad_id, num_threads);
}

// Calls body(Token{}) with the type of the array's cells.
template <class Body>
void with_tokens(const py::array& tokens, Body&& body) {
  require(tokens.ndim() == 2, "tokens: expected a two-dimensional array");
  if (is<int32_t>(tokens)) return body(int32_t{});
  body(int64_t{});
}

void mask_batch_loss(py::array& tokens, py::array& labels, int64_t pad_id, const py::object& eod_id,
                     py::array& loss_mask) {
  with_tokens(tokens, [&](auto zero) {
    using Token = decltype(zero);
    const int64_t rows = tokens.shape(0), width = tokens.shape(1);
    const MaskIds ids{pad_id, !eod_id.is_none(), eod_id.is_none() ? 0 : py::cast<int64_t>(eod_id)};
    for (const int64_t id : {ids.pad, ids.end}) {
      require(id == static_cast<Token>(id), "pad_id, eod_id: must fit the dtype of tokens");
    }
    const auto read = rows_of<Token>(tokens, "tokens", rows, width);
    const auto wanted = rows_of<Token>(labels, "labels", rows, width);
    const auto counted = rows_of<float>(loss_mask, "loss_mask", rows, width);
    py::gil_scoped_release unlocked;
    mask_loss(ids, rows, width, read, wanted, counted);
  });
}

DocumentFields document_fields(const py::object& position_ids, const py::object& cu_seqlens,
                               const py::object& max_seqlen, int64_t rows, int64_t width,
                               std::initializer_list<py::handle> inputs) {
  require(width <= INT32_MAX, "cu_seqlens: int32 counts at most 2**31 - 1 tokens");
  DocumentFields fields{optional_rows<int64_t>(position_ids, "position_ids", rows, width),
                        optional_rows<int32_t>(cu_seqlens, "cu_seqlens", rows, width + 1), nullptr};
  if (!max_seqlen.is_none()) {
    auto longest = as_numpy(max_seqlen);
    fields.max_seqlen = output<int32_t>(longest, "max_seqlen");
    require(longest.size() == rows, "max_seqlen: one for each row is needed");
  }
  require_apart(position_ids, "position_ids", inputs);
  require_apart(cu_seqlens, "cu_seqlens", inputs);
  require_apart(max_seqlen, "max_seqlen", inputs);
  return fields;
}

void split_by_token(py::array& tokens, int64_t eod_id, const py::object& position_ids,
                    const py::object& cu_seqlens, const py::object& max_seqlen) {
  with_tokens(tokens, [&](auto zero) {
    using Token = decltype(zero);
    const int64_t rows = tokens.shape(0), width = tokens.shape(1);
    require(eod_id == static_cast<Token>(eod_id), "eod_id: must fit the dtype of tokens");
    const auto text = rows_of<Token>(tokens, "tokens", rows, width);
    const auto fields = document_fields(position_ids, cu_seqlens, max_seqlen, rows, width, {tokens});
    py::gil_scoped_release unlocked;
    documents_by_token<Token>(rows, width, {text.data, text.stride}, eod_id, fields);
  });
}

void split_by_run(const py::array& length, const py::array& row_splits, int64_t width,
                  const py::object& position_ids, const py::object& cu_seqlens,
                  const py::object& max_seqlen) {
  const auto* lengths = input<int64_t>(length, "length");
  const auto* splits = input<int64_t>(row_splits, "row_splits");
  const int64_t runs = length.size(), rows = row_splits.size() - 1;
  require(rows >= 0 && width >= 0, "row_splits, width: needs one entry more than rows, and cells");
  check_splits(splits, rows, runs);
  for (int64_t r = 0; r < runs; ++r) {
    require(0 <= lengths[r] && lengths[r] <= int64_t{1} << 40, "length: must be 0 to 2**40");
  }
  const auto fields =
      document_fields(position_ids, cu_seqlens, max_seqlen, rows, width, {length, row_splits});
  py::gil_scoped_release unlocked;
  documents_by_run(lengths, splits, rows, width, fields);
}

// ---- extension -------------------------------------------------------------------------------

py::array_t<int64_t> least_seen_order(const py::array& begins, const py::array& ends,
                                      const py::array& row_splits, const py::array& widths,
                                      py::array& counts, int64_t num_samples) {
  const int64_t runs = begins.size(), segments = widths.size(), samples = row_splits.size() - 1;
  const SegmentRuns covered{spans_array<int64_t>(begins, "begins", runs),
                            spans_array<int64_t>(ends, "ends", runs),
                            input<int64_t>(row_splits, "row_splits"), samples};
  const int64_t* tokens = input<int64_t>(widths, "widths");
  int64_t* seen = output<int64_t>(counts, "counts");
  require_apart(counts, "counts", {begins, ends, row_splits, widths});
  require(counts.size() == segments, "counts: one for each segment is needed");
  require(0 <= num_samples && num_samples <= samples,
          "num_samples: must be from 0 to the samples there are");
  bool inside = covered.row_splits[0] == 0 && covered.row_splits[samples] == runs;
  for (int64_t k = 0; k < samples; ++k) {
    inside &= covered.row_splits[k] <= covered.row_splits[k + 1];
  }
  for (int64_t r = 0; r < runs; ++r) {
    inside &= 0 <= covered.begins[r] && covered.begins[r] <= covered.ends[r] &&
              covered.ends[r] <= segments;
  }
  require(inside, "begins, ends, row_splits: must lie inside the segments and runs");
  py::array_t<int64_t> order(num_samples);
  int64_t* out = order.mutable_data();
  {
    py::gil_scoped_release unlocked;
    least_seen(covered, tokens, seen, num_samples, out, Signals{});
  }
  return order;
}

// ---- blending --------------------------------------------------------------------------------

// The arrays of one stretch [begin, end) of a blend; either output may be None.
struct BlendOutputs {
  int64_t* counts;
  void* dataset_index = nullptr;
  bool wide_index = true;  // int16, else GPT-NeoX's uint8
  int64_t* dataset_sample_index = nullptr;

  BlendOutputs(const py::array& weights, int64_t begin, int64_t end, py::array& counts_,
               const py::object& index, const py::object& sample_index)
      : counts(output<int64_t>(counts_, "counts")) {
    require_apart(counts_, "counts", {weights});
    require_apart(index, "dataset_index", {weights, counts_});
    require_apart(sample_index, "dataset_sample_index", {weights, counts_, index});
    const int64_t num_datasets = weights.size();
    require(counts_.size() == num_datasets && num_datasets >= 1,
            "counts: one per dataset is needed, and at least one dataset");
    require(0 <= begin && begin <= end, "begin, end: must be 0 <= begin <= end");
    if (!index.is_none()) {
      auto array = as_numpy(index);
      check_length(array, end - begin, "dataset_index");
      wide_index = !is<uint8_t>(array);
      dataset_index = wide_index ? static_cast<void*>(output<int16_t>(array, "dataset_index"))
                                 : output<uint8_t>(array, "dataset_index");
      require(num_datasets <= (wide_index ? 32767 : 255),
              "dataset_index: its dtype has no room for this many datasets");
    }
    if (!sample_index.is_none()) {
      auto array = as_numpy(sample_index);
      check_length(array, end - begin, "dataset_sample_index");
      dataset_sample_index = output<int64_t>(array, "dataset_sample_index");
    }
  }

  // Calls body(index pointer of its own type) without the GIL.
  template <class Body>
  void fill(Body&& body) const {
    py::gil_scoped_release unlocked;
    if (wide_index) {
      body(static_cast<int16_t*>(dataset_index));
    } else {
      body(static_cast<uint8_t*>(dataset_index));
    }
  }

 private:
  static void check_length(const py::array& a, int64_t length, const char* name) {
    require(a.size() == length, std::string(name) + ": must hold end - begin = " +
                                    std::to_string(length) + " entries, got " + describe(a));
  }
};

// The kernel looks for the largest product of a weight: one that is not a number has none.
const double* blend_weights(const py::array& weights) {
  const double* w = input<double>(weights, "weights");
  for (int64_t i = 0; i < weights.size(); ++i) {
    require(std::isfinite(w[i]) && w[i] >= 0, "weights: must be finite and >= 0");
  }
  return w;
}

void greedy(const py::array& weights, int64_t begin, int64_t end, py::array& counts,
            const py::object& dataset_index, const py::object& dataset_sample_index) {
  const double* w = blend_weights(weights);
  const int64_t n = weights.size();
  const BlendOutputs out(weights, begin, end, counts, dataset_index, dataset_sample_index);
  out.fill([&](auto* index) {
    blend_greedy(w, n, begin, end, out.counts, index, out.dataset_sample_index, Signals{});
  });
}

void exhaustive(const py::array& sizes, int64_t begin, int64_t end, py::array& counts,
                const py::object& dataset_index, const py::object& dataset_sample_index) {
  const int64_t* s = input<int64_t>(sizes, "sizes");
  const int64_t n = sizes.size();
  const BlendOutputs out(sizes, begin, end, counts, dataset_index, dataset_sample_index);
  int64_t total = 0, drawn = 0;
  for (int64_t i = 0; i < n; ++i) {
    require(0 <= out.counts[i] && out.counts[i] <= s[i] && s[i] <= INT64_MAX - total,
            "sizes, counts: must be 0 <= counts <= sizes, and their sum below 2**63");
    total += s[i];
    drawn += out.counts[i];
  }
  require(drawn == begin && end <= total, "begin, end: begin must be the sum of counts and end at "
                                          "most the sum of sizes");
  out.fill([&](auto* index) {
    blend_exhaustive(s, n, begin, end, out.counts, index, out.dataset_sample_index, Signals{});
  });
}

py::array_t<int64_t> checkpoints(const py::array& weights, int64_t size, int64_t stride) {
  const double* w = blend_weights(weights);
  const int64_t n = weights.size();
  require(n >= 1, "weights: need at least one dataset");
  require(size >= 0 && stride >= 1 && size / stride < int64_t{1} << 40,
          "size, stride: must be size >= 0, stride >= 1 and at most 2**40 rows");
  py::array_t<int64_t> rows(py::array::ShapeContainer{size / stride + 1, n});
  int64_t* out = rows.mutable_data();
  {
    py::gil_scoped_release unlocked;
    blend_checkpoints(w, n, size, stride, out, Signals{});
  }
  return rows;
}

void divisor(const py::array& weights, int64_t begin, int64_t end, py::array& counts,
             const py::object& dataset_index, const py::object& dataset_sample_index) {
  const uint64_t* w = input<uint64_t>(weights, "weights");
  const int64_t n = weights.size();
  const BlendOutputs out(weights, begin, end, counts, dataset_index, dataset_sample_index);
  out.fill([&](auto* index) {
    divisor_fill(w, n, begin, end, out.counts, index, out.dataset_sample_index, Signals{});
  });
}

py::array_t<int64_t> divisor_counts_at(const py::array& weights, int64_t position) {
  const uint64_t* w = input<uint64_t>(weights, "weights");
  require(position >= 0, "position: must be >= 0");
  py::array_t<int64_t> counts(weights.size());
  int64_t* out = counts.mutable_data();
  const int64_t n = weights.size();
  {
    py::gil_scoped_release unlocked;
    divisor_counts(w, n, position, out);
  }
  return counts;
}

// ---- sentence mappings -----------------------------------------------------------------------

MappingArgs mapping_args(const py::array& docs, const py::array& sizes, int64_t num_epochs,
                         uint64_t max_num_samples, int64_t max_seq_length, int64_t seed,
                         int64_t min_num_sent) {
  const auto* bounds = input<int64_t>(docs, "docs");
  const auto* lengths = input<int32_t>(sizes, "sizes");
  require(docs.size() >= 1 && bounds[0] >= 0, "docs: needs at least one bound, the first >= 0");
  for (int64_t d = 1; d < docs.size(); ++d) {
    require(bounds[d - 1] <= bounds[d] && bounds[d] <= sizes.size(),
            "docs: bounds must not decrease nor pass the end of sizes");
  }
  require(INT32_MIN <= seed && seed <= INT32_MAX, "seed: must fit in 32 bits");
  require(1 <= max_seq_length && max_seq_length <= INT32_MAX,
          "max_seq_length must be from 1 to 2**31 - 1");
  const auto most = static_cast<int64_t>(std::min<uint64_t>(max_num_samples, INT64_MAX));
  return {bounds, docs.size() - 1, lengths, num_epochs, most, max_seq_length,
          static_cast<int32_t>(seed), min_num_sent};
}

template <class Index, class Kind>
py::array mapped(const Mapping<Kind>& mapping, int64_t num_samples) {
  py::array_t<Index> rows(py::array::ShapeContainer{num_samples, int64_t{Kind::kWidth}});
  Index* out = rows.mutable_data();
  {
    py::gil_scoped_release unlocked;
    mapping.fill(out, Signals{});
  }
  return rows;
}

// Ids of sentences are uint32 while they fit, as in the peer.
template <class Kind>
py::array map_sentences(Mapping<Kind> mapping, int64_t num_sentences) {
  int64_t num_samples = 0;
  {
    py::gil_scoped_release unlocked;
    num_samples = mapping.count(Signals{});
  }
  if (num_sentences > int64_t{UINT32_MAX}) return mapped<uint64_t>(mapping, num_samples);
  return mapped<uint32_t>(mapping, num_samples);
}

py::array sentence_mapping(const py::array& docs, const py::array& sizes, int64_t num_epochs,
                           uint64_t max_num_samples, int64_t max_seq_length, double short_seq_prob,
                           int64_t seed, int64_t min_num_sent) {
  const MappingArgs args = mapping_args(docs, sizes, num_epochs, max_num_samples, max_seq_length,
                                        seed, min_num_sent);
  require(short_seq_prob == 0 || (0 < short_seq_prob && short_seq_prob <= 1 && max_seq_length > 1),
          "short_seq_prob: must be from 0 to 1, and 0 if max_seq_length is 1");
  return map_sentences(Mapping<SentenceMapping>(args, short_seq_prob), sizes.size());
}

py::array blocks_mapping(const py::array& docs, const py::array& sizes,
                         const py::array& titles_sizes, int64_t num_epochs, uint64_t max_num_samples,
                         int64_t max_seq_length, int64_t seed, bool use_one_sent_blocks) {
  const MappingArgs args = mapping_args(docs, sizes, num_epochs, max_num_samples, max_seq_length,
                                        seed, use_one_sent_blocks ? 1 : 2);
  const auto* titles = input<int32_t>(titles_sizes, "titles_sizes");
  require(titles_sizes.size() >= args.num_docs, "titles_sizes: one per document is needed");
  return map_sentences(Mapping<BlockMapping>(args, titles), sizes.size());
}

void raise_invalid_argument(const std::exception& error) {
  const auto type = py::module_::import("megaindex.errors").attr("InvalidArgument");
  PyErr_SetString(type.ptr(), error.what());
}

}  // namespace

// Nothing here is shared between calls but the pool of columns, which has a lock: free-threaded
// Python need not bring its GIL back.
PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
  m.doc() = "megaindex's native core; megaindex.kernels chooses it when it is there";
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const InvalidInput& e) {
      raise_invalid_argument(e);
    } catch (const py::cast_error&) {  // pybind11 would make it a RuntimeError
      raise_invalid_argument(InvalidInput("expected a tuple of arrays, or a whole number"));
    }
  });

  using namespace py::literals;
  m.def("seed_state", &seed_state, "seed"_a);
  m.def("shuffle", &shuffle_array, "state"_a, "array"_a, "num_threads"_a = 1);
  m.def("shuffled_range", &fill_shuffled_range, "state"_a, "first"_a, "out"_a, "num_threads"_a = 1);
  m.def("shuffled_documents", &fill_shuffled_documents, "state"_a, "documents"_a,
        "first_document"_a, "num_epochs"_a, "out"_a, "num_threads"_a = 1);
  m.def("draw_positions", &positions, "state"_a, "first"_a, "count"_a);
  m.def("cut_samples", &cut, "lengths"_a, "document_index"_a, "sequence_length"_a, "extra"_a,
        "num_samples"_a, "total_tokens"_a, "out"_a, "num_threads"_a = 1);
  m.def("bijection_apply", &apply_bijection, "key"_a, "n"_a, "indices"_a);
  m.def("bijection_invert", &invert_bijection, "key"_a, "n"_a, "values"_a);
  m.def("bijection_range", &fill_bijection_range<false>, "key"_a, "n"_a, "begin"_a, "out"_a);
  m.def("bijection_inverse_range", &fill_bijection_range<true>, "key"_a, "n"_a, "begin"_a,
        "out"_a);
  m.def("epoch_starts", &fill_epoch_starts, "key"_a, "lengths"_a, "copies"_a, "stride"_a, "out"_a,
        "num_threads"_a = 1);
  m.def("epoch_spans", &find_epoch_spans, "key"_a, "lengths"_a, "copies"_a, "stride"_a, "starts"_a,
        "begins"_a, "ends"_a);
  m.def("array_spans", &find_array_spans, "shuffle_index"_a, "sample_index"_a, "document_index"_a,
        "lengths"_a, "extra"_a, "sample_ids"_a);
  m.def("sort_by_sample", &fill_sorted, "shuffle_index"_a, "samples"_a, "begin"_a, "out"_a);
  py::class_<SpanTable>(m, "SpanTable");
  m.def("span_table", &span_table, "indices"_a);
  m.def("blended_spans", &find_blended_spans, "table"_a, "which"_a, "samples"_a);
  m.def("window_spans", &find_window_spans, "pointers"_a, "lengths"_a, "item_size"_a, "first"_a,
        "stop"_a, "begins"_a, "ends"_a);
  m.def("tokens_within", &count_tokens_within, "pointers"_a, "lengths"_a, "item_size"_a,
        "nbytes"_a);
  m.def("receipt_add", &add_receipts, "positions"_a, "source"_a, "document"_a, "offset"_a,
        "length"_a, "row_splits"_a, "keys"_a, "blocks"_a, "sums"_a);
  m.def("pack_documents", &pack_whole_documents, "lengths"_a, "capacity"_a, "tokens"_a,
        "begins"_a);
  py::class_<TokenTable>(m, "TokenTable");
  m.def("token_table", &token_table, "sources"_a);
  m.def("gather", &gather_tokens, "table"_a, "source"_a, "document"_a, "offset"_a, "length"_a,
        "row_splits"_a, "out"_a, "labels"_a, "pad_id"_a, "num_threads"_a = 1);
  m.def("mask_loss", &mask_batch_loss, "tokens"_a, "labels"_a, "pad_id"_a, "eod_id"_a,
        "loss_mask"_a);
  m.def("documents_by_token", &split_by_token, "tokens"_a, "eod_id"_a, "position_ids"_a,
        "cu_seqlens"_a, "max_seqlen"_a);
  m.def("documents_by_run", &split_by_run, "length"_a, "row_splits"_a, "width"_a, "position_ids"_a,
        "cu_seqlens"_a, "max_seqlen"_a);
  m.def("least_seen", &least_seen_order, "begins"_a, "ends"_a, "row_splits"_a, "widths"_a,
        "counts"_a, "num_samples"_a);
  m.def("blend_greedy", &greedy, "weights"_a, "begin"_a, "end"_a, "counts"_a, "dataset_index"_a,
        "dataset_sample_index"_a);
  m.def("blend_exhaustive", &exhaustive, "sizes"_a, "begin"_a, "end"_a, "counts"_a,
        "dataset_index"_a, "dataset_sample_index"_a);
  m.def("blend_checkpoints", &checkpoints, "weights"_a, "size"_a, "stride"_a);
  m.def("divisor_fill", &divisor, "weights"_a, "begin"_a, "end"_a, "counts"_a, "dataset_index"_a,
        "dataset_sample_index"_a);
  m.def("build_mapping", &sentence_mapping, "docs"_a, "sizes"_a, "num_epochs"_a,
        "max_num_samples"_a, "max_seq_length"_a, "short_seq_prob"_a, "seed"_a,
        "min_num_sent"_a = 2);
  m.def("build_blocks_mapping", &blocks_mapping, "docs"_a, "sizes"_a, "titles_sizes"_a,
        "num_epochs"_a, "max_num_samples"_a, "max_seq_length"_a, "seed"_a,
        "use_one_sent_blocks"_a);
  m.def("divisor_counts", &divisor_counts_at, "weights"_a, "position"_a);
  megaindex::python::register_mapped_files(m);
}
