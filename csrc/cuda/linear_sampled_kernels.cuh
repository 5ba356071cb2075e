// bayes_linear by torch's products in float32: the weights of a chunk of replicas in memory, and
// the sums over replicas of the gradients by them.
//
// The floor is bytes: a weight's 4 are written once, and read once by the product, from the
// second-level cache.
#pragma once
#include "linear_direct_kernels.cuh"
#include "operand_kernels.cuh"

namespace bnuq {

struct SampleArgs {
  const float *mu, *rho;            // (O, I)
  const float *bias_mu, *bias_rho;  // (O,) or null
  const int64_t* seed;
  float* weight;              // (R, O, I)
  float* y;                   // (R, N, O), whose rows begin with the biases; null without them
  int64_t first, R, N, O, I;  // replicas first .. first + R - 1
  uint32_t stream;
  bool wide;  // two neighbours lie on 8 bytes
};

BNUQ_DEVICE void store_weights(
    float* weight, const float (&v)[8], const SampleArgs& p, int64_t tile_o, int64_t tile_i,
    int lane) {
  for_lane_weights(tile_o, tile_i, lane, p.O, p.I, [&](int slot, int64_t k) {
    if (!p.wide)
      weight[k] = v[slot];
    else if (slot % 2 == 0)
      *reinterpret_cast<float2*>(weight + k) = make_float2(v[slot], v[slot + 1]);
  });
}

constexpr int kBiasRows = kOperandThreads / kEdge;

// Of 16 outputs and replicas begin .. end - 1; 16 rows at a time. All threads of the block.
BNUQ_DEVICE void write_biases(
    const SampleArgs& p, int64_t tile_o, int64_t begin, int64_t end, uint64_t replica) {
  const int64_t o = tile_o * kEdge + threadIdx.x % kEdge;
  if (o >= p.O) return;
  const Key key = subkey(p.seed[0], p.stream, kTagBias);
  const float mean = p.bias_mu[o], sigma = softplus(p.bias_rho[o]);
  for (int64_t t = begin; t < end; ++t) {
    const float bias = mean + sigma * vector_normal(key, o, replica + t);
    for (int64_t n = threadIdx.x / kEdge; n < p.N; n += kBiasRows)
      p.y[(t * p.N + n) * p.O + o] = bias;
  }
}

// weight[t] = mu + sigma * eps[t], and the biases. A block has a row of tiles, or some of it, and
// some replicas; that of the first columns the biases of its rows too.
template <typename = void>
__global__ void __launch_bounds__(kOperandThreads) sample_weights_kernel(SampleArgs p) {
  const int64_t tile_o = blockIdx.x;
  const uint32_t places = uint32_t(ceil_div<int64_t>(p.I, kEdge) * kWarp);
  const int64_t begin = p.R * blockIdx.z / gridDim.z, end = p.R * (blockIdx.z + 1) / gridDim.z;
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const uint64_t replica = uint64_t(p.seed[1] + p.first);
  const uint32_t step = gridDim.y * kOperandThreads;
  for (uint32_t place = blockIdx.y * kOperandThreads + threadIdx.x; place < places; place += step) {
    const int lane = int(place % kWarp);
    const LaneWeights<float> w(p, tile_o, place / kWarp, lane);
    for (int64_t t = begin; t < end; ++t) {
      float z[8], weight[8];
      normals8(keys.words(uint32_t(tile_o), place, replica + t), z);
      w.sample(weight, z);
      store_weights(p.weight + t * p.O * p.I, weight, p, tile_o, place / kWarp, lane);
    }
  }
  if (p.y && blockIdx.y == 0) write_biases(p, tile_o, begin, end, replica);
}

struct ReduceArgs {
  const float* grad_weight;     // (R, O, I)
  const float* grad_y;          // (R, N, O)
  const float *rho, *bias_rho;  // (O, I), (O,)
  const int64_t* seed;
  float *grad_mu, *grad_rho;            // (O, I)
  float *grad_bias_mu, *grad_bias_rho;  // (O,) or null
  int64_t first, R, N, O, I;            // replicas first .. first + R - 1
  uint32_t stream;
  int parts = 1;  // the warps of a block that share a tile
};

// += where there are gradients of earlier replicas.
BNUQ_DEVICE void write_sum(float* to, float sum, int64_t first) {
  *to = first > 0 ? *to + sum : sum;
}

// By mu and sigma of a tile's weights, in two rows each.
BNUQ_DEVICE void sum_weights(
    float (&sums)[1][4][4], const ReduceArgs& p, int64_t tile_o, int64_t tile_i, int part) {
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const int lane = threadIdx.x % kWarp;
  for (int64_t t = part; t < p.R; t += p.parts) {
    const float* grad = p.grad_weight + t * p.O * p.I;
    float g[8] = {}, z[8];
    for_lane_weights(
        tile_o, tile_i, lane, p.O, p.I, [&](int slot, int64_t k) { g[slot] = grad[k]; });
    lane_noise(z, keys, tile_o, tile_i, lane, uint64_t(p.seed[1] + p.first + t));
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) {
      sums[0][slot / 4][slot % 4] += g[slot];
      sums[0][2 + slot / 4][slot % 4] += g[slot] * z[slot];
    }
  }
}

