// Instruction sets: the only header that asks for the compiler's target and the processor.
//
// A function marked MEGAINDEX_AVX2 is compiled for AVX2 whatever the flags of the build, and called
// only where has_avx2() is true. With other processors and compilers the mark is empty and
// has_avx2() constantly false, as under MEGAINDEX_WITHOUT_AVX2, by which tests run what they run.
// Code that uses AVX2 intrinsics stands under MEGAINDEX_HAS_AVX2.
#pragma once

// Clang defines __GNUC__ too
#if defined(__x86_64__) && defined(__GNUC__) && !defined(MEGAINDEX_WITHOUT_AVX2)
#include <immintrin.h>
#define MEGAINDEX_HAS_AVX2 1
#define MEGAINDEX_AVX2 __attribute__((target("avx2")))
#define MEGAINDEX_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline
#else
#define MEGAINDEX_AVX2
#endif

namespace megaindex {

inline bool has_avx2() {
#ifdef MEGAINDEX_HAS_AVX2
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

}  // namespace megaindex
