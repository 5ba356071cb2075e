// BNUQ_CLONES: compile a loop for AVX-512, AVX2 and the baseline, and choose when the library is
// loaded. With BNUQ_AVX2_ONLY a processor with AVX-512 runs what others do.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__) && \
    defined(__GNUC__) && __GNUC__ >= 11
#if __GNUC__ >= 12
#define BNUQ_V3 "arch=x86-64-v3"
#else  // which knows no levels: without fused multiply-add, it must not meet loops that have it
#define BNUQ_V3 "avx2"
#undef BNUQ_AVX2_ONLY
#define BNUQ_AVX2_ONLY
#endif
#if defined(BNUQ_AVX2_ONLY)
#define BNUQ_CLONES __attribute__((target_clones("default", BNUQ_V3)))
#else
#define BNUQ_CLONES __attribute__((target_clones("default", BNUQ_V3, "arch=x86-64-v4")))
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // inside GCC 12's header
#include <immintrin.h>
#pragma GCC diagnostic pop

// For functions that are written with a processor's own operations: call them where it has them.
#define BNUQ_AVX2 __attribute__((target("avx2")))
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2");
}
#if __GNUC__ >= 12  // on what the clones for x86-64-v3 run on, whose multiply-adds are fused too
#define BNUQ_FMA __attribute__((target("avx2,fma,f16c")))
inline bool has_fma() {
  return __builtin_cpu_supports("x86-64-v3");
}
#endif
#define BNUQ_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx512cd")))
inline bool has_avx512() {
#if defined(BNUQ_AVX2_ONLY)
  return false;
#else
  return __builtin_cpu_supports("x86-64-v4");
#endif
}
#else
#define BNUQ_CLONES
#endif

// Of a lambda in a clone, which would be compiled for the baseline by itself.
#define BNUQ_INLINE __attribute__((always_inline))
