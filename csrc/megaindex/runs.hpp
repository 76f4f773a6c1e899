// Token runs as kernels append them.
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

// Columns kept for reuse, at most 32 MiB, because the first write to a fresh page costs more than
// all later ones. The lock is only tried: a process forked while another thread held it would
// otherwise wait forever.
class ColumnPool {
 public:
  // Return room for at least `capacity` entries; capacity_of() is the actual number.
  int64_t* take(int64_t capacity) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    for (size_t i = 0; lock && i < kept_.size(); ++i) {
      const int64_t room = capacity_of(kept_[i]);
      if (capacity <= room && room / 4 <= capacity) {  // a small array must not keep a large block
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

  // Return the pool of this process, which is not destroyed because arrays may outlive static
  // objects.
  static ColumnPool& shared() {
    static auto* const pool = new ColumnPool;
    return *pool;
  }

 private:
  static constexpr int64_t kHeader = 8;  // entries before the first: one cache line
  static constexpr int64_t kLargest = int64_t{1} << 18;
  static constexpr size_t kMost = 16;

  ColumnPool() { kept_.reserve(kMost); }

  std::mutex mutex_;
  std::vector<int64_t*> kept_;
};

// Three columns that grow together. They are not std::vectors because arrays take over their memory
// and give it back to the pool.
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
