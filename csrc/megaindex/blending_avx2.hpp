// The vector operations of blending_vector.hpp with AVX2 instructions.
#pragma once

#include <cstring>

#include "megaindex/blending_vector.hpp"
#include "megaindex/cpu.hpp"

#ifdef MEGAINDEX_HAS_AVX2

namespace megaindex {

// From kMaxLanes - lane on, a mask of kMaxLanes lanes in which only that lane is set.
struct OneHot {
  int64_t lanes[2 * kMaxLanes]{};
  constexpr OneHot() { lanes[kMaxLanes] = -1; }
};
inline constexpr OneHot kOneHot{};

struct Avx2Vector {
  MEGAINDEX_AVX2 static __m256d behind(const double* slope, const double* count, __m256d d) {
    return _mm256_sub_pd(_mm256_mul_pd(_mm256_load_pd(slope), d), _mm256_load_pd(count));
  }

  // Return the largest value in all lanes.
  MEGAINDEX_AVX2 static __m256d largest(__m256d x) {
    const __m256d half = _mm256_max_pd(x, _mm256_permute2f128_pd(x, x, 1));
    return _mm256_max_pd(half, _mm256_permute_pd(half, 5));
  }

  MEGAINDEX_AVX2 static __m256d smallest(__m256d x) {
    const __m256d half = _mm256_min_pd(x, _mm256_permute2f128_pd(x, x, 1));
    return _mm256_min_pd(half, _mm256_permute_pd(half, 5));
  }

  // Each lane keeps the largest maximum of 16 entries and the first place where it occurred.
  MEGAINDEX_AVX2 static int64_t first_max(const double* slope, const double* count, int64_t size,
                                          double d) {
    const __m256d dd = _mm256_set1_pd(d);
    __m256d best = _mm256_set1_pd(-kNever);
    __m256d here = _mm256_setzero_pd();
    __m256d where = here;
    for (int64_t i = 0; i < size; i += kBlendPad) {
      const double* s = slope + i;
      const double* c = count + i;
      const __m256d low = _mm256_max_pd(behind(s, c, dd), behind(s + 4, c + 4, dd));
      const __m256d high = _mm256_max_pd(behind(s + 8, c + 8, dd), behind(s + 12, c + 12, dd));
      const __m256d top = _mm256_max_pd(low, high);
      where = _mm256_blendv_pd(where, here, _mm256_cmp_pd(top, best, _CMP_GT_OQ));
      best = _mm256_max_pd(best, top);
      here = _mm256_add_pd(here, _mm256_set1_pd(kBlendPad));
    }
    const __m256d top = largest(best);
    const __m256d is_top = _mm256_cmp_pd(best, top, _CMP_EQ_OQ);
    const auto start = static_cast<int64_t>(_mm256_cvtsd_f64(
        smallest(_mm256_blendv_pd(_mm256_set1_pd(kNever), where, is_top))));
    int leaders = 0;
    for (int lane = 0; lane < kBlendPad; lane += 4) {
      const __m256d value = behind(slope + start + lane, count + start + lane, dd);
      leaders |= _mm256_movemask_pd(_mm256_cmp_pd(value, top, _CMP_EQ_OQ)) << lane;
    }
    return start + __builtin_ctz(static_cast<unsigned>(leaders));
  }

  static constexpr int64_t kMostStretched = 128;

  static void draw_stretches(Stretches& run, int64_t draws) {
    if (run.size > 4) return draw_many(run, draws);
    if (run.limited) return draw_two_to_four<true>(run, draws);
    draw_two_to_four<false>(run, draws);
  }

  template <class Emit>
  static RaceResult race(const Race& race, double d, int64_t draws, const Emit& emit) {
    if (race.size <= 16) return race_in<4>(race, d, draws, emit);
    if (race.size <= 32) return race_in<8>(race, d, draws, emit);
    if (race.size <= 48) return race_in<12>(race, d, draws, emit);
    return race_in<16>(race, d, draws, emit);
  }

  MEGAINDEX_AVX2 static void spread(const double* slope, const double* count, int64_t size,
                                    double d, double* values, double* slots, int64_t num_slots) {
    const __m256d dd = _mm256_set1_pd(d);
    for (int64_t slot = 0; slot < num_slots; slot += 8) {
      __m256d low = _mm256_set1_pd(-kNever);
      __m256d high = low;
      for (int64_t i = slot; i < size; i += num_slots) {
        const __m256d a = behind(slope + i, count + i, dd);
        const __m256d b = behind(slope + i + 4, count + i + 4, dd);
        _mm256_store_pd(values + i, a);
        _mm256_store_pd(values + i + 4, b);
        low = _mm256_max_pd(low, a);
        high = _mm256_max_pd(high, b);
      }
      _mm256_store_pd(slots + slot, low);
      _mm256_store_pd(slots + slot + 4, high);
    }
  }

