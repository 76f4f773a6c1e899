// The random stream of numpy.random.RandomState: MT19937 with numpy's legacy bounded draws.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "megaindex/cpu.hpp"

namespace megaindex {

#ifdef MEGAINDEX_HAS_AVX2

// For each set of eight lanes, the lanes in it in ascending order, a byte each.
struct LaneLists {
  uint64_t of[256]{};
  constexpr LaneLists() {
    for (unsigned set = 0; set < 256; ++set) {
      int shift = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if ((set >> lane & 1) == 0) continue;
        of[set] |= lane << shift;
        shift += 8;
      }
    }
  }
};
inline constexpr LaneLists kLaneLists{};

// Move the lanes of a set to the front. The set is that of _mm256_movemask_ps.
MEGAINDEX_AVX2_INLINE __m256i lanes_in_front(__m256i lanes, unsigned set) {
  const __m128i list = _mm_cvtsi64_si128(static_cast<int64_t>(kLaneLists.of[set]));
  return _mm256_permutevar8x32_epi32(lanes, _mm256_cvtepu8_epi32(list));
}

// Return the set of lanes in which a <= b, unsigned.
MEGAINDEX_AVX2_INLINE unsigned lanes_at_most(__m256i a, __m256i b) {
  const __m256i is_less = _mm256_cmpeq_epi32(_mm256_min_epu32(a, b), a);
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_less)));
}

#endif

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
#ifdef MEGAINDEX_HAS_AVX2
      if (has_avx2()) {
        done = draw_run_avx2(static_cast<uint32_t>(first), mask, done, stop, positions);
        continue;
      }
#endif
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

  int64_t draw_run(uint32_t first, uint32_t mask, int64_t done, int64_t stop,
                   uint32_t* positions) {
    while (done < stop) {
      if (pos_ == kWords) refill();
      const int words = words_for(stop - done);
      done += select(first - static_cast<uint32_t>(done), mask, words, positions + done);
    }
    return done;
  }

  // Return the number of words left, or of positions: a word yields at most one, so this many
  // cannot yield more.
  int words_for(int64_t positions) const {
    return static_cast<int>(std::min<int64_t>(kWords - pos_, positions));
  }

  // Write the positions of the next words, the first of which is at most `limit`, and return their
  // number. A rejected word is overwritten by the next one instead of being branched over: about
  // one word in four is rejected, which would be mispredicted.
  int64_t select(uint32_t limit, uint32_t mask, int words, uint32_t* positions) {
    uint32_t* out = positions;
    int pos = pos_;
    for (const int end = pos + words; pos < end; ++pos) {
      const uint32_t value = out_[pos] & mask;
      const uint32_t accepted = value <= limit;
      *out = value;
      out += accepted;
      limit -= accepted;
    }
    pos_ = pos;
    return out - positions;
  }

#ifdef MEGAINDEX_HAS_AVX2
  // The limit of a word is that of the first one of its block less the words accepted between, so
  // one is accepted up to limit - kBlock + 1 and rejected above limit. A block with a word between
  // these is selected one by one.
  static constexpr int kBlock = 48;
  static constexpr int kVectors = kBlock / 8;

  MEGAINDEX_AVX2 int64_t draw_run_avx2(uint32_t first, uint32_t mask, int64_t done, int64_t stop,
                                       uint32_t* positions) {
    const __m256i masks = _mm256_set1_epi32(static_cast<int>(mask));
    while (done < stop) {
      if (pos_ == kWords) refill_avx2();
      int words = words_for(stop - done);
      for (; words >= kBlock; words -= kBlock) {
        const uint32_t limit = first - static_cast<uint32_t>(done);
        const __m256i high = _mm256_set1_epi32(static_cast<int>(limit));
        const __m256i low = _mm256_set1_epi32(static_cast<int>(limit - (kBlock - 1)));
        const auto* from = reinterpret_cast<const __m256i*>(out_ + pos_);
        __m256i values[kVectors];
        unsigned accepted[kVectors];
        unsigned unsure = limit < kBlock;
        for (int v = 0; v < kVectors; ++v) {
          values[v] = _mm256_and_si256(_mm256_loadu_si256(from + v), masks);
          accepted[v] = lanes_at_most(values[v], low);
          unsure |= accepted[v] ^ lanes_at_most(values[v], high);
        }
        if (__builtin_expect(unsure != 0, 0)) {
          done += select(limit, mask, kBlock, positions + done);
          continue;
        }
        // a store of eight lanes has room, as there is for as many positions as words
        for (int v = 0; v < kVectors; ++v) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + done),
                              lanes_in_front(values[v], accepted[v]));
          done += __builtin_popcount(accepted[v]);
        }
        pos_ += kBlock;
      }
      done += select(first - static_cast<uint32_t>(done), mask, words, positions + done);
    }
    return done;
  }

  MEGAINDEX_AVX2 void refill_avx2() { twist_and_temper(); }
#endif

  static uint32_t twist(uint32_t upper, uint32_t lower, uint32_t far) {
    const uint32_t y = (upper & 0x80000000U) | (lower & 0x7fffffffU);
    return far ^ (y >> 1) ^ ((0U - (y & 1U)) & 0x9908b0dfU);
  }

  // Three loops that can be vectorised: none reads what it has just written.
  void refill() { twist_and_temper(); }

  __attribute__((always_inline)) void twist_and_temper() {
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

  __attribute__((always_inline)) void temper() {
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
