#pragma once

#include <cstdint>

namespace megaindex {

template <class Index>
void divisor_fill(const uint64_t* weights, int64_t num_datasets, int64_t begin, int64_t end,
                  int64_t* counts, Index* dataset_index, int64_t* dataset_sample_index) {
    using Wide = unsigned __int128;
    for (int64_t n = begin; n < end; ++n) {
        int64_t best = 0;
        for (int64_t i = 1; i < num_datasets; ++i) {
            if (static_cast<Wide>(weights[i]) * static_cast<uint64_t>(2 * counts[best] + 1) >
                static_cast<Wide>(weights[best]) * static_cast<uint64_t>(2 * counts[i] + 1)) {
                best = i;
            }
        }
        if (dataset_index != nullptr) dataset_index[n - begin] = static_cast<Index>(best);
        if (dataset_sample_index != nullptr) dataset_sample_index[n - begin] = counts[best];
        ++counts[best];
    }
}

inline void divisor_counts(const uint64_t* weights, int64_t num_datasets, int64_t position,
                           int64_t* counts_out) {
    using Wide = unsigned __int128;
    Wide sum = 0;
    for (int64_t i = 0; i < num_datasets; ++i) sum += weights[i];
    const Wide draws = position * 2 > num_datasets ? static_cast<Wide>(position * 2 - num_datasets) : 0;
    int64_t drawn = 0;
    for (int64_t i = 0; i < num_datasets; ++i) {
        counts_out[i] =
            draws == 0 ? 0 : static_cast<int64_t>((weights[i] * draws + sum) / (2 * sum));
        drawn += counts_out[i];
    }
    divisor_fill<int16_t>(weights, num_datasets, drawn, position, counts_out, nullptr, nullptr);
}

}  // namespace megaindex