  MEGAINDEX_AVX2 static int64_t count_at_least(const double* x, int64_t size, double value) {
    const __m256d limit = _mm256_set1_pd(value);
    __m256i count = _mm256_setzero_si256();
    for (int64_t i = 0; i < size; i += 4) {
      const __m256d reached = _mm256_cmp_pd(_mm256_load_pd(x + i), limit, _CMP_GE_OQ);
      count = _mm256_sub_epi64(count, _mm256_castpd_si256(reached));
    }
    alignas(32) int64_t counts[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(counts), count);
    return counts[0] + counts[1] + counts[2] + counts[3];
  }

  MEGAINDEX_AVX2 static int64_t within(const double* values, const double* slope, int64_t size,
                                       const Reach& r, int32_t* places) {
    const __m256d reach0 = _mm256_set1_pd(r.reach[0]), least0 = _mm256_set1_pd(r.least[0]);
    const __m256d reach1 = _mm256_set1_pd(r.reach[1]), least1 = _mm256_set1_pd(r.least[1]);
    int64_t found = 0;
    for (int64_t start = 0; start < size; start += 64) {
      uint64_t reached = 0;
      const int64_t stop = std::min<int64_t>(64, size - start);
      for (int64_t i = 0; i < stop; i += 4) {
        const __m256d v = _mm256_load_pd(values + start + i);
        const __m256d s = _mm256_load_pd(slope + start + i);
        const __m256d at0 = _mm256_add_pd(v, _mm256_mul_pd(s, reach0));
        const __m256d at1 = _mm256_add_pd(v, _mm256_mul_pd(s, reach1));
        const __m256d any = _mm256_or_pd(_mm256_cmp_pd(at0, least0, _CMP_GE_OQ),
                                         _mm256_cmp_pd(at1, least1, _CMP_GE_OQ));
        reached |= static_cast<uint64_t>(_mm256_movemask_pd(any)) << i;
      }
      for (; reached != 0; reached &= reached - 1) {
        places[found++] = static_cast<int32_t>(start + __builtin_ctzll(reached));
      }
    }
    return found;
  }

 private:
  template <bool kLimited>
  static void draw_two_to_four(Stretches& run, int64_t draws) {
    if (run.size == 2) return draw_few<2, kLimited>(run, draws);
    if (run.size == 3) return draw_few<3, kLimited>(run, draws);
    draw_few<4, kLimited>(run, draws);
  }

