// Runs of tokens, as kernels find them one after another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace megaindex {

// Columns that were given back, kept for the next ones: the first touch of a fresh page costs more
// than all that is then written there. At most 32 MiB are kept. Nobody waits for the pool: a process
// forked while another thread was in it would wait forever.
class ColumnPool {
 public:
  // Room for at least `capacity` entries; capacity_of tells how many.
  int64_t* take(int64_t capacity) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    for (size_t i = 0; lock && i < kept_.size(); ++i) {
      const int64_t room = capacity_of(kept_[i]);
      if (capacity <= room && room / 4 <= capacity) {  // a small array does not hold much memory
        std::swap(kept_[i], kept_.back());
        int64_t* column = kept_.back();
        kept_.pop_back();
        return column;
      }
    }
    auto* block = static_cast<int64_t*>(std::malloc(static_cast<size_t>(capacity + kHeader) * 8));
    if (block == nullptr) throw std::bad_alloc();
    block[0] = capacity;
    return block + kHeader;
  }
  void give(int64_t* column) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock && capacity_of(column) <= kLargest && kept_.size() < kMost) {
      kept_.push_back(column);
    } else {
      std::free(column - kHeader);
    }
  }
  static int64_t capacity_of(const int64_t* column) { return column[-kHeader]; }

  // The one of this process; never destroyed, since arrays may outlive what is.
  static ColumnPool& shared() {
    static auto* const pool = new ColumnPool;
    return *pool;
  }

 private:
  static constexpr int64_t kHeader = 8;  // entries before the first: a line of the cache
  static constexpr int64_t kLargest = int64_t{1} << 18;
  static constexpr size_t kMost = 16;

  ColumnPool() { kept_.reserve(kMost); }

  std::mutex mutex_;
  std::vector<int64_t*> kept_;
};

// Three columns that grow together. Not std::vector: their memory is handed over as it is, to arrays
// that give it back.
class Runs {
 public:
  struct GiveBack {
    void operator()(int64_t* column) const { ColumnPool::shared().give(column); }
  };
  using Column = std::unique_ptr<int64_t[], GiveBack>;

  explicit Runs(int64_t expected) { grow(std::max<int64_t>(expected, 1)); }

  int64_t size() const { return size_; }

  void add(int64_t document, int64_t offset, int64_t length) {
    if (__builtin_expect(size_ == capacity_, 0)) grow(2 * capacity_);
    const auto at = static_cast<size_t>(size_++);
    documents[at] = document;
    offsets[at] = offset;
    lengths[at] = length;
  }

  Column documents, offsets, lengths;

 private:
  void grow(int64_t capacity) {
    int64_t least = INT64_MAX;
    for (Column* column : {&documents, &offsets, &lengths}) {
      Column larger(ColumnPool::shared().take(capacity));
      if (size_ > 0) std::memcpy(larger.get(), column->get(), static_cast<size_t>(size_) * 8);
      least = std::min(least, ColumnPool::capacity_of(larger.get()));
      column->swap(larger);
    }
    capacity_ = least;
  }

  int64_t size_ = 0, capacity_ = 0;
};

}  // namespace megaindex
