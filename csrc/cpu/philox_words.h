// Philox calls side by side on the CPU.
#pragma once
#include <algorithm>

#include "../philox.h"
#include "simd.h"

namespace bnuq {

constexpr int kCalls = 64;  // made together at most

// `calls`, a multiple of 8, at the indices first + j / 4 * stride + j % 4, whose low words do not
// overflow. Of each four calls their words 0 go to `lo`, then their words 2; words 1 and 3 to `hi`.
BNUQ_CLONES [[gnu::unused]] static void philox_words_portable(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint32_t stride, uint64_t replica,
    int64_t calls) {
  uint32_t words[4][kCalls];
  const uint32_t low = uint32_t(first), high = uint32_t(first >> 32);
#pragma omp simd
  for (int64_t j = 0; j < calls; ++j) {
    const uint32_t index = low + (uint32_t(j) >> 2) * stride + (uint32_t(j) & 3);
    const Words4 w = philox(sub, index, high, uint32_t(replica), uint32_t(replica >> 32));
    // Not in a loop, which would keep the compiler from vectorising this one.
    words[0][j] = w.v[0], words[1][j] = w.v[1], words[2][j] = w.v[2], words[3][j] = w.v[3];
  }
  for (int64_t j = 0; j < calls; j += 4, lo += 8, hi += 8) {
    std::copy_n(words[0] + j, 4, lo), std::copy_n(words[2] + j, 4, lo + 4);
    std::copy_n(words[1] + j, 4, hi), std::copy_n(words[3] + j, 4, hi + 4);
  }
}

// The same by vpmuludq, which the compiler does not find: two and a half times as fast. A word sits
// in the low half of 64 bits; what is in the high half, a product does not read. A round waits for
// the one before: K vectors in turns keep the processor busy.
#if defined(BNUQ_AVX512)
template <int K>
[[gnu::always_inline]] BNUQ_AVX512 inline void philox_vectors_avx512(
    uint32_t* lo, uint32_t* hi, Key key, uint64_t first, uint32_t stride, uint64_t replica) {
  const __m512i order =
      _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 8, 10, 12, 14, 24, 26, 28, 30);
  const __m512i four = _mm512_setr_epi64(0, 1, 2, 3, 0, 1, 2, 3);
  const __m512i lanes = _mm512_mask_add_epi64(four, 0xf0, four, _mm512_set1_epi64(stride));
  const __m512i factor0 = _mm512_set1_epi64(kPhiloxFactor0),
                factor1 = _mm512_set1_epi64(kPhiloxFactor1);
  __m512i a[K], b[K], c[K], d[K];
  for (int k = 0; k < K; ++k) {
    a[k] = _mm512_add_epi64(lanes, _mm512_set1_epi64(int64_t(first) + 2 * k * int64_t(stride)));
    b[k] = _mm512_set1_epi64(int64_t(first >> 32));
    c[k] = _mm512_set1_epi64(int64_t(replica)), d[k] = _mm512_srli_epi64(c[k], 32);
  }
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i k0 = _mm512_set1_epi64(key.k0), k1 = _mm512_set1_epi64(key.k1);
    for (int k = 0; k < K; ++k) {
      const __m512i p0 = _mm512_mul_epu32(a[k], factor0), p1 = _mm512_mul_epu32(c[k], factor1);
      const __m512i high1 = _mm512_srli_epi64(p1, 32), high0 = _mm512_srli_epi64(p0, 32);
      a[k] = _mm512_ternarylogic_epi64(high1, b[k], k0, 0x96);  // xor of three
      c[k] = _mm512_ternarylogic_epi64(high0, d[k], k1, 0x96);
      b[k] = p1, d[k] = p0;
    }
    key.k0 += kPhiloxStep0, key.k1 += kPhiloxStep1;
  }
  for (int k = 0; k < K; ++k) {
    _mm512_storeu_si512(lo + 16 * k, _mm512_permutex2var_epi32(a[k], order, c[k]));
    _mm512_storeu_si512(hi + 16 * k, _mm512_permutex2var_epi32(b[k], order, d[k]));
  }
}

