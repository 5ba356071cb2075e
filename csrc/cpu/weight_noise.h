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

// Rows o and o + 8 of the band, o = 0..7, for the tiles [tile, stop): 16 * (stop - tile) floats
// each.
BNUQ_CLONES [[gnu::unused]] static void weight_row_pair(
    float* __restrict__ out_lo, float* __restrict__ out_hi, Key sub, uint64_t replica,
    int64_t tile_o, int o, int64_t tile, int64_t stop) {
  float z[8][kCalls];
  for (; tile < stop; tile += kCalls / 4) {
#pragma omp simd
    for (int j = 0; j < kCalls; ++j) {
      const Words4 w =
          philox_at(sub, weight_index(tile_o, tile + (j >> 2), o * 4 + (j & 3)), replica);
      normal_pair(w.v[0], z[0][j], z[1][j]);
      normal_pair(w.v[1], z[2][j], z[3][j]);
      normal_pair(w.v[2], z[4][j], z[5][j]);
      normal_pair(w.v[3], z[6][j], z[7][j]);
    }
    const int calls = int(std::min<int64_t>(kCalls, (stop - tile) * 4));
    for (int j = 0; j < calls; ++j) {
      float* low = out_lo + (j >> 2) * kTile + 2 * (j & 3);
      float* high = out_hi + (j >> 2) * kTile + 2 * (j & 3);
      low[0] = z[0][j], low[1] = z[1][j], high[0] = z[2][j], high[1] = z[3][j];
      low[8] = z[4][j], low[9] = z[5][j], high[8] = z[6][j], high[9] = z[7][j];
    }
    out_lo += kCalls / 4 * kTile;
    out_hi += kCalls / 4 * kTile;
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
