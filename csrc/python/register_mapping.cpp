// Samples of sentence corpora.
#include "python/arrays.hpp"
#include "python/register.hpp"

#include <algorithm>
#include <string>

#include "megaindex/mapping.hpp"

namespace megaindex::python {
namespace {

MappingArgs mapping_args(const py::array& docs, const py::array& sizes, int64_t num_epochs,
                         uint64_t max_num_samples, int64_t max_seq_length, int64_t seed,
                         int64_t min_num_sent) {
  const auto* bounds = input<int64_t>(docs, "docs");
  const auto* lengths = input<int32_t>(sizes, "sizes");
  require(docs.size() >= 1 && bounds[0] >= 0, "docs: needs at least one bound, the first >= 0");
  for (int64_t d = 1; d < docs.size(); ++d) {
    require(bounds[d - 1] <= bounds[d] && bounds[d] <= sizes.size(),
            "docs: bounds must not decrease or exceed the number of sizes");
  }
  require(INT32_MIN <= seed && seed <= INT32_MAX, "seed: must fit in 32 bits");
  require(1 <= max_seq_length && max_seq_length <= INT32_MAX,
          "max_seq_length must be from 1 to 2**31 - 1");
  const auto most = static_cast<int64_t>(std::min<uint64_t>(max_num_samples, INT64_MAX));
  return {bounds, docs.size() - 1, lengths, num_epochs, most, max_seq_length,
          static_cast<int32_t>(seed), min_num_sent};
}

template <class Index, class Kind>
py::array filled_rows(const Mapping<Kind>& mapping, int64_t num_samples) {
  py::array_t<Index> rows(py::array::ShapeContainer{num_samples, int64_t{Kind::kWidth}});
  Index* out = rows.mutable_data();
  {
    py::gil_scoped_release unlocked;
    mapping.fill(out, Signals{});
  }
  return rows;
}

// Rows are uint32 while sentence ids fit, as in Megatron.
template <class Kind>
py::array shuffled_rows(Mapping<Kind> mapping, int64_t num_sentences) {
  int64_t num_samples = 0;
  {
    py::gil_scoped_release unlocked;
    num_samples = mapping.count(Signals{});
  }
  if (num_sentences > int64_t{UINT32_MAX}) return filled_rows<uint64_t>(mapping, num_samples);
  return filled_rows<uint32_t>(mapping, num_samples);
}

py::array map_sentences(const py::array& docs, const py::array& sizes, int64_t num_epochs,
                           uint64_t max_num_samples, int64_t max_seq_length, double short_seq_prob,
                           int64_t seed, int64_t min_num_sent) {
  const MappingArgs args = mapping_args(docs, sizes, num_epochs, max_num_samples, max_seq_length,
                                        seed, min_num_sent);
  require(short_seq_prob == 0 || (0 < short_seq_prob && short_seq_prob <= 1 && max_seq_length > 1),
          "short_seq_prob: must be from 0 to 1, and 0 if max_seq_length is 1");
  return shuffled_rows(Mapping<SentenceMapping>(args, short_seq_prob), sizes.size());
}

py::array map_blocks(const py::array& docs, const py::array& sizes,
                         const py::array& titles_sizes, int64_t num_epochs, uint64_t max_num_samples,
                         int64_t max_seq_length, int64_t seed, bool use_one_sent_blocks) {
  const MappingArgs args = mapping_args(docs, sizes, num_epochs, max_num_samples, max_seq_length,
                                        seed, use_one_sent_blocks ? 1 : 2);
  const auto* titles = input<int32_t>(titles_sizes, "titles_sizes");
  require(titles_sizes.size() >= args.num_docs, "titles_sizes: must have one entry for each document");
  return shuffled_rows(Mapping<BlockMapping>(args, titles), sizes.size());
}

}  // namespace

void register_mapping(py::module_& m) {
  using namespace py::literals;
  m.def("map_sentences", &map_sentences, "docs"_a, "sizes"_a, "num_epochs"_a,
        "max_num_samples"_a, "max_seq_length"_a, "short_seq_prob"_a, "seed"_a,
        "min_num_sent"_a = 2);
  m.def("map_blocks", &map_blocks, "docs"_a, "sizes"_a, "titles_sizes"_a,
        "num_epochs"_a, "max_num_samples"_a, "max_seq_length"_a, "seed"_a,
        "use_one_sent_blocks"_a);
}

}  // namespace megaindex::python
