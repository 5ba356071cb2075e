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

// out[calls * k + j] = word k of call j: calls of four lanes in each of the tiles from `first` on.
BNUQ_CLONES [[gnu::unused]] static void weight_words(
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
