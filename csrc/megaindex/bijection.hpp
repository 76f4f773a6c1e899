// Keyed bijections of [0, n): shuffles of which any entry can be computed by itself.
//
// From n = 4096 on, an index is written as (left, right) in a grid of rows x columns cells, with
// rows = ceil(sqrt(n)), and each round adds to one half a keyed hash of the other, modulo its size.
// This Feistel network is a bijection of the grid whatever the hash. At most rows - 1 cells are not
// in [0, n); an index mapped to one is mapped again until it is in [0, n) (cycle walking). Below
// 4096 a network is not uniform enough, and a keyed Fisher-Yates table is used.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "megaindex/cpu.hpp"

namespace megaindex {

constexpr int64_t kBijectionTableBelow = 4096;
constexpr int64_t kBijectionMost = int64_t{1} << 62;  // both halves stay below 2^31
constexpr int kBijectionRounds = 8;                   // even, so that both halves change equally often
constexpr uint32_t kBijectionFactor = 0x85ebca6b;

// The finaliser of SplitMix64.
inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Return word `i` of the stream of a 128-bit key.
inline uint64_t key_word(const uint64_t* key, uint64_t i) {
  return mixed(key[1] ^ mixed(key[0] + (i + 1) * 0x9e3779b97f4a7c15));
}

struct FeistelRound {
  uint32_t flip;
  uint32_t factor;  // odd

  // Return a hash of `half` in [0, size).
  uint32_t operator()(uint32_t half, uint32_t size) const {
    const uint32_t x = (half ^ flip) * kBijectionFactor;
    const uint32_t y = (x ^ (x >> 15)) * factor;
    return static_cast<uint32_t>((uint64_t{y} * size) >> 32);
  }
};

// The network on the whole grid, whose first n cells are [0, n).
struct Feistel {
  uint64_t n;
  uint32_t rows;
  uint32_t columns;
  FeistelRound rounds[kBijectionRounds];

  Feistel(const uint64_t* key, int64_t size) : Feistel(size) {
    for (uint64_t r = 0; r < kBijectionRounds; ++r) {
      const uint64_t word = key_word(key, r);
      rounds[r] = {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32) | 1};
    }
  }
  // The caller sets the rounds.
  explicit Feistel(int64_t size) : n(static_cast<uint64_t>(size)) {
    auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(n)));
    while (root * root < n) ++root;
    while (root > 1 && (root - 1) * (root - 1) >= n) --root;
    rows = static_cast<uint32_t>(root);
    columns = static_cast<uint32_t>(root == 0 ? 0 : (n + root - 1) / root);
  }

  uint64_t at(uint64_t index) const {
    do index = forward(index);
    while (index >= n);
    return index;
  }
  uint64_t invert(uint64_t value) const {
    do value = backward(value);
    while (value >= n);
    return value;
  }

 private:
  uint64_t forward(uint64_t index) const {
    auto left = static_cast<uint32_t>(index / columns);
    auto right = static_cast<uint32_t>(index % columns);
    for (int r = 0; r < kBijectionRounds; r += 2) {
      left = sum(left, rounds[r](right, rows), rows);
      right = sum(right, rounds[r + 1](left, columns), columns);
    }
    return uint64_t{left} * columns + right;
  }
  uint64_t backward(uint64_t value) const {
    auto left = static_cast<uint32_t>(value / columns);
    auto right = static_cast<uint32_t>(value % columns);
    for (int r = kBijectionRounds - 2; r >= 0; r -= 2) {
      right = sum(right, columns - rounds[r + 1](left, columns), columns);
      left = sum(left, rows - rounds[r](right, rows), rows);
    }
    return uint64_t{left} * columns + right;
  }
  static uint32_t sum(uint32_t a, uint32_t b, uint32_t size) {
    const uint32_t whole = a + b;  // at most 2 * size - 1, below 2^32
    return whole < size ? whole : whole - size;
  }
};

#ifdef MEGAINDEX_HAS_AVX2
// The network for consecutive indices, with 8 in each register.
class FeistelAvx2 {
 public:
  static constexpr int64_t kAtOnce = 32;  // with 4 registers the latencies of instructions overlap

