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
// not depend on the data, so they are drawn a chunk of steps ahead and prefetched before the swap.
constexpr int64_t kShuffleChunk = 8192;
constexpr int64_t kPrefetchAhead = 160;  // 48 take 1.6 times as long where so many misses overlap
constexpr int64_t kWorthThreads = int64_t{1} << 21;  // elements; fewer fit a cache

// Call swap(k) for k = 0 ... count - 1, some steps after the prefetch of its position.
template <class T, class Position, class Swap>
void swap_ahead(T* x, const Position* positions, int64_t count, const Swap& swap) {
  const int64_t ahead = std::min(kPrefetchAhead, count);
  for (int64_t k = 0; k < ahead; ++k) __builtin_prefetch(x + positions[k], 1);
  for (int64_t k = 0; k + ahead < count; ++k) {
    __builtin_prefetch(x + positions[k + ahead], 1);
    swap(k);
  }
  for (int64_t k = count - ahead; k < count; ++k) swap(k);
}

// Steps of a chunk and the positions that they swap with.
template <class Position>
struct StepList {
  int64_t count = 0;
  uint32_t steps[kShuffleChunk + 8];  // the last store of eight may pass the end
  Position positions[kShuffleChunk + 8];

  // Set to the steps of a chunk whose positions are `begin` to `last`.
  void select(const Position* from, int64_t begin, int64_t last) {
    const auto origin = static_cast<Position>(begin), width = static_cast<Position>(last - begin);
    count = 0;
#ifdef MEGAINDEX_HAS_AVX2
    if constexpr (sizeof(Position) == 4) {
      if (has_avx2()) return select_avx2(from, origin, width);
    }
#endif
    for (uint32_t k = 0; k < kShuffleChunk; ++k) {  // a step left out is overwritten by the next
      steps[count] = k;
      positions[count] = from[k];
      count += from[k] - origin <= width;
    }
  }

 private:
#ifdef MEGAINDEX_HAS_AVX2
  MEGAINDEX_AVX2 void select_avx2(const Position* from, Position origin, Position width) {
    const __m256i origins = _mm256_set1_epi32(static_cast<int>(origin));
    const __m256i widths = _mm256_set1_epi32(static_cast<int>(width));
    __m256i step = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t k = 0; k < kShuffleChunk; k += 8) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + k));
      const unsigned kept = lanes_at_most(_mm256_sub_epi32(values, origins), widths);
      auto* to = reinterpret_cast<__m256i*>(steps + count);
      _mm256_storeu_si256(to, lanes_in_front(step, kept));
      to = reinterpret_cast<__m256i*>(positions + count);
      _mm256_storeu_si256(to, lanes_in_front(values, kept));
      count += __builtin_popcount(kept);
      step = _mm256_add_epi32(step, _mm256_set1_epi32(8));
    }
  }
#endif
};

// The swaps of one array, shared by threads.
//
// In a chunk of steps i = top ... low, those with j < low commute unless they share j: each takes
// its x[i] once, and no other one uses that. So each thread does those whose j lies in its part of
// the array. Steps with j >= low come before the others of their chunk; part 0, the highest, does
// them. The next chunks lie in part 0 as well, so that no other part has to be done with the chunks
// before. Parts move down every thirty-second of the chunks left; a part then waits for those below
// it, whose positions it takes over. A thread that waits draws.
template <class Position, class T, class Poll>
class SharedSwaps {
 public:
  static constexpr int64_t kLeast = 64 * kShuffleChunk;  // positions; fewer are left to the caller
  static constexpr int kMostParts = 8;  // with more, drawing would be the longest

  SharedSwaps(Mt19937& rng, T* x, int64_t size, int threads, Poll& poll)
      : rng_(rng), x_(x), first_(size - 1), chunks_((first_ - kLeast) / kShuffleChunk),
        threads_(std::min(threads, kMostParts)), poll_(poll),
        buffer_(new Position[kRing * kShuffleChunk]), helpers_(threads_ - 1) {}
  SharedSwaps(const SharedSwaps&) = delete;
  SharedSwaps& operator=(const SharedSwaps&) = delete;
  ~SharedSwaps() { stop_.store(true, std::memory_order_relaxed); }