// Of 16 biases, by mu and sigma; a lane's is tile_o * 16 + lane % 16, every other row its own. The
// parts take turns at so many rows of a replica.
BNUQ_DEVICE void sum_biases(
    float (&sums)[2], const ReduceArgs& p, int64_t tile_o, int part, int parts, int64_t rows) {
  const int lane = threadIdx.x % kWarp;
  const int64_t o = tile_o * kEdge + lane % kEdge, blocks = ceil_div<int64_t>(p.N, rows);
  const Key key = subkey(p.seed[0], p.stream, kTagBias);
  for (int64_t k = part; k < p.R * blocks; k += parts) {
    const int64_t t = k / blocks, first = k % blocks * rows;
    const int64_t last = smaller<int64_t>(first + rows, p.N);
    float by_bias = 0.0f;
#pragma unroll 8
    for (int64_t n = first + lane / kEdge; n < last; n += 2)
      if (o < p.O) by_bias += p.grad_y[(t * p.N + n) * p.O + o];
    by_bias += __shfl_xor_sync(kAllLanes, by_bias, kEdge);
    sums[0] += by_bias;
    sums[1] += by_bias * vector_normal(key, o, uint64_t(p.seed[1] + p.first + t));
  }
}

BNUQ_DEVICE void write_bias_sums(const float (&sums)[2], const ReduceArgs& p, int64_t tile_o) {
  const int lane = threadIdx.x % kWarp;
  const int64_t o = tile_o * kEdge + lane;
  if (lane >= kEdge || o >= p.O) return;
  write_sum(p.grad_bias_mu + o, sums[0], p.first);
  write_sum(p.grad_bias_rho + o, sums[1] * sigmoid(p.bias_rho[o]), p.first);
}

// The sums over the replicas. A warp owns a tile of weights, or a part of its sum; beyond the last
// column of tiles, 16 biases.
template <typename = void>
__global__ void __launch_bounds__(kLinearThreads, 3) reduce_grads_kernel(ReduceArgs p) {
  BNUQ_DYNAMIC_SHARED(float, shared);
  const Lane at;
  const int part = at.warp % p.parts;
  const int64_t tile_i = blockIdx.x;
  const int64_t tile_o = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + at.warp / p.parts;
  const bool biases = tile_i * kEdge >= p.I;
  if (biases) {
    float sums[1][1][2] = {};
    sum_biases(sums[0][0], p, tile_o, part, p.parts, larger<int64_t>(1, p.N));
    add_parts(sums, shared, part, p.parts);
    if (part == 0) write_bias_sums(sums[0][0], p, tile_o);
    return;
  }
  float sums[1][4][4] = {};
  sum_weights(sums, p, tile_o, tile_i, part);
  add_parts(sums, shared, part, p.parts);
  if (part > 0) return;
  for_lane_weights(tile_o, tile_i, at.lane, p.O, p.I, [&](int slot, int64_t k) {
    write_sum(p.grad_mu + k, sums[0][slot / 4][slot % 4], p.first);
    write_sum(p.grad_rho + k, sums[0][2 + slot / 4][slot % 4] * sigmoid(p.rho[k]), p.first);
  });
}

constexpr int kReduceRows = 32;

// Those of the biases alone: a block owns 16.
template <typename = void>
__global__ void __launch_bounds__(kLinearThreads) reduce_bias_grads_kernel(ReduceArgs p) {
  BNUQ_DYNAMIC_SHARED(float, shared);
  const Lane at;
  float sums[1][1][2] = {};
  sum_biases(sums[0][0], p, blockIdx.x, at.warp, kLinearWarps, kReduceRows);
  add_parts(sums, shared, at.warp, kLinearWarps);
  if (at.warp == 0) write_bias_sums(sums[0][0], p, blockIdx.x);
}

// ---- launches ----------------------------------------------------------------------------------

inline void run_sample_weights(SampleArgs p, cudaStream_t stream) {
  p.wide = p.I % 2 == 0 && aligned(p.weight);
  const auto kernel = sample_weights_kernel<>;
  const dim3 grid = sample_grid(p.R, p.O, ceil_div<int64_t>(p.I, kEdge));
  BNUQ_LAUNCH(kernel, grid, dim3(kOperandThreads), 0, stream, p);
}

inline void run_reduce_grads(ReduceArgs p, cudaStream_t stream) {
  const int64_t tiles_o = ceil_div<int64_t>(p.O, kEdge),
                columns = ceil_div<int64_t>(p.I, kEdge) + (p.grad_bias_mu ? 1 : 0);
  if (columns == 0) return;
  p.parts = count_parts(tiles_o * columns, smaller<int64_t>(kLinearWarps, p.R));
  const dim3 grid(unsigned(columns), unsigned(ceil_div<int64_t>(tiles_o, kLinearWarps / p.parts)));
  const auto kernel = reduce_grads_kernel<>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), parts_bytes(4 * 4, p.parts), stream, p);
}

inline void run_reduce_bias_grads(const ReduceArgs& p, cudaStream_t stream) {
  const auto kernel = reduce_bias_grads_kernel<>;
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(ceil_div<int64_t>(p.O, kEdge))), dim3(kLinearThreads),
      parts_bytes(2, kLinearWarps), stream, p);
}

}  // namespace bnuq
