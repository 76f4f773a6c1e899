// numpy.random.RandomState.shuffle for one-dimensional integer arrays, bit for bit.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "megaindex/mt19937.hpp"
#include "megaindex/parallel.hpp"
#include "megaindex/poll.hpp"

namespace megaindex {

// Fisher-Yates is bound by cache misses: step i swaps x[i] with x[j], j random. The positions j do
// not depend on the data, so they are drawn one chunk ahead and prefetched before they are swapped.
constexpr int64_t kShuffleChunk = 8192;
constexpr int64_t kPrefetchAhead = 48;

template <class T, class Position>
void swap_chunk(T* x, int64_t first, int64_t count, const Position* positions) {
  const int64_t ahead = std::min(kPrefetchAhead, count);
  for (int64_t k = 0; k < ahead; ++k) __builtin_prefetch(x + positions[k], 1);
  for (int64_t k = 0; k + ahead < count; ++k) {
    __builtin_prefetch(x + positions[k + ahead], 1);
    std::swap(x[first - k], x[positions[k]]);
  }
  for (int64_t k = count - ahead; k < count; ++k) std::swap(x[first - k], x[positions[k]]);
}

// Chunks of positions, drawn ahead by a second thread while the caller swaps. The order of draws
// and of swaps is that of one thread. A caller that finds no chunk draws it itself, so that nothing
// is lost on one core.
template <class Position>
class PositionStream {
 public:
  PositionStream(Mt19937& rng, int64_t size, bool threaded)
      : rng_(rng), first_(size - 1), buffer_(new Position[kRing * kShuffleChunk]) {
    if (threaded) helper_.start([this] { draw_ahead(); });  // if none starts, the caller draws all
  }
  PositionStream(const PositionStream&) = delete;
  PositionStream& operator=(const PositionStream&) = delete;
  ~PositionStream() { stop_.store(true, std::memory_order_relaxed); }

  // Return the positions of the steps of this chunk, valid until `release`.
  const Position* acquire(int64_t chunk) {
    // a chunk is drawn in microseconds, less than a sleep takes
    while (drawn_.load(std::memory_order_acquire) <= chunk) {
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock()) {
        std::this_thread::yield();
      } else if (drawn_.load(std::memory_order_relaxed) <= chunk) {
        draw_next();
      }
    }
    return slot(chunk);
  }
  void release(int64_t chunk) { used_.store(chunk + 1, std::memory_order_release); }

  int64_t chunks() const { return (first_ + kShuffleChunk - 1) / kShuffleChunk; }
  int64_t first_of(int64_t chunk) const { return first_ - chunk * kShuffleChunk; }
  int64_t count_of(int64_t chunk) const { return std::min(kShuffleChunk, first_of(chunk)); }

 private:
  static constexpr int64_t kRing = 32;

  Position* slot(int64_t chunk) { return buffer_.get() + chunk % kRing * kShuffleChunk; }

  void draw_next() {  // under the mutex
    const int64_t chunk = drawn_.load(std::memory_order_relaxed);
    rng_.draw_positions(static_cast<uint64_t>(first_of(chunk)), count_of(chunk), slot(chunk));
    drawn_.store(chunk + 1, std::memory_order_release);
  }
  bool is_full() const {
    return drawn_.load(std::memory_order_relaxed) - used_.load(std::memory_order_acquire) >= kRing;
  }
  void draw_ahead() {
    while (!stop_.load(std::memory_order_relaxed)) {
      if (is_full()) {  // a full ring takes longer to use, and the caller need not signal
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        continue;
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (drawn_.load(std::memory_order_relaxed) == chunks()) return;
      draw_next();
    }
  }

  Mt19937& rng_;
  const int64_t first_;
  std::unique_ptr<Position[]> buffer_;
  std::atomic<int64_t> drawn_{0};  // chunks drawn
  std::atomic<int64_t> used_{0};   // chunks no longer needed
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of rng_ and of the step from one chunk to the next
  JoinedThreads<> helper_{1};  // the last member, so that it is joined before the others are destroyed
};

template <class Position, class T, class Poll>
void shuffle_with(Mt19937& rng, T* x, int64_t size, bool threaded, Poll& poll) {
  PositionStream<Position> stream(rng, size, threaded);
  for (int64_t chunk = 0; chunk < stream.chunks(); ++chunk) {
    const Position* positions = stream.acquire(chunk);
    swap_chunk(x, stream.first_of(chunk), stream.count_of(chunk), positions);
    stream.release(chunk);
    if (chunk % 128 == 127) poll();  // about every million swaps
  }
}

// Shuffle x in place and advance `rng` as RandomState.shuffle does.
template <class T, class Poll = NoPoll>
void shuffle(Mt19937& rng, T* x, int64_t size, int num_threads, Poll poll = {}) {
  if (size < 2) return;
  const bool threaded = num_threads > 1 && size >= 16 * kShuffleChunk;
  if (static_cast<uint64_t>(size - 1) <= 0xffffffffULL) {
    shuffle_with<uint32_t>(rng, x, size, threaded, poll);
  } else {
    shuffle_with<uint64_t>(rng, x, size, threaded, poll);
  }
}

// Fill out with first, first+1, ... in shuffled order, a range of Megatron's shuffle_index.
template <class T, class Poll = NoPoll>
void shuffled_range(Mt19937& rng, int64_t first, int64_t size, T* out, int num_threads,
                    Poll poll = {}) {
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<T>(first + i);
  shuffle(rng, out, size, num_threads, poll);
}

// Fill out with `num_epochs` copies of the documents, shuffled together. If `documents` is null,
// they are first_document, first_document+1, ...
template <class Poll = NoPoll>
void shuffled_documents(Mt19937& rng, const int32_t* documents, int32_t first_document,
                        int64_t num_documents, int64_t num_epochs, int32_t* out, int num_threads,
                        Poll poll = {}) {
  if (num_documents == 0) return;  // num_epochs may be huge
  for (int64_t epoch = 0; epoch < num_epochs; ++epoch) {
    int32_t* row = out + epoch * num_documents;
    if (documents != nullptr) {
      std::copy(documents, documents + num_documents, row);
    } else {
      for (int64_t i = 0; i < num_documents; ++i) row[i] = static_cast<int32_t>(first_document + i);
    }
  }
  shuffle(rng, out, num_epochs * num_documents, num_threads, poll);
}

}  // namespace megaindex