  // Fill out with the values of the indices begin, begin + 1, …, or with kBack the indices of these
  // values; count is a multiple of kAtOnce. Values outside [0, n) are mapped again.
  template <bool kBack, class T>
  MEGAINDEX_AVX2 static void fill(const Feistel& f, uint64_t begin, int64_t count, T* out) {
    const __m256i rows = lanes(f.rows), columns = lanes(f.columns);
    alignas(32) uint32_t first[2][8];
    first[0][0] = static_cast<uint32_t>(begin / f.columns);
    first[1][0] = static_cast<uint32_t>(begin % f.columns);
    for (int i = 1; i < 8; ++i) {
      const bool over = first[1][i - 1] + 1 == f.columns;
      first[0][i] = first[0][i - 1] + over;
      first[1][i] = over ? 0 : first[1][i - 1] + 1;
    }
    __m256i next_left = _mm256_load_si256(reinterpret_cast<const __m256i*>(first[0]));
    __m256i next_right = _mm256_load_si256(reinterpret_cast<const __m256i*>(first[1]));
    for (int64_t k = 0; k < count; k += kAtOnce) {
      __m256i left[4], right[4];
      for (int v = 0; v < 4; ++v) {
        left[v] = next_left;
        right[v] = next_right;
        next_right = _mm256_add_epi32(next_right, lanes(8));  // 8 is less than columns
        const __m256i over = at_least(next_right, columns);
        next_right = _mm256_sub_epi32(next_right, _mm256_and_si256(over, columns));
        next_left = _mm256_sub_epi32(next_left, over);
      }
      // Both halves are named in turn: chosen by the round, they would be kept in memory.
      for (int step = 0; step < kBijectionRounds; step += 2) {
        if (kBack) {
          const int r = kBijectionRounds - 1 - step;
          apply<kBack>(f.rounds[r], left, right, columns);
          apply<kBack>(f.rounds[r - 1], right, left, rows);
        } else {
          apply<kBack>(f.rounds[step], right, left, rows);
          apply<kBack>(f.rounds[step + 1], left, right, columns);
        }
      }
      for (int v = 0; v < 4; ++v) store<kBack>(f, left[v], right[v], columns, out + k + 8 * v);
    }
  }

 private:
  MEGAINDEX_AVX2_INLINE static __m256i lanes(uint32_t x) {
    return _mm256_set1_epi32(static_cast<int>(x));
  }
  MEGAINDEX_AVX2_INLINE static __m256i at_least(__m256i a, __m256i b) {
    return _mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a);
  }
  MEGAINDEX_AVX2_INLINE static __m256i sum(__m256i a, __m256i b, __m256i size) {
    const __m256i whole = _mm256_add_epi32(a, b);
    // if whole < size, the difference wraps to a larger number
    return _mm256_min_epu32(whole, _mm256_sub_epi32(whole, size));
  }
  MEGAINDEX_AVX2_INLINE static __m256i difference(__m256i a, __m256i b, __m256i size) {
    const __m256i whole = _mm256_sub_epi32(a, b);
    return _mm256_min_epu32(whole, _mm256_add_epi32(whole, size));
  }
  MEGAINDEX_AVX2_INLINE static __m256i hash(const FeistelRound& round, __m256i half,
                                            __m256i size) {
    const __m256i x =
        _mm256_mullo_epi32(_mm256_xor_si256(half, lanes(round.flip)), lanes(kBijectionFactor));
    const __m256i y = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                                         lanes(round.factor));
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(y, size), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(y, 32), size);
    return _mm256_blend_epi32(even, odd, 0xaa);
  }

  template <bool kBack>
  MEGAINDEX_AVX2_INLINE static void apply(const FeistelRound& round, const __m256i* from,
                                          __m256i* to, __m256i size) {
    for (int v = 0; v < 4; ++v) {
      const __m256i hashed = hash(round, from[v], size);
      to[v] = kBack ? difference(to[v], hashed, size) : sum(to[v], hashed, size);
    }
  }

  template <bool kBack>
  MEGAINDEX_AVX2_INLINE static void store(
      const Feistel& f, __m256i left, __m256i right, __m256i columns, int32_t* out) {
    const __m256i value = _mm256_add_epi32(_mm256_mullo_epi32(left, columns), right);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), value);
    const __m256i over = at_least(value, lanes(static_cast<uint32_t>(f.n)));
    const int outside = _mm256_movemask_ps(_mm256_castsi256_ps(over));
    if (__builtin_expect(outside != 0, 0)) remap<kBack, uint32_t>(f, outside, out);
  }
  template <bool kBack>
  MEGAINDEX_AVX2_INLINE static void store(
      const Feistel& f, __m256i left, __m256i right, __m256i columns, int64_t* out) {
    const __m256i even = _mm256_add_epi64(
        _mm256_mul_epu32(left, columns), _mm256_blend_epi32(right, _mm256_setzero_si256(), 0xaa));
    const __m256i odd = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(left, 32), columns),
                                         _mm256_srli_epi64(right, 32));
    // reorders lanes 0 4 | 1 5 and 2 6 | 3 7 to 0 1 2 3 and 4 5 6 7
    const __m256i low = _mm256_unpacklo_epi64(even, odd), high = _mm256_unpackhi_epi64(even, odd);
    const __m256i last = _mm256_set1_epi64x(static_cast<int64_t>(f.n) - 1);
    int outside = 0;
    for (int v = 0; v < 2; ++v) {
      const __m256i value = v == 0 ? _mm256_permute2x128_si256(low, high, 0x20)
                                   : _mm256_permute2x128_si256(low, high, 0x31);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4 * v), value);
      const __m256i over = _mm256_cmpgt_epi64(value, last);
      outside |= _mm256_movemask_pd(_mm256_castsi256_pd(over)) << (4 * v);
    }
    if (__builtin_expect(outside != 0, 0)) remap<kBack, uint64_t>(f, outside, out);
  }
  // U is the unsigned T: cells beyond n may not fit T.
  template <bool kBack, class U, class T>
  static void remap(const Feistel& f, int outside, T* out) {
    for (; outside != 0; outside &= outside - 1) {
      T& value = out[__builtin_ctz(static_cast<unsigned>(outside))];
      value = static_cast<T>(kBack ? f.invert(static_cast<U>(value)) : f.at(static_cast<U>(value)));
    }
  }
};
#endif

