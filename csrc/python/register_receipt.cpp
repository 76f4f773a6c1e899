// Receipts, keys of rows and the least-seen order.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <algorithm>

#include "megaindex/least_seen.hpp"
#include "megaindex/receipt.hpp"
#include "megaindex/row_keys.hpp"

namespace megaindex::python {
namespace {

// Return the runs of n samples, whose splits are checked by `lie_inside`.
ReceiptSpans spans_of(const py::array& source, const py::array& document, const py::array& offset,
                      const py::array& length, const py::array& row_splits, int64_t n) {
  const int64_t runs = document.size();
  return {input_of_size<int32_t>(source, "source", runs),
          input_of_size<int64_t>(document, "document", runs),
          input_of_size<int64_t>(offset, "offset", runs),
          input_of_size<int64_t>(length, "length", runs),
          input_of_size<int64_t>(row_splits, "row_splits", n + 1)};
}

bool lie_inside(const ReceiptSpans& spans, int64_t n, int64_t runs, int64_t sources) {
  // Collects sign bits of differences: AVX2 adds 64-bit integers faster than it compares them.
  uint64_t outside = 0;
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t end = word(spans.row_splits[k + 1]);
    outside |= end | (end - word(spans.row_splits[k]));
  }
  int32_t least = 0, most = 0;
  for (int64_t k = 0; k < runs; ++k) {
    least = std::min(least, spans.source[k]);
    most = std::max(most, spans.source[k]);
  }
  return spans.row_splits[0] == 0 && spans.row_splits[n] == runs && (outside >> 63) == 0 &&
         least == 0 && (runs == 0 || most < sources);
}

void add_receipts(const py::array& positions, const py::array& source, const py::array& document,
                  const py::array& offset, const py::array& length, const py::array& row_splits,
                  const py::array& keys, const py::array& blocks, py::array& sums) {
  const int64_t n = positions.size(), runs = document.size();
  const int64_t* at = input<int64_t>(positions, "positions");
  const ReceiptSpans spans = spans_of(source, document, offset, length, row_splits, n);
  const uint64_t* words = input<uint64_t>(keys, "keys", 2);
  uint64_t* sum = output<uint64_t>(sums, "sums", 2);
  require_no_overlap(sums, "sums",
                {positions, source, document, offset, length, row_splits, keys, blocks});
  const int64_t* block = input_of_size<int64_t>(blocks, "blocks", n);
  const int64_t num_blocks = sums.shape(0), sources = keys.shape(0);
  require(keys.shape(1) == 2 && sums.shape(1) == 2,
          "keys, sums: expected two words for each source and each block");
  py::gil_scoped_release unlocked;
  uint64_t outside = 0;  // sign bits of differences, as in `lie_inside`
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  for (int64_t k = 0; k < n; ++k) {
    outside |= word(block[k]) | (word(num_blocks - 1) - word(block[k]));
  }
  const bool inside = lie_inside(spans, n, runs, sources) && (outside >> 63) == 0;
  require(inside, "row_splits, source, blocks: must lie inside the runs, keys and sums");
  receipt_add(at, n, spans, words, block, sum);
}

void write_row_keys(const py::array& positions, const py::array& numbers, const py::array& source,
                    const py::array& document, const py::array& offset, const py::array& length,
                    const py::array& row_splits, int64_t width, const py::array& contents,
                    const py::array& starts, const py::array& passes, py::array& samples,
                    py::array& sources, py::array& exposures, py::array& keys, py::array& high) {
  const int64_t n = positions.size(), runs = document.size();
  const int64_t* at = input<int64_t>(positions, "positions");
  const ReceiptSpans spans = spans_of(source, document, offset, length, row_splits, n);
  const uint64_t* words = input<uint64_t>(contents, "contents", 2);
  const RowPasses of{input_of_size<int64_t>(numbers, "numbers", n),
                     input<int64_t>(starts, "starts"),
                     input_of_size<int64_t>(passes, "passes", starts.size()), starts.size()};
  const RowKeys out{output<int64_t>(samples, "samples"), output<int32_t>(sources, "sources"),
                    output<int32_t>(exposures, "exposures"), output<int64_t>(keys, "keys"),
                    high.size() != 0 ? output<int64_t>(high, "high") : nullptr};
  for (const py::array& each : {samples, sources, exposures, keys, high}) {
    require(each.size() == n || (each.size() == 0 && each.is(high)),
            "samples, sources, exposures, keys, high: must have one entry for each row");
    require_no_overlap(each, "samples, sources, exposures, keys, high",
                       {positions, numbers, source, document, offset, length, row_splits});
  }
  require(contents.shape(1) == 2, "contents: expected two words for each source");
  require(of.runs > 0, "starts: must have an entry");
  const int64_t num_sources = contents.shape(0);
  py::gil_scoped_release unlocked;
  require(lie_inside(spans, n, runs, num_sources),
          "row_splits, source: must lie inside the runs and contents");
  row_keys(at, spans, n, width, words, of, out);
}

py::array_t<int64_t> least_seen_order(const py::array& begins, const py::array& ends,
                                      const py::array& row_splits, const py::array& widths,
                                      py::array& counts, int64_t num_samples) {
  const int64_t runs = begins.size(), segments = widths.size(), samples = row_splits.size() - 1;
  const SegmentRuns covered{input_of_size<int64_t>(begins, "begins", runs),
                            input_of_size<int64_t>(ends, "ends", runs),
                            input<int64_t>(row_splits, "row_splits"), samples};
  const int64_t* tokens = input<int64_t>(widths, "widths");
  int64_t* seen = output<int64_t>(counts, "counts");
  require_no_overlap(counts, "counts", {begins, ends, row_splits, widths});
  require(counts.size() == segments, "counts: must have one entry for each segment");
  require(0 <= num_samples && num_samples <= samples,
          "num_samples: must be from 0 to the number of samples");
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

}  // namespace

void register_receipt(py::module_& m) {
  using namespace py::literals;
  m.def("receipt_add", &add_receipts, "positions"_a, "source"_a, "document"_a, "offset"_a,
        "length"_a, "row_splits"_a, "keys"_a, "blocks"_a, "sums"_a);
  m.def("row_keys", &write_row_keys, "positions"_a, "numbers"_a, "source"_a, "document"_a,
        "offset"_a, "length"_a, "row_splits"_a, "width"_a, "contents"_a, "starts"_a, "passes"_a,
        "samples"_a, "sources"_a, "exposures"_a, "keys"_a, "high"_a);
  m.def("least_seen", &least_seen_order, "begins"_a, "ends"_a, "row_splits"_a, "widths"_a,
        "counts"_a, "num_samples"_a);
}

}  // namespace megaindex::python
