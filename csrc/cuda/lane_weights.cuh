// Where the eight weights lie that a lane has of a 16x16 tile, those of one Philox call.
#pragma once
#include "../linear.h"
#include "../philox.h"
#include "device.cuh"

namespace bnuq {

// body(slot, o * I + i) for those inside the matrix.
template <typename Body>
BNUQ_DEVICE void for_lane_weights(
    int64_t tile_o, int64_t tile_i, int lane, int64_t O, int64_t I, const Body& body) {
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    const int64_t o = tile_o * kEdge + lane / 4 + (slot >> 1 & 1) * 8;
    const int64_t i = tile_i * kEdge + lane % 4 * 2 + (slot & 1) + (slot >> 2) * 8;
    if (o < O && i < I) body(slot, o * I + i);
  }
}

// softplus(rho) of a lane's weights, 0 outside of the matrix. All loads come first: they would wait
// for one another's softplus.
template <typename acc_t>
BNUQ_DEVICE void lane_sigma(
    acc_t (&sigma)[8], const acc_t* rho, int64_t tile_o, int64_t tile_i, int lane, int64_t O,
    int64_t I) {
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) sigma[slot] = -acc_t(INFINITY);
  for_lane_weights(tile_o, tile_i, lane, O, I, [&](int slot, int64_t k) { sigma[slot] = rho[k]; });
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) sigma[slot] = softplus(sigma[slot]);
}

}  // namespace bnuq