  // A stretch is a lane of two registers. The counts of the N datasets stay in registers; outputs
  // are written for four draws at once.
  template <int N, bool kLimited>
  MEGAINDEX_AVX2 static void draw_few(Stretches& run, int64_t draws) {
    constexpr int V = kStretches / 4;
    const __m256d one = _mm256_set1_pd(1);
    const __m256d never = _mm256_set1_pd(kNever);
    __m256d slope[N], number[N], count[N][V], d[V];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      slope[i] = _mm256_set1_pd(run.slope[i]);
      // in the high bytes, from which it is shifted down
      number[i] = _mm256_castsi256_pd(_mm256_set1_epi64x(int64_t{i} << (64 - 8 * run.index_size)));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) count[i][v] = _mm256_load_pd(run.count + kStretches * i + 4 * v);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) d[v] = _mm256_loadu_pd(run.draws + 4 * v);
    const __m128i shift = _mm_cvtsi64_si128(8 * run.index_size);
    alignas(32) double sample[4][kStretches];
    for (int64_t k = 0; k < draws; k += 4) {
      __m256i dataset[V]{};
#pragma GCC unroll 1
      for (int j = 0; j < 4; ++j) {  // unrolled, it would not find registers for the counts
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          __m256d top = _mm256_sub_pd(_mm256_mul_pd(slope[0], d[v]), count[0][v]);
          __m256d taken = count[0][v];
          __m256d which = _mm256_setzero_pd();
          __m256d leads[N];
#pragma GCC unroll 8
          for (int i = 1; i < N; ++i) {
            const __m256d value = _mm256_sub_pd(_mm256_mul_pd(slope[i], d[v]), count[i][v]);
            leads[i] = _mm256_cmp_pd(value, top, _CMP_GT_OQ);
            top = _mm256_max_pd(top, value);
            taken = _mm256_blendv_pd(taken, count[i][v], leads[i]);
            which = _mm256_blendv_pd(which, number[i], leads[i]);
          }
          _mm256_store_pd(sample[j] + 4 * v, taken);
          dataset[v] =
              _mm256_or_si256(_mm256_srl_epi64(dataset[v], shift), _mm256_castpd_si256(which));
          d[v] = _mm256_add_pd(d[v], one);
          __m256d later = _mm256_setzero_pd();  // where a dataset after i is drawn
#pragma GCC unroll 8
          for (int i = N - 1; i >= 0; --i) {
            __m256d next = _mm256_add_pd(count[i][v], one);
            if (kLimited) {
              const __m256d limit = _mm256_broadcast_sd(run.limit + i);
              next = _mm256_blendv_pd(next, never, _mm256_cmp_pd(next, limit, _CMP_EQ_OQ));
            }
            if (i == 0) {
              count[0][v] = _mm256_blendv_pd(next, count[0][v], later);
            } else {
              count[i][v] = _mm256_blendv_pd(count[i][v], next, _mm256_andnot_pd(later, leads[i]));
              later = _mm256_or_pd(later, leads[i]);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        if (run.sample[0] != nullptr) store_samples(sample[0] + 4 * v, run.sample + 4 * v, k);
        if (run.dataset[0] == nullptr) continue;
        store_dataset(_mm256_castsi256_si128(dataset[v]), run, 4 * v, k);
        store_dataset(_mm256_extracti128_si256(dataset[v], 1), run, 4 * v + 2, k);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) _mm256_store_pd(run.count + kStretches * i + 4 * v, count[i][v]);
    }
    advance(run, draws);
  }

  // Write the counts, whole numbers below 2**52, of four draws in four stretches.
  MEGAINDEX_AVX2_INLINE static void store_samples(const double* count, int64_t* const* out,
                                                  int64_t k) {
    const __m256d magic = _mm256_set1_pd(0x1p52);  // a sum with it has the number in its low bits
    __m256d x[4];
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
      const __m256d row = _mm256_load_pd(count + kStretches * j);
      x[j] = _mm256_xor_pd(_mm256_add_pd(row, magic), magic);
    }
    const __m256d even[2] = {_mm256_unpacklo_pd(x[0], x[1]), _mm256_unpacklo_pd(x[2], x[3])};
    const __m256d odd[2] = {_mm256_unpackhi_pd(x[0], x[1]), _mm256_unpackhi_pd(x[2], x[3])};
    store(out[0] + k, _mm256_permute2f128_pd(even[0], even[1], 0x20));
    store(out[1] + k, _mm256_permute2f128_pd(odd[0], odd[1], 0x20));
    store(out[2] + k, _mm256_permute2f128_pd(even[0], even[1], 0x31));
    store(out[3] + k, _mm256_permute2f128_pd(odd[0], odd[1], 0x31));
  }

  MEGAINDEX_AVX2_INLINE static void store(int64_t* out, __m256d bits) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_castpd_si256(bits));
  }

  // Write the datasets of four draws in two stretches.
  MEGAINDEX_AVX2_INLINE static void store_dataset(__m128i numbers, const Stretches& run,
                                                  int first, int64_t k) {
    const int64_t word[2] = {_mm_cvtsi128_si64(numbers), _mm_extract_epi64(numbers, 1)};
    for (int lane = 0; lane < 2; ++lane) {
      char* to = static_cast<char*>(run.dataset[first + lane]) + k * run.index_size;
      if (run.index_size == 2) {
        std::memcpy(to, &word[lane], 8);
      } else {
        const auto bytes = static_cast<uint32_t>(static_cast<uint64_t>(word[lane]) >> 32);
        std::memcpy(to, &bytes, 4);
      }
    }
  }

  // The same for any number of datasets, with the counts in memory.
  MEGAINDEX_AVX2 static void draw_many(Stretches& run, int64_t draws) {
    constexpr int V = kStretches / 4;
    const __m256d one = _mm256_set1_pd(1);
    __m256d d[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) d[v] = _mm256_loadu_pd(run.draws + 4 * v);
    for (int64_t k = 0; k < draws; ++k) {
      __m256d top[V], which[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        top[v] = _mm256_set1_pd(-kNever);
        which[v] = _mm256_setzero_pd();
      }
      __m256i number = _mm256_setzero_si256();
      for (int64_t i = 0; i < run.size; ++i) {
        const __m256d slope = _mm256_broadcast_sd(run.slope + i);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const __m256d count = _mm256_load_pd(run.count + kStretches * i + 4 * v);
          const __m256d value = _mm256_sub_pd(_mm256_mul_pd(slope, d[v]), count);
          const __m256d leads = _mm256_cmp_pd(value, top[v], _CMP_GT_OQ);
          top[v] = _mm256_max_pd(top[v], value);
          which[v] = _mm256_blendv_pd(which[v], _mm256_castsi256_pd(number), leads);
        }
        number = _mm256_add_epi64(number, _mm256_set1_epi64x(1));
      }
      alignas(32) int64_t drawn[kStretches];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        store(drawn + 4 * v, which[v]);
        d[v] = _mm256_add_pd(d[v], one);
      }
