// The weights' noise in bands of 16 rows, the order in which the counter gives it: one Philox call
// holds two neighbours in each of two rows, 8 apart, and two columns, 8 apart.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../arithmetic.h"
#include "philox_words.h"

namespace bnuq {

inline int64_t tiles_of(int64_t n) {
  return ceil_div<int64_t>(n, kEdge);
}

// Words of the rows o and o + 8 of the band, o = 0..7, for the tiles [tile, stop): 8 a tile and
// row, and those of one tile more where their number is odd. `tile` is a multiple of 16: the low
// word of a counter does not overflow within a block.
inline void weight_row_pair(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t replica, int64_t tile_o, int o, int64_t tile,
    int64_t stop) {
  for (; tile < stop; tile += kCalls / 4, lo += 2 * kCalls, hi += 2 * kCalls) {
    const int64_t calls = (4 * std::min<int64_t>(kCalls / 4, stop - tile) + 7) / 8 * 8;
    philox_words(lo, hi, sub, weight_index(tile_o, tile, o * 4), 32, replica, calls);
  }
}

// The same of one tile, for the rows o and o + 1, and o + 8 and o + 9: eight Philox calls are the
// least that are made together, and a row pair of one tile has four.
inline void weight_row_pairs_of_a_tile(
    uint32_t* lo, uint32_t* hi, Key sub, uint64_t replica, int64_t tile_o, int o, int64_t tile) {
  philox_words(lo, hi, sub, weight_index(tile_o, tile, o * 4), 4, replica, 8);
}

constexpr int64_t kWide = 6;  // tiles: in narrower rows what is set up for each costs more

// row(o, z) for every row o < O of the pairs [begin, end), eight of which make a band, with the
// row's noise in the columns [16 * tile, 16 * stop). A row that takes what `for_normals` takes is
// given words where it is wide.
template <typename Row>
void for_row_pairs(
    Key sub, uint64_t replica, int64_t begin, int64_t end, int64_t O, int64_t tile, int64_t stop,
    const Row& row) {
  constexpr bool kTakesWords = std::is_invocable_v<Row, int64_t, const uint32_t*>;
  constexpr int64_t kWords = kEdge / 2;  // of a row of a tile
  const bool made = !kTakesWords || stop - tile < kWide;
  const int64_t width = (stop - tile + 1) / 2 * 2 * kWords;
  std::vector<uint32_t> words(2 * width);
  std::vector<float> z(made ? 4 * width : 0);
  uint32_t *lo = words.data(), *hi = lo + width;
  const uint32_t* all = lo;
  const float* noise = z.data();
  const auto hand_out = [&](int64_t o, int64_t at) {
    if (o >= O) return;
    if constexpr (kTakesWords)
      if (!made) return row(o, all + at);
    row(o, noise + 2 * at);
  };
  for (int64_t pair = begin, count; pair < end; pair += count) {
    const int64_t tile_o = pair / 8, o = tile_o * kEdge + pair % 8;
    count = stop - tile == 1 && pair % 2 == 0 && pair + 1 < end ? 2 : 1;
    if (o >= O) continue;
    if (count == 2)
      weight_row_pairs_of_a_tile(lo, hi, sub, replica, tile_o, pair % 8, tile);
    else
      weight_row_pair(lo, hi, sub, replica, tile_o, pair % 8, tile, stop);
    if (made) normal_pairs(z.data(), all, 2 * width);
    for (int64_t k = 0; k < count; ++k)
      hand_out(o + k, k * kWords), hand_out(o + k + 8, width + k * kWords);
  }
}

// The same of the band tile_o.
template <typename Row>
void for_band_rows(
    Key sub, uint64_t replica, int64_t tile_o, int64_t O, int64_t tile, int64_t stop,
    const Row& row) {
  for_row_pairs(sub, replica, tile_o * 8, tile_o * 8 + 8, O, tile, stop, row);
}

}  // namespace bnuq