[[gnu::unused]] BNUQ_AVX512 static void philox_words_avx512(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint32_t stride, uint64_t replica,
    int64_t calls) {
  int64_t j = 0;
  for (; j + 32 <= calls; j += 32)
    philox_vectors_avx512<4>(lo + 2 * j, hi + 2 * j, sub, first + j / 4 * stride, stride, replica);
  for (; j < calls; j += 8)
    philox_vectors_avx512<1>(lo + 2 * j, hi + 2 * j, sub, first + j / 4 * stride, stride, replica);
}

// The low words of a's four halves, then of c's.
BNUQ_AVX2 inline void store_low_words(uint32_t* out, __m256i a, __m256i c) {
  const __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(c), 0x88);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_castps_si256(both), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words);
}

[[gnu::unused]] BNUQ_AVX2 static void philox_words_avx2(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint32_t stride, uint64_t replica,
    int64_t calls) {
  constexpr int K = 2;
  const __m256i lanes = _mm256_setr_epi64x(0, 1, 2, 3);
  const __m256i factor0 = _mm256_set1_epi64x(kPhiloxFactor0),
                factor1 = _mm256_set1_epi64x(kPhiloxFactor1);
  for (int64_t j = 0; j < calls; j += 4 * K) {
    __m256i a[K], b[K], c[K], d[K];
    for (int k = 0; k < K; ++k) {
      const uint64_t index = first + (j / 4 + k) * stride;
      a[k] = _mm256_add_epi64(lanes, _mm256_set1_epi64x(int64_t(index)));
      b[k] = _mm256_set1_epi64x(int64_t(first >> 32));
      c[k] = _mm256_set1_epi64x(int64_t(replica)), d[k] = _mm256_srli_epi64(c[k], 32);
    }
    Key key = sub;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i k0 = _mm256_set1_epi64x(key.k0), k1 = _mm256_set1_epi64x(key.k1);
      for (int k = 0; k < K; ++k) {
        const __m256i p0 = _mm256_mul_epu32(a[k], factor0), p1 = _mm256_mul_epu32(c[k], factor1);
        const __m256i high1 = _mm256_srli_epi64(p1, 32), high0 = _mm256_srli_epi64(p0, 32);
        a[k] = _mm256_xor_si256(_mm256_xor_si256(high1, b[k]), k0);
        c[k] = _mm256_xor_si256(_mm256_xor_si256(high0, d[k]), k1);
        b[k] = p1, d[k] = p0;
      }
      key.k0 += kPhiloxStep0, key.k1 += kPhiloxStep1;
    }
    for (int k = 0; k < K; ++k) {
      store_low_words(lo + 2 * j + 8 * k, a[k], c[k]);
      store_low_words(hi + 2 * j + 8 * k, b[k], d[k]);
    }
  }
}
#endif

inline void philox_words(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint32_t stride, uint64_t replica,
    int64_t calls) {
#if defined(BNUQ_AVX512)
  if (has_avx512()) return philox_words_avx512(lo, hi, sub, first, stride, replica, calls);
  if (has_avx2()) return philox_words_avx2(lo, hi, sub, first, stride, replica, calls);
#endif
  philox_words_portable(lo, hi, sub, first, stride, replica, calls);
}

[[gnu::always_inline]] inline void make_pairs(
    float* __restrict__ z, const uint32_t* words, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) normal_pair(words[j], z[2 * j], z[2 * j + 1]);
}

BNUQ_CLONES [[gnu::unused]] static void normal_pairs(float* z, const uint32_t* words, int64_t n) {
  make_pairs(z, words, n);
}

// use(i, z, count) for the normals i .. i + count - 1 of n, which are made already.
template <typename Use>
[[gnu::always_inline]] inline void for_normals(const float* z, int64_t n, const Use& use) {
  use(0, z, n);
}

// The same of words, made where they are used, 32 or 16 at a time: what they are used with comes
// from memory while the next ones are computed. There are words for a multiple of 16 normals.
template <typename Use>
[[gnu::always_inline]] inline void for_normals(const uint32_t* words, int64_t n, const Use& use) {
  alignas(64) float z[32];
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) make_pairs(z, words + i / 2, 16), use(i, z, 32);
  for (; i + 16 <= n; i += 16) make_pairs(z, words + i / 2, 8), use(i, z, 16);
  if (i < n) make_pairs(z, words + i / 2, 8), use(i, z, n - i);
}

}  // namespace bnuq
