// Keyed bijections and the epochs ordered by them.
#include "python/arrays.hpp"
#include "python/register.hpp"
#include "python/runs.hpp"

#include <string>

#include "megaindex/bijection.hpp"
#include "megaindex/epoch.hpp"
#include "megaindex/epoch_spans.hpp"

namespace megaindex::python {
namespace {

const uint64_t* bijection_key(const py::array& key, int64_t n) {
  const auto* words = input<uint64_t>(key, "key");
  require(key.size() == 2, "key: expected uint64[2]");
  require(0 <= n && n <= kBijectionMost, "n: must be from 0 to 2**62, got " + std::to_string(n));
  return words;
}

// Call map(bijection, x) for every x of an int64 or uint64 array.
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
      inside = x[k] < static_cast<uint64_t>(n);  // as unsigned, a negative index is too large
      if (inside) out[k] = map(bijection, static_cast<int64_t>(x[k]));
    }
  }
  require(inside, "indices: must be from 0 to n - 1, with n = " + std::to_string(n));
  return result;
}

py::array_t<int64_t> apply_bijection(const py::array& key, int64_t n, const py::array& indices) {
  return bijected(key, n, indices, [](const Bijection& b, int64_t x) { return b.at(x); });
}

py::array_t<int64_t> invert_bijection(const py::array& key, int64_t n, const py::array& values) {
  return bijected(key, n, values, [](const Bijection& b, int64_t x) { return b.invert(x); });
}

template <bool kInverse>
void fill_bijection_range(const py::array& key, int64_t n, int64_t begin, py::array& out) {
  const auto* words = bijection_key(key, n);
  require_no_overlap(out, "out", {key});
  const int64_t count = out.size();
  require(0 <= begin && begin <= n && count <= n - begin,
          "begin, out: begin ... begin + len(out) must lie in 0 ... n");
  const auto run = [&](auto* x) {
    py::gil_scoped_release unlocked;
    const Bijection bijection(words, n);
    if (kInverse) {
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
  const auto sizes = file_lengths(lengths);
  require(lengths.size() >= 1 && 1 <= copies && copies <= kBijectionMost / lengths.size(),
          "lengths, copies: need at least one document, and at most 2**62 positions");
  require(1 <= stride && stride <= 1 << 20, "stride: must be from 1 to 2**20");
  return {sizes, copies, bijection_key(key, copies * lengths.size())};
}

void check_starts(const py::array& starts, const PermutedDocuments& documents, int64_t stride) {
  const int64_t entries = (documents.size() + stride - 1) / stride + 1;
  require(starts.size() == entries, "starts: must hold " + std::to_string(entries) + " entries");
}

void fill_epoch_starts(const py::array& key, const py::array& lengths, int64_t copies,
                       int64_t stride, py::array& out, int num_threads) {
  const auto documents = permuted_documents(key, lengths, copies, stride);
  int64_t* starts = output<int64_t>(out, "out");
  require_no_overlap(out, "out", {key, lengths});
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
  require(ends.size() == requests, "begins, ends: must have equal lengths");
  bool inside = true;
  for (int64_t k = 0; k < requests; ++k) {
    inside &= table[0] <= first[k] && first[k] < last[k] && last[k] <= table[rows - 1];
  }
  require(inside, "begins, ends: must be 0 <= begin < end <= tokens of the pass");
  return found_runs(requests, [&](Runs& runs, int64_t* splits) {
    epoch_spans(documents, stride, table, first, last, requests, runs, splits);
  });
}

py::array_t<int64_t> find_epoch_begins(const py::array& key, const py::array& lengths,
                                       int64_t copies, int64_t stride, const py::array& starts,
                                       const py::array& entries, int num_threads) {
  const auto documents = permuted_documents(key, lengths, copies, stride);
  const auto* table = input<int64_t>(starts, "starts");
  check_starts(starts, documents, stride);
  const auto* wanted = input<int64_t>(entries, "entries");
  const int64_t count = entries.size();
  bool inside = true;
  for (int64_t k = 0; k < count; ++k) inside &= 0 <= wanted[k] && wanted[k] < documents.size();
  require(inside, "entries: must be from 0 to copies * len(lengths) - 1");
  py::array_t<int64_t> begins(count);
  int64_t* out = begins.mutable_data();
  py::gil_scoped_release unlocked;
  epoch_begins(documents, stride, table, wanted, count, num_threads, out, Signals{});
  return begins;
}

}  // namespace

void register_bijection(py::module_& m) {
  using namespace py::literals;
  m.def("bijection_apply", &apply_bijection, "key"_a, "n"_a, "indices"_a);
  m.def("bijection_invert", &invert_bijection, "key"_a, "n"_a, "values"_a);
  m.def("bijection_range", &fill_bijection_range<false>, "key"_a, "n"_a, "begin"_a, "out"_a);
  m.def("bijection_inverse_range", &fill_bijection_range<true>, "key"_a, "n"_a, "begin"_a,
        "out"_a);
  m.def("epoch_starts", &fill_epoch_starts, "key"_a, "lengths"_a, "copies"_a, "stride"_a, "out"_a,
        "num_threads"_a = 1);
  m.def("epoch_begins", &find_epoch_begins, "key"_a, "lengths"_a, "copies"_a, "stride"_a,
        "starts"_a, "entries"_a, "num_threads"_a = 1);
  m.def("epoch_spans", &find_epoch_spans, "key"_a, "lengths"_a, "copies"_a, "stride"_a, "starts"_a,
        "begins"_a, "ends"_a);
}

}  // namespace megaindex::python
