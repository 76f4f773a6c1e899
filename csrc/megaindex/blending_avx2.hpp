// The vector operations of blending_vector.hpp with AVX2 instructions.
#pragma once

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

  template <class Emit>
  static RaceResult race(const Race& race, double d, int64_t draws, const Emit& emit) {
    const bool plain = race.special == 0 && race.floor[0].level == -kNever;
    if (race.size <= 4 && plain) return race_of_4(race, d, draws, emit);
    if (race.size <= 8 && plain) return race_of_8(race, d, draws, emit);
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
  // Up to 4 lanes without floors, even lanes in one register and odd lanes in another. How far each
  // lane is behind at the next draw is computed both with and without this draw, which shortens the
  // chain of dependent instructions from one draw to the next.
  template <class Emit>
  MEGAINDEX_AVX2 static RaceResult race_of_4(const Race& race, double d, int64_t draws,
                                             const Emit& emit) {
    const __m128d one = _mm_set1_pd(1);
    const __m128d slope[2] = {_mm_setr_pd(race.slope[0], race.slope[2]),
                              _mm_setr_pd(race.slope[1], race.slope[3])};
    __m128d count[2] = {_mm_setr_pd(race.count[0], race.count[2]),
                        _mm_setr_pd(race.count[1], race.count[3])};
    __m128d value[2];
    for (int v = 0; v < 2; ++v) {
      value[v] = _mm_sub_pd(_mm_mul_pd(slope[v], _mm_set1_pd(d)), count[v]);
    }
    for (int64_t k = 0; k < draws; ++k) {
      d += 1;
      // among equals the even lane of a pair wins, and the left of the two pairs
      const __m128d even = _mm_cmpge_pd(value[0], value[1]);
      const __m128d pair = _mm_max_pd(value[0], value[1]);
      const __m128d other = _mm_permute_pd(pair, 1);
      const __m128d wins = _mm_blend_pd(_mm_cmpge_pd(pair, other), _mm_cmpgt_pd(pair, other), 0b10);
      const __m128d win[2] = {_mm_and_pd(wins, even), _mm_andnot_pd(even, wins)};
      for (int v = 0; v < 2; ++v) {
        const __m128d product = _mm_mul_pd(slope[v], _mm_set1_pd(d));
        const __m128d more = _mm_add_pd(count[v], one);
        value[v] =
            _mm_blendv_pd(_mm_sub_pd(product, count[v]), _mm_sub_pd(product, more), win[v]);
        count[v] = _mm_blendv_pd(count[v], more, win[v]);
      }
      emit(k, lane_of(_mm_movemask_pd(wins), _mm_movemask_pd(even)));
    }
    for (int v = 0; v < 2; ++v) {
      _mm_storel_pd(race.count + v, count[v]);
      _mm_storeh_pd(race.count + v + 2, count[v]);
    }
    return {draws, 0, 0};
  }

  // The same for up to 8 lanes: pairs, then pairs of pairs, then halves.
  template <class Emit>
  MEGAINDEX_AVX2 static RaceResult race_of_8(const Race& race, double d, int64_t draws,
                                             const Emit& emit) {
    const __m256d one = _mm256_set1_pd(1);
    const __m256d slope[2] = {every_other(race.slope), every_other(race.slope + 1)};
    __m256d count[2] = {every_other(race.count), every_other(race.count + 1)};
    __m256d value[2];
    for (int v = 0; v < 2; ++v) {
      value[v] = _mm256_sub_pd(_mm256_mul_pd(slope[v], _mm256_set1_pd(d)), count[v]);
    }
    for (int64_t k = 0; k < draws; ++k) {
      d += 1;
      const __m256d even = _mm256_cmp_pd(value[0], value[1], _CMP_GE_OQ);
      const __m256d pair = _mm256_max_pd(value[0], value[1]);
      const __m256d other_pair = _mm256_permute_pd(pair, 5);
      const __m256d half = _mm256_max_pd(pair, other_pair);
      const __m256d other_half = _mm256_permute2f128_pd(half, half, 1);
      const __m256d wins = _mm256_and_pd(
          _mm256_blend_pd(_mm256_cmp_pd(pair, other_pair, _CMP_GE_OQ),
                          _mm256_cmp_pd(pair, other_pair, _CMP_GT_OQ), 0b1010),
          _mm256_blend_pd(_mm256_cmp_pd(half, other_half, _CMP_GE_OQ),
                          _mm256_cmp_pd(half, other_half, _CMP_GT_OQ), 0b1100));
      const __m256d win[2] = {_mm256_and_pd(wins, even), _mm256_andnot_pd(even, wins)};
      for (int v = 0; v < 2; ++v) {
        const __m256d product = _mm256_mul_pd(slope[v], _mm256_set1_pd(d));
        const __m256d more = _mm256_add_pd(count[v], one);
        value[v] = _mm256_blendv_pd(_mm256_sub_pd(product, count[v]),
                                    _mm256_sub_pd(product, more), win[v]);
        count[v] = _mm256_blendv_pd(count[v], more, win[v]);
      }
      emit(k, lane_of(_mm256_movemask_pd(wins), _mm256_movemask_pd(even)));
    }
    alignas(32) double counts[2][4];
    for (int v = 0; v < 2; ++v) _mm256_store_pd(counts[v], count[v]);
    for (int lane = 0; lane < 8; ++lane) race.count[lane] = counts[lane % 2][lane / 2];
    return {draws, 0, 0};
  }

  // Return the winning lane of the winning pair.
  static int lane_of(int wins, int even) {
    const int pair = __builtin_ctz(static_cast<unsigned>(wins));
    return 2 * pair + 1 - (even >> pair & 1);
  }

  MEGAINDEX_AVX2 static __m256d every_other(const double* x) {
    return _mm256_setr_pd(x[0], x[2], x[4], x[6]);
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
