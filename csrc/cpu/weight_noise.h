// The weights' noise in bands of 16 rows, the order in which the counter gives it: one Philox call
// holds two neighbours in each of two rows, 8 apart, and two columns, 8 apart.
#pragma once
#include <algorithm>

#include "../philox.h"
#include "simd.h"

namespace bnuq {

constexpr int kTile = 16;
constexpr int kCalls = 64;  // Philox calls made together: 16 tiles' worth of one row pair

// Rows o and o + 8 of the band, of width rounded up to whole tiles, for o = 0..7.
// out_lo and out_hi must hold 16 * ceil(I / 16) floats.
BNUQ_CLONES [[gnu::unused]] static void weight_row_pair(
    float* __restrict__ out_lo, float* __restrict__ out_hi, Key sub, uint64_t replica,
    int64_t tile_o, int o, int64_t tiles) {
  float z[8][kCalls];
  for (int64_t first = 0; first < tiles; first += kCalls / 4) {
    const int calls = int(std::min<int64_t>(kCalls, (tiles - first) * 4));
#pragma omp simd
    for (int j = 0; j < kCalls; ++j) {
      const Words4 w =
          philox_at(sub, weight_index(tile_o, first + (j >> 2), o * 4 + (j & 3)), replica);
      normal_pair(w.v[0], z[0][j], z[1][j]);
      normal_pair(w.v[1], z[2][j], z[3][j]);
      normal_pair(w.v[2], z[4][j], z[5][j]);
      normal_pair(w.v[3], z[6][j], z[7][j]);
    }
    for (int j = 0; j < calls; ++j) {
      const int64_t i = (first + (j >> 2)) * kTile + 2 * (j & 3);
      out_lo[i] = z[0][j];
      out_lo[i + 1] = z[1][j];
      out_hi[i] = z[2][j];
      out_hi[i + 1] = z[3][j];
      out_lo[i + 8] = z[4][j];
      out_lo[i + 9] = z[5][j];
      out_hi[i + 8] = z[6][j];
      out_hi[i + 9] = z[7][j];
    }
  }
}

}  // namespace bnuq
