// Rows of a caller's array, and whether loops may be the ones compiled for AVX2.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define MEGAINDEX_HAS_AVX2_LOOPS 1
#endif

namespace megaindex {

template <class T>
struct Rows {
  T* data;         // null: not wanted
  int64_t stride;  // elements from one row to the next

  T* operator[](int64_t k) const { return data == nullptr ? nullptr : data + k * stride; }
};

inline bool has_avx2() {
#ifdef MEGAINDEX_HAS_AVX2_LOOPS
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

}  // namespace megaindex
