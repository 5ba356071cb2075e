// The weights of bayes_linear in memory, for a matrix product of torch's, and its biases: one
// thread a Philox call, eight weights. Bound by memory: 12 bytes read and written a weight.
#pragma once
#include "../linear.h"
#include "device.cuh"

namespace bnuq {

constexpr int kWeightsThreads = 256;

// Where a thread's eight weights lie: body(slot, o * I + i) for those inside the matrix.
template <typename Body>
BNUQ_DEVICE void for_lane_weights(
    int64_t tile_o, int64_t tile_i, int lane, int64_t O, int64_t I, const Body& body) {
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    const int64_t o = tile_o * 16 + lane / 4 + (slot >> 1 & 1) * 8;
    const int64_t i = tile_i * 16 + lane % 4 * 2 + (slot & 1) + (slot >> 2) * 8;
    if (o < O && i < I) body(slot, o * I + i);
  }
}

struct LaneOfTile {
  int64_t tile_o, tile_i, replica;
  int lane;
  bool inside;

  BNUQ_DEVICE LaneOfTile(int64_t R, int64_t O, int64_t I) {
    const int64_t tiles_o = ceil_div<int64_t>(O, 16), tiles_i = ceil_div<int64_t>(I, 16);
    const int64_t i = int64_t(blockIdx.x) * kWeightsThreads + threadIdx.x, tile = i / kWarp;
    lane = int(i % kWarp);
    tile_i = tile % tiles_i;
    tile_o = tile / tiles_i % tiles_o;
    replica = tile / tiles_i / tiles_o;
    inside = replica < R;
  }
};

template <typename acc_t>
__global__ void __launch_bounds__(kWeightsThreads) sample_weights_kernel(
    acc_t* __restrict__ weight, const acc_t* __restrict__ mu, const acc_t* __restrict__ sigma,
    const int64_t* __restrict__ seed, uint32_t stream, int64_t first, int64_t R, int64_t O,
    int64_t I) {
  const LaneOfTile at(R, O, I);
  if (!at.inside) return;
  const Key sub = subkey(seed[0], stream, kTagWeight);
  float z[8];
  normals8(
      philox_at(
          sub, weight_index(at.tile_o, at.tile_i, at.lane), uint64_t(seed[1] + first + at.replica)),
      z);
  acc_t* out = weight + at.replica * O * I;
  for_lane_weights(at.tile_o, at.tile_i, at.lane, O, I, [&](int slot, int64_t k) {
    out[k] = mu[k] + sigma[k] * acc_t(z[slot]);
  });
}

// The biases of all replicas, (T, O).
template <typename acc_t>
__global__ void __launch_bounds__(kWeightsThreads) sample_bias_kernel(
    acc_t* __restrict__ bias, const acc_t* __restrict__ mu, const acc_t* __restrict__ rho,
    const int64_t* __restrict__ seed, uint32_t stream, int64_t T, int64_t O) {
  const int64_t groups = ceil_div<int64_t>(O, 8);
  const int64_t i = int64_t(blockIdx.x) * kWeightsThreads + threadIdx.x;
  if (i >= T * groups) return;
  const int64_t t = i / groups, first = i % groups * 8;
  float z[8];
  normals8(philox_at(subkey(seed[0], stream, kTagBias), first >> 3, uint64_t(seed[1] + t)), z);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (first + e < O)
      bias[t * O + first + e] = mu[first + e] + softplus(rho[first + e]) * acc_t(z[e]);
}

// ---- launches ----------------------------------------------------------------------------------

template <typename acc_t>
void run_sample_bias(
    acc_t* bias, const acc_t* mu, const acc_t* rho, const int64_t* seed, uint32_t stream_id,
    int64_t T, int64_t O, cudaStream_t stream) {
  const auto kernel = sample_bias_kernel<acc_t>;
  const int64_t blocks = ceil_div<int64_t>(T * ceil_div<int64_t>(O, 8), kWeightsThreads);
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(blocks)), dim3(kWeightsThreads), 0, stream, bias, mu, rho, seed,
      stream_id, T, O);
}

inline dim3 weights_grid(int64_t R, int64_t O, int64_t I) {
  const int64_t lanes = R * ceil_div<int64_t>(O, 16) * ceil_div<int64_t>(I, 16) * kWarp;
  return dim3(unsigned(ceil_div<int64_t>(lanes, kWeightsThreads)));
}

template <typename acc_t>
void run_sample_weights(
    acc_t* weight, const acc_t* mu, const acc_t* sigma, const int64_t* seed, uint32_t stream_id,
    int64_t first, int64_t R, int64_t O, int64_t I, cudaStream_t stream) {
  const auto kernel = sample_weights_kernel<acc_t>;
  BNUQ_LAUNCH(
      kernel, weights_grid(R, O, I), dim3(kWeightsThreads), 0, stream, weight, mu, sigma, seed,
      stream_id, first, R, O, I);
}

}  // namespace bnuq
