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

// out[calls * k + j] = word k of call j: calls of four lanes in each of the tiles from `first` on,
// a multiple of 16 of them.
BNUQ_CLONES [[gnu::unused]] static void weight_words_portable(
    uint32_t* __restrict__ out, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
  const uint32_t low = uint32_t(first), high = uint32_t(first >> 32);
#pragma omp simd
  for (int64_t j = 0; j < calls; ++j) {
    const uint32_t lane = low + (uint32_t(j) >> 2) * 32 + (uint32_t(j) & 3);
    const Words4 w = philox(sub, lane, high, uint32_t(replica), uint32_t(replica >> 32));
    out[j] = w.v[0], out[calls + j] = w.v[1];
    out[2 * calls + j] = w.v[2], out[3 * calls + j] = w.v[3];
  }
}

#if defined(BNUQ_AVX512)
// The same by vpmuludq, which the compiler does not find: two and a half times as fast. A word sits
// in the low half of 64 bits; what is in the high half, a product does not read.
[[gnu::unused]] BNUQ_AVX512 static void weight_words_avx512(
    uint32_t* out, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
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
    const __m512i words[] = {a, b, c, d};
    for (int k = 0; k < 4; ++k)
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(out + k * calls + j), _mm512_cvtepi64_epi32(words[k]));
  }
}
#endif

inline void weight_words(uint32_t* out, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
#if defined(BNUQ_AVX512)
  if (has_avx512()) return weight_words_avx512(out, sub, first, replica, calls);
#endif
  weight_words_portable(out, sub, first, replica, calls);
}

BNUQ_CLONES [[gnu::unused]] static void normal_pairs(
    float* __restrict__ z, const uint32_t* words, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) normal_pair(words[j], z[2 * j], z[2 * j + 1]);
}

// Rows o and o + 8 of the band, o = 0..7, for the tiles [tile, stop): 16 * (stop - tile) floats
// each. `tile` is a multiple of 16: the low word of a counter does not overflow within a block.
inline void weight_row_pair(
    float* out_lo, float* out_hi, Key sub, uint64_t replica, int64_t tile_o, int o, int64_t tile,
    int64_t stop) {
  alignas(64) uint32_t words[4 * kCalls];
  alignas(64) float z[8 * kCalls];
  for (; tile < stop; tile += kCalls / 4) {
    const int64_t tiles = std::min<int64_t>(kCalls / 4, stop - tile);
    const int64_t calls = (4 * tiles + 15) / 16 * 16;  // whole vectors
    weight_words(words, sub, weight_index(tile_o, tile, o * 4), replica, calls);
    normal_pairs(z, words, 4 * calls);
    for (int64_t t = 0; t < tiles; ++t, out_lo += kTile, out_hi += kTile) {
      const float* from = z + 8 * t;
      std::copy_n(from, 8, out_lo);
      std::copy_n(from + 2 * calls, 8, out_hi);
      std::copy_n(from + 4 * calls, 8, out_lo + 8);
      std::copy_n(from + 6 * calls, 8, out_hi + 8);
    }
  }
}

// row(o, z) for every row o < O of the band tile_o, with the row's noise in the columns
// [16 * tile, 16 * stop).
template <typename Row>
void for_band_rows(
    Key sub, uint64_t replica, int64_t tile_o, int64_t O, int64_t tile, int64_t stop,
    const Row& row) {
  const int64_t width = (stop - tile) * kTile;
  std::vector<float> z(2 * width);
  for (int o = 0; o < 8 && tile_o * kTile + o < O; ++o) {
    weight_row_pair(z.data(), z.data() + width, sub, replica, tile_o, o, tile, stop);
    row(tile_o * kTile + o, z.data());
    if (tile_o * kTile + o + 8 < O) row(tile_o * kTile + o + 8, z.data() + width);
  }
}

}  // namespace bnuq
