// philox_normal and snapshot_indices: one thread a Philox call, 4 bytes written for each normal.
#pragma once
#include "../philox.h"
#include "lane_weights.cuh"

namespace bnuq {

constexpr int kPhiloxThreads = 256;

// (T, C): a thread makes eight neighbours of one row.
template <typename = void>
__global__ void __launch_bounds__(kPhiloxThreads) vector_normal_kernel(
    float* __restrict__ out, const int64_t* __restrict__ seed, uint32_t stream, uint32_t tag,
    int64_t T, int64_t C) {
  const int64_t groups = ceil_div<int64_t>(C, 8);
  const int64_t i = int64_t(blockIdx.x) * kPhiloxThreads + threadIdx.x;
  if (i >= T * groups) return;
  const int64_t t = i / groups, first = i % groups * 8;
  float z[8];
  normals8(philox_at(subkey(seed[0], stream, tag), first >> 3, uint64_t(seed[1] + t)), z);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (first + e < C) out[t * C + first + e] = z[e];
}

// (T, O, I): a thread makes the eight numbers of one lane of one 16x16 tile.
template <typename = void>
__global__ void __launch_bounds__(kPhiloxThreads) weight_normal_kernel(
    float* __restrict__ out, const int64_t* __restrict__ seed, uint32_t stream, uint32_t tag,
    int64_t T, int64_t O, int64_t I) {
  const int64_t tiles_o = ceil_div<int64_t>(O, kEdge), tiles_i = ceil_div<int64_t>(I, kEdge);
  const int64_t i = int64_t(blockIdx.x) * kPhiloxThreads + threadIdx.x;
  if (i >= T * tiles_o * tiles_i * kWarp) return;
  const int lane = int(i % kWarp);
  const int64_t tile = i / kWarp, tile_i = tile % tiles_i, tile_o = tile / tiles_i % tiles_o;
  const int64_t t = tile / tiles_i / tiles_o;
  float z[8];
  normals8(
      philox_at(
          subkey(seed[0], stream, tag), weight_index(tile_o, tile_i, lane), uint64_t(seed[1] + t)),
      z);
  float* replica = out + t * O * I;
  for_lane_weights(tile_o, tile_i, lane, O, I, [&](int slot, int64_t k) { replica[k] = z[slot]; });
}

template <typename = void>
__global__ void __launch_bounds__(kPhiloxThreads) snapshot_indices_kernel(
    int64_t* __restrict__ out, const int64_t* __restrict__ seed, int64_t B, int64_t T) {
  const int64_t t = int64_t(blockIdx.x) * kPhiloxThreads + threadIdx.x;
  if (t < T) out[t] = snapshot_at(seed[0], uint64_t(seed[1] + t), B);
}

// ---- launches ----------------------------------------------------------------------------------

inline unsigned philox_blocks(int64_t threads) {
  return unsigned(ceil_div<int64_t>(threads, kPhiloxThreads));
}

inline void run_vector_normal(
    float* out, const int64_t* seed, uint32_t stream_id, uint32_t tag, int64_t T, int64_t C,
    cudaStream_t stream) {
  const unsigned blocks = philox_blocks(T * ceil_div<int64_t>(C, 8));
  const auto kernel = vector_normal_kernel<>;
  BNUQ_LAUNCH(
      kernel, dim3(blocks), dim3(kPhiloxThreads), 0, stream, out, seed, stream_id, tag, T, C);
}

inline void run_weight_normal(
    float* out, const int64_t* seed, uint32_t stream_id, uint32_t tag, int64_t T, int64_t O,
    int64_t I, cudaStream_t stream) {
  const unsigned blocks =
      philox_blocks(T * ceil_div<int64_t>(O, kEdge) * ceil_div<int64_t>(I, kEdge) * kWarp);
  const auto kernel = weight_normal_kernel<>;
  BNUQ_LAUNCH(
      kernel, dim3(blocks), dim3(kPhiloxThreads), 0, stream, out, seed, stream_id, tag, T, O, I);
}

inline void run_snapshot_indices(
    int64_t* out, const int64_t* seed, int64_t B, int64_t T, cudaStream_t stream) {
  const auto kernel = snapshot_indices_kernel<>;
  BNUQ_LAUNCH(kernel, dim3(philox_blocks(T)), dim3(kPhiloxThreads), 0, stream, out, seed, B, T);
}

}  // namespace bnuq
