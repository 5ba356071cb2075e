// Blocks of 16-bit types to float32 and back; float16 by the processor's instructions if it has
// them.
#pragma once
#include "convert.h"
#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BNUQ_F16C __attribute__((target("avx,f16c")))
#endif

namespace bnuq {

#if defined(BNUQ_F16C)
inline bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}

// Each converts groups of eight and returns how many elements that were.
BNUQ_F16C inline int64_t load_eights(float* out, const Half* in, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
  }
  return i;
}

BNUQ_F16C inline int64_t store_eights(Half* out, const float* in, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bits);
  }
  return i;
}
#else
inline bool has_f16c() {
  return false;
}
inline int64_t load_eights(float*, const Half*, int64_t) {
  return 0;
}
inline int64_t store_eights(Half*, const float*, int64_t) {
  return 0;
}
#endif

inline void load_all(float* out, const Half* in, int64_t count) {
  for (int64_t i = has_f16c() ? load_eights(out, in, count) : 0; i < count; ++i)
    out[i] = load(in[i]);
}

inline void store_all(Half* out, const float* in, int64_t count) {
  for (int64_t i = has_f16c() ? store_eights(out, in, count) : 0; i < count; ++i)
    out[i] = store<Half>(in[i]);
}

BNUQ_CLONES [[gnu::unused]] static void load_all(float* out, const BFloat16* in, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = load(in[i]);
}

BNUQ_CLONES [[gnu::unused]] static void store_all(BFloat16* out, const float* in, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = store<BFloat16>(in[i]);
}

}  // namespace bnuq
