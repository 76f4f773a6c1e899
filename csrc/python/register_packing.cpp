// Packing of whole documents by best-fit decreasing.
#include "python/arrays.hpp"
#include "python/register.hpp"
#include "python/runs.hpp"

#include <string>
#include <utility>

#include "megaindex/packed_spans.hpp"
#include "megaindex/pieces.hpp"

namespace megaindex::python {
namespace {

constexpr int64_t kLayerColumns = 6, kRunColumns = 3;
static_assert(sizeof(BinLayer) == 8 * kLayerColumns && sizeof(BinRun) == 8 * kRunColumns);

void check_capacity(int64_t capacity) {
  require(1 <= capacity && capacity <= kMostCapacity, "capacity: must be from 1 to 2**24");
}

LongDocuments long_documents_of(int64_t value) {
  require(0 <= value && value <= 2, "long_documents: must be 0, 1 or 2");
  return static_cast<LongDocuments>(value);
}

py::array_t<int64_t> count(const py::array& lengths, int64_t capacity, int64_t long_documents,
                           int num_threads) {
  const auto sizes = file_lengths(lengths);
  check_capacity(capacity);
  const Cutter cut(capacity, long_documents_of(long_documents));
  py::array_t<int64_t> counts(capacity + 1);
  int64_t* out = counts.mutable_data();
  py::gil_scoped_release unlocked;
  count_pieces(sizes, cut, num_threads, out, Signals{});
  return counts;
}

void sort(const py::array& lengths, int64_t capacity, int64_t long_documents,
          const py::array& counts, py::array& documents, py::array& sample_starts,
          int num_threads) {
  const auto sizes = file_lengths(lengths);
  check_capacity(capacity);
  const Cutter cut(capacity, long_documents_of(long_documents));
  const int64_t* of = input_of_size<int64_t>(counts, "counts", capacity + 1);
  int32_t* ids = output<int32_t>(documents, "documents");
  int64_t* starts = output<int64_t>(sample_starts, "sample_starts");
  require_no_overlap(documents, "documents", {lengths, counts, sample_starts});
  require_no_overlap(sample_starts, "sample_starts", {lengths, counts});
  int64_t room = documents.size();
  for (int64_t l = 0; l < capacity; ++l) {
    require(0 <= of[l] && of[l] <= room, "counts, documents: the pieces must fill documents");
    room -= of[l];
  }
  require(room == 0, "counts, documents: the pieces must fill documents");
  require(sample_starts.size() == (sizes.count + kPieceStride - 1) / kPieceStride + 1,
          "sample_starts: expected an entry for every 64 documents and one more");
  py::gil_scoped_release unlocked;
  sort_pieces(sizes, cut, of, num_threads, ids, starts, Signals{});
}

template <class Row>
py::array_t<int64_t> rows_of(const std::vector<Row>& rows, int64_t columns) {
  const auto count = static_cast<int64_t>(rows.size());
  py::array_t<int64_t> result({count, columns});
  if (count > 0) std::memcpy(result.mutable_data(), rows.data(), rows.size() * sizeof(Row));
  return result;
}

py::tuple pack(const py::array& counts, int64_t max_pieces, int64_t least_room, bool stacked) {
  const int64_t* of = input<int64_t>(counts, "counts");
  const int64_t capacity = counts.size() - 1;
  check_capacity(capacity);
  require(max_pieces >= 0 && least_room >= 1, "max_pieces, least_room: out of range");
  bool valid = of[0] == 0;
  for (int64_t l = 1; l <= capacity; ++l) valid &= 0 <= of[l] && of[l] <= INT64_MAX >> 26;
  require(valid, "counts: must be 0 for pieces of no tokens, and from 0 to 2**37");
  PackedPieces packed;
  {
    py::gil_scoped_release unlocked;
    packed = pack_pieces(of, capacity, max_pieces, least_room, stacked, Signals{});
  }
  return py::make_tuple(rows_of(packed.layers, kLayerColumns), rows_of(packed.runs, kRunColumns));
}

py::tuple find_packed_spans(const py::array& key, const py::array& lengths, int64_t long_documents,
                            int64_t extra, const py::array& piece_starts,
                            const py::array& documents, const py::array& sample_starts,
                            const py::array& layers, const py::array& runs, const py::array& bins) {
  const auto* words = input_of_size<uint64_t>(key, "key", 2);
  const int64_t capacity = piece_starts.size() - 1;
  check_capacity(capacity);
  require(extra == 0 || extra == 1, "extra: must be 0 or 1");
  const auto* layer_rows = input<int64_t>(layers, "layers", 2);
  const auto* run_rows = input<int64_t>(runs, "runs", 2);
  require(layers.shape(1) == kLayerColumns && runs.shape(1) == kRunColumns && runs.shape(0) >= 1 &&
              sample_starts.size() >= 1,
          "layers, runs, sample_starts: expected the arrays of pack_pieces and sort_pieces");
  const PackedArrays arrays{words,
                            file_lengths(lengths),
                            long_documents_of(long_documents),
                            extra,
                            input<int64_t>(piece_starts, "piece_starts"),
                            capacity,
                            input<int32_t>(documents, "documents"),
                            documents.size(),
                            input<int64_t>(sample_starts, "sample_starts"),
                            sample_starts.size(),
                            reinterpret_cast<const BinLayer*>(layer_rows),
                            layers.shape(0),
                            reinterpret_cast<const BinRun*>(run_rows),
                            runs.shape(0) - 1};
  const auto* numbers = input<int64_t>(bins, "bins");
  const int64_t n = bins.size();
  return found_runs(n, [&](Runs& found, int64_t* splits) {
    PackedReader(arrays).read(numbers, n, found, splits);
  });
}

py::array_t<int64_t> find_packed_bins(const py::array& key, const py::array& piece_starts,
                                      const py::array& layers, const py::array& runs,
                                      const py::array& lengths, const py::array& places,
                                      int num_threads) {
  const auto* words = input_of_size<uint64_t>(key, "key", 2);
  const int64_t capacity = piece_starts.size() - 1;
  check_capacity(capacity);
  const auto* starts = input<int64_t>(piece_starts, "piece_starts");
  const auto* layer_rows = input<int64_t>(layers, "layers", 2);
  const auto* run_rows = input<int64_t>(runs, "runs", 2);
  require(layers.shape(1) == kLayerColumns && runs.shape(1) == kRunColumns && runs.shape(0) >= 1,
          "layers, runs: expected the arrays of pack_pieces");
  const auto* of = input<int64_t>(lengths, "lengths");
  const auto* at = input<int64_t>(places, "places");
  const int64_t count = lengths.size();
  require(places.size() == count, "lengths, places: must have equal lengths");
  bool inside = true;
  for (int64_t k = 0; k < count; ++k) inside &= 1 <= of[k] && of[k] <= capacity && at[k] >= 0;
  require(inside, "lengths, places: must be 1 to the capacity, and 0 or more");
  py::array_t<int64_t> bins(count);
  int64_t* out = bins.mutable_data();
  py::gil_scoped_release unlocked;
  const BinFinder finder(reinterpret_cast<const BinLayer*>(layer_rows), layers.shape(0),
                         reinterpret_cast<const BinRun*>(run_rows), runs.shape(0) - 1, capacity);
  packed_bins(words, starts, finder, capacity, of, at, count, num_threads, out, Signals{});
  return bins;
}

}  // namespace

void register_packing(py::module_& m) {
  using namespace py::literals;
  m.def("count_pieces", &count, "lengths"_a, "capacity"_a, "long_documents"_a,
        "num_threads"_a = 1);
  m.def("sort_pieces", &sort, "lengths"_a, "capacity"_a, "long_documents"_a, "counts"_a,
        "documents"_a, "sample_starts"_a, "num_threads"_a = 1);
  m.def("pack_pieces", &pack, "counts"_a, "max_pieces"_a, "least_room"_a, "stacked"_a);
  m.def("packed_bins", &find_packed_bins, "key"_a, "piece_starts"_a, "layers"_a, "runs"_a,
        "lengths"_a, "places"_a, "num_threads"_a = 1);
  m.def("packed_spans", &find_packed_spans, "key"_a, "lengths"_a, "long_documents"_a, "extra"_a,
        "piece_starts"_a, "documents"_a, "sample_starts"_a, "layers"_a, "runs"_a, "bins"_a);
}

}  // namespace megaindex::python