  // Do the steps down to about kLeast, and return the i of the next one.
  int64_t run() {
    int parts = 1;  // as many as threads that can be started
    while (parts < threads_ && helpers_.start([this, parts] { help(parts); })) ++parts;
    parts_.store(parts, std::memory_order_release);
    work(0, parts);
    for (int part = 1; part < parts; ++part) wait_for(done_[part], chunks_);
    return top_of(chunks_);
  }

 private:
  static constexpr int64_t kRing = 16;
  struct alignas(64) Count {  // a cache line of its own
    std::atomic<int64_t> chunks{0};
  };

  int64_t top_of(int64_t chunk) const { return first_ - chunk * kShuffleChunk; }
  Position* drawn_at(int64_t chunk) { return buffer_.get() + chunk % kRing * kShuffleChunk; }

  void help(int part) {
    int parts = 0;
    while ((parts = parts_.load(std::memory_order_acquire)) == 0) std::this_thread::yield();
    work(part, parts);
  }

  void work(int part, int parts) {
    StepList<Position> list;
    for (int64_t chunk = 0, end; chunk < chunks_; chunk = end) {
      end = chunk + (chunks_ - chunk + 31) / 32;
      const int64_t begin = begin_of(part, parts, top_of(end));
      const int64_t stop = part == 0 ? 0 : begin_of(part - 1, parts, top_of(end));
      for (int below = part + 1; below < parts; ++below) wait_for(done_[below], chunk);
      for (int64_t c = chunk; c < end; ++c) {
        if (!wait_for(part == 0 ? drawn_ : settled_, c + 1)) return;
        const Position* positions = drawn_at(c);
        const int64_t top = top_of(c), low = top - kShuffleChunk + 1;
        const auto swap = [&](int64_t k) {
          std::swap(x_[top - list.steps[k]], x_[list.positions[k]]);
        };
        if (part == 0) {
          list.select(positions, low, top);
          for (int64_t k = 0; k < list.count; ++k) swap(k);
          settled_.chunks.store(c + 1, std::memory_order_release);
        }
        list.select(positions, begin, (part == 0 ? low : stop) - 1);
        swap_ahead(x_, list.positions, list.count, swap);
        done_[part].chunks.store(c + 1, std::memory_order_release);
        if (part == 0 && c % 128 == 127) poll_();  // about every million steps
      }
    }
  }

  // Return the lowest position of a part. The last part is smaller, so that its thread draws: that
  // takes about an eighth of the time of all swaps.
  static int64_t begin_of(int part, int parts, int64_t size) {
    constexpr int kShare = 9;
    if (part == parts - 1) return 0;
    const int last = std::max(1, kShare - parts);
    return size / (last + kShare * (parts - 1)) * (last + kShare * (parts - 2 - part));
  }

