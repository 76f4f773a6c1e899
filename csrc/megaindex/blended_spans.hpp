// Token runs of the samples of a blend, found in the arrays of each source.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "megaindex/invalid_input.hpp"
#include "megaindex/runs.hpp"
#include "megaindex/spans.hpp"

namespace megaindex {

// The arrays of one source, in their own types.
using AnyIndexArrays =
    std::variant<IndexArrays<uint32_t, int32_t>, IndexArrays<uint32_t, int64_t>,
                 IndexArrays<int64_t, int32_t>, IndexArrays<int64_t, int64_t>>;

// Add the runs of samples[k] of source which[k], for n samples; sources gets one entry for each
// run.
inline void blended_spans(const std::vector<AnyIndexArrays>& indices, const int64_t* which,
                          const int64_t* samples, int64_t n, Runs& runs,
                          std::vector<int32_t>& sources, int64_t* row_splits) {
  row_splits[0] = 0;
  for (int64_t k = 0; k < n; ++k) {
    if (which[k] < 0 || which[k] >= static_cast<int64_t>(indices.size())) {
      throw InvalidInput("which: source " + std::to_string(which[k]) + " of " +
                         std::to_string(indices.size()) + " sources");
    }
    int64_t splits[2];
    std::visit([&](const auto& index) { array_spans(index, samples + k, 1, runs, splits); },
               indices[static_cast<size_t>(which[k])]);
    row_splits[k + 1] = runs.size();
    sources.resize(static_cast<size_t>(runs.size()), static_cast<int32_t>(which[k]));
  }
}

}  // namespace megaindex
