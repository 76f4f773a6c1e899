// Blends.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "megaindex/blending.hpp"
#include "megaindex/divisor.hpp"
#include "megaindex/mix.hpp"

namespace megaindex::python {
namespace {

// Outputs for positions [begin, end) of a blend; dataset_index and dataset_sample_index may be
// None.
struct BlendOutputs {
  int64_t* counts;
  void* dataset_index = nullptr;
  bool wide_index = true;  // int16, else GPT-NeoX's uint8
  int64_t* dataset_sample_index = nullptr;

  BlendOutputs(const py::array& weights, int64_t begin, int64_t end, py::array& counts_,
               const py::object& index, const py::object& sample_index)
      : counts(output<int64_t>(counts_, "counts")) {
    require_no_overlap(counts_, "counts", {weights});
    require_no_overlap(index, "dataset_index", {weights, counts_});
    require_no_overlap(sample_index, "dataset_sample_index", {weights, counts_, index});
    const int64_t num_datasets = weights.size();
    require(counts_.size() == num_datasets && num_datasets >= 1,
            "counts: must have one entry for each dataset, and at least one");
    require(0 <= begin && begin <= end, "begin, end: must be 0 <= begin <= end");
    if (!index.is_none()) {
      auto array = as_numpy(index);
      check_length(array, end - begin, "dataset_index");
      wide_index = !is<uint8_t>(array);
      dataset_index = wide_index ? static_cast<void*>(output<int16_t>(array, "dataset_index"))
                                 : output<uint8_t>(array, "dataset_index");
      require(num_datasets <= (wide_index ? 32767 : 255),
              "dataset_index: its dtype cannot number this many datasets");
    }
    if (!sample_index.is_none()) {
      auto array = as_numpy(sample_index);
      check_length(array, end - begin, "dataset_sample_index");
      dataset_sample_index = output<int64_t>(array, "dataset_sample_index");
    }
  }

