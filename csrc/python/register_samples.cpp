// sample_index and whole-document packing.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <string>

#include "megaindex/packing.hpp"
#include "megaindex/sample_index.hpp"

namespace megaindex::python {
namespace {

void cut(const py::array& lengths, const py::array& document_index, int64_t sequence_length,
         int64_t extra, int64_t num_samples, int64_t total_tokens, py::array& out,
         int num_threads) {
  const auto sizes = file_lengths(lengths);
  const auto* documents = input<int32_t>(document_index, "document_index");
  const SampleGeometry g{sequence_length, extra, num_samples, total_tokens};
  require(sequence_length >= 1 && (extra == 0 || extra == 1) && num_samples >= 0 &&
              total_tokens >= 0 && num_samples <= total_tokens / sequence_length + 1,
          "sequence_length must be >= 1, extra 0 or 1, and num_samples at most total_tokens / "
          "sequence_length + 1");
  require(sequence_length <= (INT64_MAX - 1 - total_tokens) / 2,  // of the token after the last row
          "total_tokens + 2 * sequence_length must be less than 2**63 - 1");
  require(document_index.size() > 0, "document_index: must not be empty");
  if (out.ndim() != 2 || out.shape(0) != num_samples + 1 || out.shape(1) != 2) {
    throw InvalidInput("out: expected shape (num_samples + 1, 2), got " + describe(out));
  }
  require_no_overlap(out, "out", {lengths, document_index});
  const int64_t n = lengths.size(), m = document_index.size();
  // allocated by NumPy, which puts large arrays on huge pages
  const bool compact = short_lengths_pay(n, m, num_samples);
  py::array_t<uint16_t> room(compact ? n : 0);
  uint16_t* short_lengths = compact ? room.mutable_data() : nullptr;
  auto run = [&](auto* rows) {
    py::gil_scoped_release unlocked;
    cut_samples(sizes.bytes, n, documents, m, g, num_threads, short_lengths, rows, Signals{});
  };
  if (is<int32_t>(out)) return run(output<int32_t>(out, "out", 2));
  run(output<int64_t>(out, "out", 2));
}

py::tuple pack_whole_documents(const py::array& lengths, int64_t capacity, int64_t tokens,
                               py::array& begins) {
  const int32_t* sizes = input<int32_t>(lengths, "lengths");
  int64_t* out = output<int64_t>(begins, "begins");
  require_no_overlap(begins, "begins", {lengths});
  const int64_t documents = lengths.size(), most = begins.size();
  require(capacity >= 1 && tokens >= 0, "capacity must be >= 1 and tokens >= 0");
  Packed packed{};
  {
    py::gil_scoped_release unlocked;
    packed = pack_documents(sizes, documents, capacity, tokens, most, out, Signals{});
  }
  return py::make_tuple(packed.samples, packed.tokens);
}

}  // namespace

void register_samples(py::module_& m) {
  using namespace py::literals;
  m.def("cut_samples", &cut, "lengths"_a, "document_index"_a, "sequence_length"_a, "extra"_a,
        "num_samples"_a, "total_tokens"_a, "out"_a, "num_threads"_a = 1);
  m.def("pack_documents", &pack_whole_documents, "lengths"_a, "capacity"_a, "tokens"_a,
        "begins"_a);
}

}  // namespace megaindex::python