  // Draw while the count is less, or return false if the caller's thread gave up.
  bool wait_for(const Count& count, int64_t least) {
    constexpr int kYields = 64;  // more mean that the other thread has lost its processor
    for (int idle = 0; count.chunks.load(std::memory_order_acquire) < least;) {
      if (stop_.load(std::memory_order_relaxed)) return false;
      if (draw()) continue;
      if (++idle < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }

  // Draw the next chunk, or return false if another thread draws or there is no room.
  bool draw() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    const int64_t chunk = drawn_.chunks.load(std::memory_order_relaxed);
    if (!lock.owns_lock() || chunk == chunks_) return false;
    const int parts = parts_.load(std::memory_order_acquire);
    for (int part = 0; part < parts; ++part) {
      if (chunk - done_[part].chunks.load(std::memory_order_acquire) >= kRing) return false;
    }
    rng_.draw_positions(static_cast<uint64_t>(top_of(chunk)), kShuffleChunk, drawn_at(chunk));
    drawn_.chunks.store(chunk + 1, std::memory_order_release);
    return true;
  }

  Mt19937& rng_;
  T* const x_;
  const int64_t first_;
  const int64_t chunks_;
  const int threads_;
  Poll& poll_;
  std::unique_ptr<Position[]> buffer_;
  Count drawn_, settled_, done_[kMostParts];
  std::atomic<int> parts_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of rng_ and of the step from one chunk to the next
  JoinedThreads<> helpers_;  // the last member, so joined before the others are destroyed
};

template <class Position, class T, class Poll>
void shuffle_with(Mt19937& rng, T* x, int64_t size, int threads, Poll& poll) {
  int64_t top = size - 1;
  if (threads > 1 && size >= kWorthThreads) {
    top = SharedSwaps<Position, T, Poll>(rng, x, size, threads, poll).run();
  }
  const std::unique_ptr<Position[]> positions(new Position[kShuffleChunk]);
  for (int64_t chunk = 0; top > 0; top -= kShuffleChunk) {
    const int64_t count = std::min(kShuffleChunk, top);
    rng.draw_positions(static_cast<uint64_t>(top), count, positions.get());
    swap_ahead(x, positions.get(), count,
               [&](int64_t k) { std::swap(x[top - k], x[positions[k]]); });
    if (++chunk % 128 == 0) poll();  // about every million steps
  }
}

// Shuffle x in place and advance `rng` as RandomState.shuffle does.
template <class T, class Poll = NoPoll>
void shuffle(Mt19937& rng, T* x, int64_t size, int num_threads, Poll poll = {}) {
  if (size < 2) return;
  if (static_cast<uint64_t>(size - 1) <= 0xffffffffULL) {
    shuffle_with<uint32_t>(rng, x, size, num_threads, poll);
  } else {
    shuffle_with<uint64_t>(rng, x, size, num_threads, poll);
  }
}

// Call fill(begin, end) for parts of 0 ... size - 1, on threads if there are many elements.
template <class Fill>
void fill_in_parts(int64_t size, int num_threads, const Fill& fill) {
  const int64_t parts = size < kWorthThreads ? 1 : std::max(num_threads, 1);
  run_parallel(parts, [&](int64_t part) {
    fill(size / parts * part, part + 1 == parts ? size : size / parts * (part + 1));
  });
}

// Fill out with first, first+1, ... in shuffled order, a range of Megatron's shuffle_index.
template <class T, class Poll = NoPoll>
void shuffled_range(Mt19937& rng, int64_t first, int64_t size, T* out, int num_threads,
                    Poll poll = {}) {
  fill_in_parts(size, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<T>(first + i);
  });
  shuffle(rng, out, size, num_threads, poll);
}

// Fill out with `num_epochs` copies of the documents, shuffled together. If `documents` is null,
// they are first_document, first_document+1, ...
template <class Poll = NoPoll>
void shuffled_documents(Mt19937& rng, const int32_t* documents, int32_t first_document,
                        int64_t num_documents, int64_t num_epochs, int32_t* out, int num_threads,
                        Poll poll = {}) {
  if (num_documents == 0) return;  // num_epochs may be huge
  const int64_t size = num_epochs * num_documents;
  fill_in_parts(size, num_threads, [&](int64_t begin, int64_t end) {
    int64_t document = begin % num_documents;
    for (int64_t i = begin; i < end; document = 0) {
      const int64_t count = std::min(end - i, num_documents - document);
      for (const int64_t stop = i + count; i < stop; ++i, ++document) {
        out[i] = documents != nullptr ? documents[document]
                                      : static_cast<int32_t>(first_document + document);
      }
    }
  });
  shuffle(rng, out, size, num_threads, poll);
}

}  // namespace megaindex