  // Call body(dataset_index pointer of its own type) without the GIL.
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

// A NaN would compare false with every product of a weight.
bool is_weight(double weight) { return std::isfinite(weight) && weight >= 0; }

const double* blend_weights(const py::array& weights) {
  const double* w = input<double>(weights, "weights");
  for (int64_t i = 0; i < weights.size(); ++i) {
    require(is_weight(w[i]), "weights: must be finite and >= 0");
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

// A one-dimensional array of a kernel's own dtype, contiguous and aligned; `data` is null for any
// other object.
template <class T>
struct PlainArray {
  T* data = nullptr;
  int64_t size = 0;

  PlainArray(py::handle object, bool written) {
    if (!py::isinstance<py::array>(object)) return;
    const auto array = py::reinterpret_borrow<py::array>(object);
    constexpr int kPlain = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
    if (array.ndim() != 1 || (array.flags() & kPlain) != kPlain || !is<T>(array)) return;
    if (written && !array.writeable()) return;
    data = static_cast<T*>(const_cast<void*>(array.data()));
    size = array.size();
  }

  template <class U>
  bool is_apart_from(const PlainArray<U>& other) const {
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    return address(data + size) <= address(other.data) ||
           address(other.data + other.size) <= address(data);
  }
};

// Return a Python int from 0 on, or -1 for any other object.
int64_t plain_integer(py::handle object) {
  if (!PyLong_CheckExact(object.ptr())) return -1;
  int overflow = 0;
  return std::max<int64_t>(PyLong_AsLongLongAndOverflow(object.ptr(), &overflow), -1);
}

// Draw from the first position on into whole outputs of this dtype. Return false, before anything
// is written, where an argument is not as the kernels take it.
template <class Index, class Value, class Draw>
bool fill_plain(py::handle index, py::handle sample_index, const PlainArray<Value>& values,
                int64_t num_datasets, int64_t size, const Draw& draw) {
  const PlainArray<Index> datasets(index, true);
  const PlainArray<int64_t> samples(sample_index, true);
  if (datasets.data == nullptr || samples.data == nullptr || num_datasets < 1 || size < 0 ||
      num_datasets > std::min<int64_t>(values.size, std::numeric_limits<Index>::max()) ||
      size > std::min(datasets.size, samples.size) || !datasets.is_apart_from(samples) ||
      !values.is_apart_from(datasets) || !values.is_apart_from(samples)) {
    return false;
  }
  std::vector<int64_t> counts(static_cast<size_t>(num_datasets));
  // others cannot run for so short a time
  constexpr int64_t kShort = 1 << 12;
  std::optional<py::gil_scoped_release> unlocked;
  if (size * num_datasets > kShort) unlocked.emplace();
  draw(counts.data(), datasets.data, samples.data);
  return true;
}

template <class Value, class Draw>
bool fill_any(py::handle index, py::handle sample_index, const PlainArray<Value>& values,
              int64_t num_datasets, int64_t size, const Draw& draw) {
  return fill_plain<int16_t>(index, sample_index, values, num_datasets, size, draw) ||
         fill_plain<uint8_t>(index, sample_index, values, num_datasets, size, draw);
}

bool fill_greedy(const py::object& index, const py::object& sample_index, const py::object& weights,
                 const py::object& num_datasets, const py::object& size) {
  const PlainArray<double> w(weights, false);
  if (!std::all_of(w.data, w.data + w.size, is_weight)) return false;
  const int64_t n = plain_integer(num_datasets), end = plain_integer(size);
  return fill_any(index, sample_index, w, n, end, [&](auto... out) {
    blend_greedy(w.data, n, 0, end, out..., Signals{});
  });
}

bool fill_exhaustive(const py::object& index, const py::object& sample_index,
                     const py::object& sizes, const py::object& num_datasets) {
  const PlainArray<int64_t> s(sizes, false);
  const int64_t n = plain_integer(num_datasets);
  int64_t total = 0, end = 0;
  for (int64_t i = 0; i < s.size; ++i) {
    if (s.data[i] < 0 || s.data[i] > INT64_MAX - total) return false;
    total += s.data[i];
    if (i < n) end = total;
  }
  return fill_any(index, sample_index, s, n, end, [&](auto... out) {
    blend_exhaustive(s.data, n, 0, end, out..., Signals{});
  });
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

// Tables of mixes, int64[rows, streams].
struct MixTable {
  const uint32_t* shares;
  int64_t num_segments;
  int64_t num_streams;

  explicit MixTable(const py::array& shares_) : shares(input<uint32_t>(shares_, "shares", 2)) {
    num_segments = shares_.shape(0);
    num_streams = shares_.shape(1);
    require(1 <= num_streams && num_streams <= 32767, "shares: must have 1 to 32767 streams");
  }

  void check(const py::array& table, int64_t rows, const char* name) const {
    require(table.ndim() == 2 && table.shape(0) == rows && table.shape(1) == num_streams, name,
            ": its rows must be those of the segments, and its columns the streams");
  }
};

void fill_mix_table(const py::array& shares, const py::array& lengths, py::array& deficits,
                    py::array& counts) {
  const MixTable table(shares);
  const int64_t* sizes = input_of_size<int64_t>(lengths, "lengths", table.num_segments);
  auto* owed = output<int64_t>(deficits, "deficits", 2);
  auto* drawn = output<int64_t>(counts, "counts", 2);
  table.check(deficits, table.num_segments + 1, "deficits");
  table.check(counts, table.num_segments + 1, "counts");
  require_no_overlap(deficits, "deficits", {shares, lengths});
  require_no_overlap(counts, "counts", {shares, lengths, deficits});
  for (int64_t k = 0; k < table.num_segments; ++k) {
    require(0 <= sizes[k] && sizes[k] <= kMixMostPosition, "lengths: must be from 0 to 2**60");
  }
  py::gil_scoped_release unlocked;
  mix_table(table.shares, sizes, table.num_segments, table.num_streams, owed, drawn, Signals{});
}

void fill_mix(const py::array& shares, const py::array& starts, const py::array& deficits,
              const py::array& counts, int64_t begin, py::array& streams, py::array& ordinals,
              int64_t num_threads) {
  const MixTable table(shares);
  const int64_t* firsts = input_of_size<int64_t>(starts, "starts", table.num_segments);
  const auto* owed = input<int64_t>(deficits, "deficits", 2);
  const auto* drawn = input<int64_t>(counts, "counts", 2);
  table.check(deficits, table.num_segments, "deficits");
  table.check(counts, table.num_segments, "counts");
  auto* stream = output<int16_t>(streams, "streams");
  auto* ordinal = output<int64_t>(ordinals, "ordinals");
  require(streams.size() == ordinals.size(), "streams, ordinals: must be of one size");
  require_no_overlap(streams, "streams", {shares, starts, deficits, counts});
  require_no_overlap(ordinals, "ordinals", {shares, starts, deficits, counts, streams});
  require(table.num_segments >= 1, "shares: must have at least one row");
  for (int64_t k = 1; k < table.num_segments; ++k) {
    require(firsts[k - 1] < firsts[k], "starts: must increase");
  }
  const int64_t size = streams.size();
  require(0 <= firsts[0] && firsts[0] <= begin && begin <= kMixMostPosition - size,
          "begin: must be from the first start to 2**60");
  py::gil_scoped_release unlocked;
  mix_fill(table.shares, firsts, owed, drawn, table.num_segments, table.num_streams, begin,
           begin + size, stream, ordinal, num_threads, Signals{});
}

}  // namespace

void register_blending(py::module_& m) {
  using namespace py::literals;
  m.def("blend_greedy", &greedy, "weights"_a, "begin"_a, "end"_a, "counts"_a, "dataset_index"_a,
        "dataset_sample_index"_a);
  m.def("blend_exhaustive", &exhaustive, "sizes"_a, "begin"_a, "end"_a, "counts"_a,
        "dataset_index"_a, "dataset_sample_index"_a);
  m.def("fill_greedy", &fill_greedy, "dataset_index"_a, "dataset_sample_index"_a, "weights"_a,
        "num_datasets"_a, "size"_a);
  m.def("fill_exhaustive", &fill_exhaustive, "dataset_index"_a, "dataset_sample_index"_a,
        "sizes"_a, "num_datasets"_a);
  m.def("divisor_fill", &divisor, "weights"_a, "begin"_a, "end"_a, "counts"_a, "dataset_index"_a,
        "dataset_sample_index"_a);
  m.def("divisor_counts", &divisor_counts_at, "weights"_a, "position"_a);
  m.def("mix_table", &fill_mix_table, "shares"_a, "lengths"_a, "deficits"_a, "counts"_a);
  m.def("mix_fill", &fill_mix, "shares"_a, "starts"_a, "deficits"_a, "counts"_a, "begin"_a,
        "streams"_a, "ordinals"_a, "num_threads"_a = 1);
}

}  // namespace megaindex::python
