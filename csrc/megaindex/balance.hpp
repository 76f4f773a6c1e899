// Sums of squared document lengths, and the assignment of a step's rows by their work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

namespace megaindex {

// Write to out the sum over the runs of each sample of the square of their input tokens: the first
// `width` tokens of a sample.
inline void squared_lengths(const int64_t* length, const int64_t* row_splits, int64_t samples,
                            int64_t width, int64_t* out) {
  for (int64_t k = 0; k < samples; ++k) {
    int64_t room = width, total = 0;
    for (int64_t at = row_splits[k]; at < row_splits[k + 1]; ++at) {
      const int64_t inputs = std::min(length[at], room);
      total += inputs * inputs;
      room -= inputs;
    }
    out[k] = total;
  }
}

namespace detail {

class RowAssignment {
 public:
  RowAssignment(const int64_t* work, int64_t ranks, int64_t micro_batch_size)
      : work_(work), size_(micro_batch_size), loads_(ranks), held_(ranks), heap_(ranks) {}

  // Assign the samples to the micro batches of `rows` rows; out may be null.
  void assign(const int64_t* samples, int64_t count, int64_t rows, int64_t* out) {
    const int64_t ranks = static_cast<int64_t>(loads_.size()), batches = rows / size_;
    if (batches == 0) return;
    const int64_t each = count / batches;
    int64_t longer = count % batches;
    for (int64_t first = 0; first < batches && each + longer > 0; first += ranks) {
      const int64_t larger = std::min(longer, ranks);
      longer -= larger;
      round(samples, each, larger, out == nullptr ? nullptr : out + first * size_);
      samples += each * ranks + larger;
    }
  }

 private:
  // Assign the samples of a round: `each` to every rank, and one more to `larger` of them.
  void round(const int64_t* samples, int64_t each, int64_t larger, int64_t* out) {
    const int64_t ranks = static_cast<int64_t>(loads_.size());
    std::fill(held_.begin(), held_.end(), 0);
    heap_.resize(ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) heap_[rank] = {loads_[rank], rank};
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>{});
    for (int64_t left = each * ranks + larger; left > 0; --left, ++samples) {
      int64_t rank = pop();
      while (held_[rank] == each && larger == 0) rank = pop();  // full since others took one more
      larger -= held_[rank] == each;
      if (out != nullptr) out[rank * size_ + held_[rank]] = *samples;
      loads_[rank] += work_[*samples];
      if (++held_[rank] <= each) {
        heap_.emplace_back(loads_[rank], rank);
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>{});
      }
    }
  }

  int64_t pop() {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>{});
    const int64_t rank = heap_.back().second;
    heap_.pop_back();
    return rank;
  }

  const int64_t* work_;
  int64_t size_;
  std::vector<int64_t> loads_;
  std::vector<int64_t> held_;  // samples of each rank in this round
  std::vector<std::pair<int64_t, int64_t>> heap_;
};

}  // namespace detail

// Assign `samples` samples, of which the first `served` in the order of work were served in
// `rows_served` rows, to the micro batches of `rows` rows. Writes numbers of samples, -1 for padding.
inline void balance_rows(const int64_t* work, int64_t samples, int64_t served, int64_t rows_served,
                         int64_t ranks, int64_t micro_batch_size, int64_t rows, int64_t* out) {
  if (rows == 0) return;
  std::vector<int64_t> order(samples);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(), [work](int64_t a, int64_t b) {
    return work[a] != work[b] ? work[a] > work[b] : a < b;
  });
  std::fill(out, out + rows, int64_t{-1});
  detail::RowAssignment assignment(work, ranks, micro_batch_size);
  assignment.assign(order.data(), served, rows_served, nullptr);
  assignment.assign(order.data() + served, samples - served, rows, out);
}

}  // namespace megaindex
