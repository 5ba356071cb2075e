// 16-bit types to float32 and back, a block, eight or sixteen at once, and float32 in the same way;
// float16 by the processor's instructions if it has them.
#pragma once
#include <algorithm>
#include <type_traits>

#include "convert.h"
#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BNUQ_F16C __attribute__((target("avx,f16c")))
#endif

namespace bnuq {

#if defined(BNUQ_F16C)
inline bool has_f16c() {  // as every processor with AVX2; not all compilers can ask for it by name
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

// Each converts groups of eight and returns how many elements that were.
BNUQ_F16C inline int64_t load_groups(float* out, const Half* in, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
  }
  return i;
}

BNUQ_F16C inline int64_t store_groups(Half* out, const float* in, int64_t count) {
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
inline int64_t load_groups(float*, const Half*, int64_t) {
  return 0;
}
inline int64_t store_groups(Half*, const float*, int64_t) {
  return 0;
}
#endif

inline void load_all(float* out, const Half* in, int64_t count) {
  for (int64_t i = has_f16c() ? load_groups(out, in, count) : 0; i < count; ++i)
    out[i] = load(in[i]);
}

inline void store_all(Half* out, const float* in, int64_t count) {
  for (int64_t i = has_f16c() ? store_groups(out, in, count) : 0; i < count; ++i)
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

// Sixteens of a row into the order of load_eights of bfloat16.
template <typename acc_t>
void put_in_order(acc_t* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 16) std::swap_ranges(row + i + 4, row + i + 8, row + i + 8);
}

#if defined(BNUQ_AVX2)
// With kStream past the caches, which takes an `out` that is aligned to 32 bytes.
template <bool kStream>
BNUQ_AVX2 inline void store_256(void* out, __m256i bits) {
  if (kStream)
    _mm256_stream_si256(static_cast<__m256i*>(out), bits);
  else
    _mm256_storeu_si256(static_cast<__m256i*>(out), bits);
}
#endif

#if defined(BNUQ_FMA)
// Sixteen elements as two times eight: of bfloat16 the first are 0 to 3 and 8 to 11, for AVX2 puts
// words between words, and words together, within halves of a register.
struct Eights {
  __m256 first, second;
};

BNUQ_FMA inline Eights load_eights(const float* in) {
  return {_mm256_loadu_ps(in), _mm256_loadu_ps(in + 8)};
}

BNUQ_FMA inline Eights load_eights(const Half* in) {
  const __m128i* words = reinterpret_cast<const __m128i*>(in);
  return {_mm256_cvtph_ps(_mm_loadu_si128(words)), _mm256_cvtph_ps(_mm_loadu_si128(words + 1))};
}

BNUQ_FMA inline Eights load_eights(const BFloat16* in) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  const __m256i zero = _mm256_setzero_si256();
  return {
      _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, words)),
      _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, words))};
}

// Sixteen numbers that are in the order of load_eights, or are brought into it.
template <typename scalar_t, bool kOrdered>
BNUQ_FMA inline Eights in_order(const float* in) {
  const Eights v = load_eights(in);
  if (kOrdered || !std::is_same_v<scalar_t, BFloat16>) return v;
  return {
      _mm256_permute2f128_ps(v.first, v.second, 0x20),
      _mm256_permute2f128_ps(v.first, v.second, 0x31)};
}

BNUQ_FMA inline __m256i words_of(Half, Eights v) {
  const __m128i first = _mm256_cvtps_ph(v.first, _MM_FROUND_TO_NEAREST_INT);
  return _mm256_set_m128i(_mm256_cvtps_ph(v.second, _MM_FROUND_TO_NEAREST_INT), first);
}

// As Store<BFloat16>, but for the bits of a NaN, and for NaN whose lower half has its highest bit
// set, which may become a zero: none comes of numbers that are finite, infinite, of 16 bits or NAN.
BNUQ_FMA inline __m256i rounded_words(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v), half = _mm256_set1_epi32(0x7fff);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, half), odd), 16);
}

BNUQ_FMA inline __m256i words_of(BFloat16, Eights v) {
  return _mm256_packus_epi32(rounded_words(v.first), rounded_words(v.second));
}

template <bool kStream, typename half_t>
BNUQ_FMA inline void store_eights(half_t* out, Eights v) {
  store_256<kStream>(out, words_of(half_t(), v));
}

template <bool kStream>
BNUQ_FMA inline void store_eights(float* out, Eights v) {
  store_256<kStream>(out, _mm256_castps_si256(v.first));
  store_256<kStream>(out + 8, _mm256_castps_si256(v.second));
}
#endif

#if defined(BNUQ_AVX512)
// Sixteen lanes, or those of them that `some` names; a whole load or store costs less than a masked
// one.
constexpr __mmask16 kAllLanes = 0xffff;

inline __mmask16 first_lanes(int64_t count) {
  return __mmask16((1u << count) - 1);
}

BNUQ_AVX512 inline __m256i load_words(const void* in, __mmask16 some) {
  return some == kAllLanes ? _mm256_loadu_si256(static_cast<const __m256i*>(in))
                           : _mm256_maskz_loadu_epi16(some, in);
}

template <bool kStream>
BNUQ_AVX512 inline void store_words(void* out, __m256i words, __mmask16 some) {
  if (some != kAllLanes)
    _mm256_mask_storeu_epi16(out, some, words);
  else
    store_256<kStream>(out, words);
}

BNUQ_AVX512 inline __m512 load_sixteen(const float* in, __mmask16 some) {
  return some == kAllLanes ? _mm512_loadu_ps(in) : _mm512_maskz_loadu_ps(some, in);
}

BNUQ_AVX512 inline __m512 load_sixteen(const Half* in, __mmask16 some) {
  return _mm512_cvtph_ps(load_words(in, some));
}

BNUQ_AVX512 inline __m512 load_sixteen(const BFloat16* in, __mmask16 some) {
  const __m512i words = _mm512_cvtepu16_epi32(load_words(in, some));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

// With kStream past the caches, which takes an `out` that is aligned to its 64 bytes.
template <bool kStream = false>
BNUQ_AVX512 inline void store_sixteen(float* out, __m512 v, __mmask16 some) {
  if (some != kAllLanes)
    _mm512_mask_storeu_ps(out, some, v);
  else if (kStream)
    _mm512_stream_ps(out, v);
  else
    _mm512_storeu_ps(out, v);
}

template <bool kStream = false>
BNUQ_AVX512 inline void store_sixteen(Half* out, __m512 v, __mmask16 some) {
  store_words<kStream>(out, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), some);
}

// As Store<BFloat16>.
BNUQ_AVX512 inline __m256i rounded_words(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v), half = _mm512_set1_epi32(0x7fff);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, half), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i words = _mm512_srli_epi32(rounded, 16);
  const __m512i result = _mm512_mask_mov_epi32(words, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(result);
}

inline const bool kRoundsToBFloat16 = __builtin_cpu_supports("avx512bf16");

// By the processor's own rounding if it has one, which takes subnormal numbers for 0; written as
// its name, for a function with its intrinsic is not inlined into those without.
template <bool kStream = false>
BNUQ_AVX512 inline void store_sixteen(BFloat16* out, __m512 v, __mmask16 some) {
  constexpr int kSubnormal = 0x20;
  __m256i words;
  if (kRoundsToBFloat16 && _mm512_fpclass_ps_mask(v, kSubnormal) == 0)
    asm("vcvtneps2bf16 %1, %0" : "=v"(words) : "v"(v));
  else
    words = rounded_words(v);
  store_words<kStream>(out, words, some);
}
#endif

}  // namespace bnuq
