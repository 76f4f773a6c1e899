// The random stream of numpy.random.RandomState: MT19937 with numpy's legacy bounded draws.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace megaindex {

// 624 words of state and a read position, in the layout of NumPy's ("MT19937", key, pos) tuple, so
// that a stream can be copied from RandomState.get_state() and to set_state().
class Mt19937 {
 public:
  static constexpr int kWords = 624;
  static constexpr int kStateWords = kWords + 1;

  explicit Mt19937(uint32_t seed) {
    key_[0] = seed;
    for (int i = 1; i < kWords; ++i) {
      const uint32_t prev = key_[i - 1];
      key_[i] = 1812433253U * (prev ^ (prev >> 30)) + static_cast<uint32_t>(i);
    }
    pos_ = kWords;
  }

  explicit Mt19937(const uint32_t* state) {
    std::memcpy(key_, state, sizeof(key_));
    pos_ = static_cast<int>(state[kWords]);
    if (pos_ < kWords) temper();
  }

  void save(uint32_t* state) const {
    std::memcpy(state, key_, sizeof(key_));
    state[kWords] = static_cast<uint32_t>(pos_);
  }

  uint32_t next32() {
    if (pos_ == kWords) refill();
    return out_[pos_++];
  }

  uint64_t next64() {
    const uint64_t high = next32();
    return high << 32 | next32();
  }

  // Draw positions of the Fisher-Yates steps i = first, first-1, ..., first-count+1 (all >= 1):
  // each uniform on [0, i], masked to the next power of two and rejected if above i. A try takes
  // one 32-bit word for i below 2^32 and two from there on, as NumPy's random_interval does.
  void draw_positions(uint64_t first, int64_t count, uint32_t* positions) {
    int64_t done = 0;
    while (done < count) {
      const uint64_t i = first - static_cast<uint64_t>(done);
      const auto mask = static_cast<uint32_t>(mask_for(i));
      // the mask is that of all i down to mask / 2 + 1
      const auto same_mask = static_cast<int64_t>(i - (mask >> 1));
      const int64_t stop = std::min(count, done + same_mask);
      done = draw_run(static_cast<uint32_t>(first), mask, done, stop, positions);
    }
  }

  void draw_positions(uint64_t first, int64_t count, uint64_t* positions) {
    for (int64_t k = 0; k < count; ++k) {
      const uint64_t i = first - static_cast<uint64_t>(k);
      const uint64_t mask = mask_for(i);
      const bool wide = i > 0xffffffffULL;
      uint64_t value;
      do {
        value = (wide ? next64() : next32()) & mask;
      } while (value > i);
      positions[k] = value;
    }
  }

 private:
  static uint64_t mask_for(uint64_t max) {
    uint64_t mask = max;
    for (int shift = 1; shift <= 32; shift <<= 1) mask |= mask >> shift;
    return mask;
  }

  // A rejected word is overwritten by the next one instead of being branched over: about one word
  // in four is rejected, which would be mispredicted.
  int64_t draw_run(uint32_t first, uint32_t mask, int64_t done, int64_t stop,
                   uint32_t* positions) {
    while (done < stop) {
      if (pos_ == kWords) refill();
      int pos = pos_;
      // a word yields at most one position, so this many words cannot pass `stop`
      const int words = static_cast<int>(std::min<int64_t>(kWords - pos, stop - done));
      uint32_t limit = first - static_cast<uint32_t>(done);
      uint32_t* out = positions + done;
      for (const int end = pos + words; pos < end; ++pos) {
        const uint32_t value = out_[pos] & mask;
        const uint32_t accepted = value <= limit;
        *out = value;
        out += accepted;
        limit -= accepted;
      }
      done = out - positions;
      pos_ = pos;
    }
    return done;
  }

  static uint32_t twist(uint32_t upper, uint32_t lower, uint32_t far) {
    const uint32_t y = (upper & 0x80000000U) | (lower & 0x7fffffffU);
    return far ^ (y >> 1) ^ ((0U - (y & 1U)) & 0x9908b0dfU);
  }

  // Three loops that can be vectorised: none reads what it has just written.
  void refill() {
    constexpr int kShift = 397;
    for (int i = 0; i < kWords - kShift; ++i) {
      key_[i] = twist(key_[i], key_[i + 1], key_[i + kShift]);
    }
    for (int i = kWords - kShift; i < kWords - 1; ++i) {
      key_[i] = twist(key_[i], key_[i + 1], key_[i + kShift - kWords]);
    }
    key_[kWords - 1] = twist(key_[kWords - 1], key_[0], key_[kShift - 1]);
    pos_ = 0;
    temper();
  }

  void temper() {
    for (int i = 0; i < kWords; ++i) {
      uint32_t y = key_[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680U;
      y ^= (y << 15) & 0xefc60000U;
      out_[i] = y ^ (y >> 18);
    }
  }

  uint32_t key_[kWords];
  uint32_t out_[kWords];  // key_, tempered
  int pos_;
};

}  // namespace megaindex