class Bijection {
 public:
  // 0 <= n <= kBijectionMost; key is two words.
  Bijection(const uint64_t* key, int64_t n) : network_(key, n) {
    if (is_table()) draw_tables(key, n);
  }

  int64_t size() const { return static_cast<int64_t>(network_.n); }

  int64_t at(int64_t index) const {
    if (is_table()) return table_[static_cast<size_t>(index)];
    return static_cast<int64_t>(network_.at(static_cast<uint64_t>(index)));
  }
  int64_t invert(int64_t value) const {
    if (is_table()) return inverse_[static_cast<size_t>(value)];
    return static_cast<int64_t>(network_.invert(static_cast<uint64_t>(value)));
  }

  // out[k] = at(begin + k); int32 output holds them if n <= 2^31.
  template <class T>
  void range(int64_t begin, int64_t count, T* out) const {
    fill<false>(begin, count, out);
  }
  // out[k] = invert(begin + k)
  template <class T>
  void inverse_range(int64_t begin, int64_t count, T* out) const {
    fill<true>(begin, count, out);
  }

 private:
  bool is_table() const { return size() < kBijectionTableBelow; }

  template <bool kBack, class T>
  void fill(int64_t begin, int64_t count, T* out) const {
    int64_t done = 0;
#ifdef MEGAINDEX_HAS_AVX2
    if (!is_table() && has_avx2()) {
      done = count - count % FeistelAvx2::kAtOnce;
      FeistelAvx2::fill<kBack>(network_, static_cast<uint64_t>(begin), done, out);
    }
#endif
    for (; done < count; ++done) {
      out[done] = static_cast<T>(kBack ? invert(begin + done) : at(begin + done));
    }
  }

  void draw_tables(const uint64_t* key, int64_t n) {
    table_.resize(static_cast<size_t>(n));
    inverse_.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) table_[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    for (uint64_t i = static_cast<uint64_t>(n); i-- > 1;) {
      std::swap(table_[i], table_[key_word(key, i) % (i + 1)]);
    }
    for (int64_t i = 0; i < n; ++i) {
      inverse_[static_cast<size_t>(table_[static_cast<size_t>(i)])] = static_cast<int32_t>(i);
    }
  }

  Feistel network_;
  std::vector<int32_t> table_, inverse_;  // empty from kBijectionTableBelow on
};

}  // namespace megaindex