#pragma GCC unroll 8
      for (int lane = 0; lane < kStretches; ++lane) {
        const int64_t i = drawn[lane];
        double& count = run.count[kStretches * i + lane];
        if (run.sample[0] != nullptr) run.sample[lane][k] = static_cast<int64_t>(count);
        if (run.dataset[0] != nullptr) {
          if (run.index_size == 2) {
            static_cast<int16_t*>(run.dataset[lane])[k] = static_cast<int16_t>(i);
          } else {
            static_cast<uint8_t*>(run.dataset[lane])[k] = static_cast<uint8_t>(i);
          }
        }
        const double more = count + 1;
        count = more == run.limit[i] ? kNever : more;
      }
    }
    advance(run, draws);
  }

  static void advance(Stretches& run, int64_t draws) {
    for (int lane = 0; lane < kStretches; ++lane) {
      run.draws[lane] += static_cast<double>(draws);
      if (run.sample[0] != nullptr) run.sample[lane] += draws;
      if (run.dataset[0] != nullptr) {
        run.dataset[lane] = static_cast<char*>(run.dataset[lane]) + draws * run.index_size;
      }
    }
  }

  // The counts stay in V registers. The comparison that finds the draw also adds it to them, so
  // that the next draw does not depend on the lane number, which only the output needs.
  template <int V, class Emit>
  MEGAINDEX_AVX2 static RaceResult race_in(const Race& race, double d, int64_t draws,
                                           const Emit& emit) {
    const __m256d zero = _mm256_setzero_pd();
    const __m256d one = _mm256_set1_pd(1);
    // The counts are negated because GCC merges plain copies into narrower moves, which stall the
    // wide loads that follow.
    __m256d minus[V];
    for (int v = 0; v < V; ++v) minus[v] = _mm256_sub_pd(zero, _mm256_load_pd(race.count + 4 * v));
    RaceResult result{draws, 0, 0};
    for (int64_t k = 0; k < draws; ++k, d += 1) {
      const __m256d dd = _mm256_set1_pd(d);
      __m256d value[V];
      for (int v = 0; v < V; ++v) {
        value[v] = _mm256_add_pd(_mm256_mul_pd(_mm256_load_pd(race.slope + 4 * v), dd), minus[v]);
      }
      const __m256d top = largest(max_of<V>(value));
      __m256d leads[V];
      uint64_t leaders = 0;
      for (int v = 0; v < V; ++v) {
        leads[v] = _mm256_cmp_pd(value[v], top, _CMP_EQ_OQ);
        leaders |= static_cast<uint64_t>(_mm256_movemask_pd(leads[v])) << (4 * v);
      }
      const double best = _mm256_cvtsd_f64(top);
      if (best < race.floor[0].at(d) || best < race.floor[1].at(d)) {
        result = {k, 0, best};
        break;
      }
      if ((leaders & race.special) != 0) {
        result = {k, leaders, best};
        break;
      }
      const int lane = __builtin_ctzll(leaders);
      if ((leaders & (leaders - 1)) != 0) {
        const int64_t* only = kOneHot.lanes + kMaxLanes - lane;
        for (int v = 0; v < V; ++v) {
          leads[v] = _mm256_and_pd(leads[v], _mm256_castsi256_pd(_mm256_loadu_si256(
                                                 reinterpret_cast<const __m256i*>(only + 4 * v))));
        }
      }
      for (int v = 0; v < V; ++v) minus[v] = _mm256_sub_pd(minus[v], _mm256_and_pd(leads[v], one));
      emit(k, lane);
    }
    for (int v = 0; v < V; ++v) _mm256_store_pd(race.count + 4 * v, _mm256_sub_pd(zero, minus[v]));
    return result;
  }

  template <int V>
  MEGAINDEX_AVX2 static __m256d max_of(const __m256d* value) {
    __m256d top[V];
    for (int v = 0; v < V; ++v) top[v] = value[v];
    for (int width = V; width > 1; width = (width + 1) / 2) {
      for (int v = 0; v < width / 2; ++v) top[v] = _mm256_max_pd(top[v], top[v + (width + 1) / 2]);
    }
    return top[0];
  }
};

}  // namespace megaindex
#endif
