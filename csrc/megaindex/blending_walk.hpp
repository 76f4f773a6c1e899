// The rule and the output of a blend, and the plain scan of all datasets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "megaindex/blending_vector.hpp"

namespace megaindex {

// Draw n takes the dataset furthest behind, by weights[i] * max(n, 1) - counts[i], the lowest index
// among equals; a dataset whose count has reached its limit is left out.
struct BlendRule {
  const double* weights;
  const int64_t* limits;  // null without limits
  int64_t num_datasets;

  bool spent(int64_t i, int64_t count) const { return limits != nullptr && count >= limits[i]; }
  double entry_count(int64_t i, int64_t count) const {
    return spent(i, count) ? kNever : static_cast<double>(count);
  }
};

inline double blend_multiplier(int64_t n) { return static_cast<double>(std::max<int64_t>(n, 1)); }

template <class Index>
struct BlendOutput {
  Index* dataset;   // null if the caller wants none
  int64_t* sample;  // null if the caller wants none
  int64_t origin;   // position of the first element

  void write(int64_t n, int64_t dataset_index, int64_t sample_index) const {
    if (dataset != nullptr) dataset[n - origin] = static_cast<Index>(dataset_index);
    if (sample != nullptr) sample[n - origin] = sample_index;
  }
};

template <class T, class A>
T& at(std::vector<T, A>& x, int64_t i) { return x[static_cast<size_t>(i)]; }
template <class T, class A>
const T& at(const std::vector<T, A>& x, int64_t i) { return x[static_cast<size_t>(i)]; }

inline int64_t padded(int64_t n, int64_t multiple = kBlendPad) {
  return (n + multiple - 1) / multiple * multiple;
}

// Compares all datasets for every draw: exact for any weights.
template <class Vector>
class ScanBlend {
 public:
  ScanBlend(const BlendRule& rule, int64_t* counts)
      : rule_(rule),
        counts_(counts),
        slope_(static_cast<size_t>(padded(rule.num_datasets)), 0.0),
        count_(slope_.size(), kNever) {
    std::copy(rule.weights, rule.weights + rule.num_datasets, slope_.begin());
    for (int64_t i = 0; i < rule.num_datasets; ++i) at(count_, i) = rule.entry_count(i, counts[i]);
  }

  template <class Index>
  void advance(int64_t begin, int64_t end, const BlendOutput<Index>& out) {
    const auto size = static_cast<int64_t>(slope_.size());
    for (int64_t n = begin; n < end; ++n) {
      const int64_t i =
          Vector::first_max(slope_.data(), count_.data(), size, blend_multiplier(n));
      out.write(n, i, counts_[i]);
      ++counts_[i];
      at(count_, i) = rule_.entry_count(i, counts_[i]);
    }
  }

 private:
  BlendRule rule_;
  int64_t* counts_;
  Doubles slope_;
  Doubles count_;
};

}  // namespace megaindex
