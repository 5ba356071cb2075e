// The weights' noise in bands of 16 rows, the order in which the counter gives it: one Philox call
// holds two neighbours in each of two rows, 8 apart, and two columns, 8 apart.
#pragma once
#include <algorithm>
#include <vector>

#include "../philox.h"
#include "simd.h"

namespace bnuq {

constexpr int kTile = 16;
constexpr int kCalls = 64;  // Philox calls made together: 16 tiles' worth of one row pair

inline int64_t tiles_of(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// The words of row o of a band go to `lo`, those of row o + 8 to `hi`: of each tile from `first` on
// four words of its left half, then four of its right one. `calls` is a multiple of 8, two tiles.
BNUQ_CLONES [[gnu::unused]] static void weight_words_portable(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
  uint32_t words[4][kCalls];
  const uint32_t low = uint32_t(first), high = uint32_t(first >> 32);
#pragma omp simd
  for (int64_t j = 0; j < calls; ++j) {
    const uint32_t lane = low + (uint32_t(j) >> 2) * 32 + (uint32_t(j) & 3);
    const Words4 w = philox(sub, lane, high, uint32_t(replica), uint32_t(replica >> 32));
    for (int k = 0; k < 4; ++k) words[k][j] = w.v[k];
  }
  for (int64_t j = 0; j < calls; j += 4, lo += 8, hi += 8) {
    std::copy_n(words[0] + j, 4, lo), std::copy_n(words[2] + j, 4, lo + 4);
    std::copy_n(words[1] + j, 4, hi), std::copy_n(words[3] + j, 4, hi + 4);
  }
}

#if defined(BNUQ_AVX512)
// The same by vpmuludq, which the compiler does not find: two and a half times as fast. A word sits
// in the low half of 64 bits; what is in the high half, a product does not read.
[[gnu::unused]] BNUQ_AVX512 static void weight_words_avx512(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
  const __m512i order =
      _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 8, 10, 12, 14, 24, 26, 28, 30);
  const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 32, 33, 34, 35);
  const __m512i factor0 = _mm512_set1_epi64(0xD2511F53), factor1 = _mm512_set1_epi64(0xCD9E8D57);
  for (int64_t j = 0; j < calls; j += 8) {
    __m512i a = _mm512_add_epi64(lanes, _mm512_set1_epi64(int64_t(first) + 8 * j));
    __m512i b = _mm512_set1_epi64(int64_t(first >> 32));
    __m512i c = _mm512_set1_epi64(int64_t(replica)), d = _mm512_srli_epi64(c, 32);
    Key key = sub;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m512i p0 = _mm512_mul_epu32(a, factor0), p1 = _mm512_mul_epu32(c, factor1);
      const __m512i high1 = _mm512_srli_epi64(p1, 32), high0 = _mm512_srli_epi64(p0, 32);
      a = _mm512_ternarylogic_epi64(high1, b, _mm512_set1_epi64(key.k0), 0x96);  // xor of three
      c = _mm512_ternarylogic_epi64(high0, d, _mm512_set1_epi64(key.k1), 0x96);
      b = p1, d = p0;
      key.k0 += 0x9E3779B9u, key.k1 += 0xBB67AE85u;
    }
    _mm512_storeu_si512(lo + 2 * j, _mm512_permutex2var_epi32(a, order, c));
    _mm512_storeu_si512(hi + 2 * j, _mm512_permutex2var_epi32(b, order, d));
  }
}
#endif

inline void weight_words(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
#if defined(BNUQ_AVX512)
  if (has_avx512()) return weight_words_avx512(lo, hi, sub, first, replica, calls);
#endif
  weight_words_portable(lo, hi, sub, first, replica, calls);
}

BNUQ_CLONES [[gnu::unused]] static void normal_pairs(
    float* __restrict__ z, const uint32_t* words, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) normal_pair(words[j], z[2 * j], z[2 * j + 1]);
}

// Rows o and o + 8 of the band, o = 0..7, for the tiles [tile, stop): 16 * (stop - tile) floats
// each, and one tile more is written where their number is odd. `tile` is a multiple of 16: the low
// word of a counter does not overflow within a block.
inline void weight_row_pair(
    float* out_lo, float* out_hi, Key sub, uint64_t replica, int64_t tile_o, int o, int64_t tile,
    int64_t stop) {
  alignas(64) uint32_t lo[2 * kCalls], hi[2 * kCalls];
  for (; tile < stop; tile += kCalls / 4, out_lo += 4 * kCalls, out_hi += 4 * kCalls) {
    const int64_t calls = (4 * std::min<int64_t>(kCalls / 4, stop - tile) + 7) / 8 * 8;
    weight_words(lo, hi, sub, weight_index(tile_o, tile, o * 4), replica, calls);
    normal_pairs(out_lo, lo, 2 * calls);
    normal_pairs(out_hi, hi, 2 * calls);
  }
}

// row(o, z) for every row o < O of the band tile_o, with the row's noise in the columns
// [16 * tile, 16 * stop).
template <typename Row>
void for_band_rows(
    Key sub, uint64_t replica, int64_t tile_o, int64_t O, int64_t tile, int64_t stop,
    const Row& row) {
  const int64_t width = (stop - tile + 1) / 2 * 2 * kTile;
  std::vector<float> z(2 * width);
  for (int o = 0; o < 8 && tile_o * kTile + o < O; ++o) {
    weight_row_pair(z.data(), z.data() + width, sub, replica, tile_o, o, tile, stop);
    row(tile_o * kTile + o, z.data());
    if (tile_o * kTile + o + 8 < O) row(tile_o * kTile + o + 8, z.data() + width);
  }
}

}  // namespace bnuq
