// bayes_linear straight from mu and rho, in one launch forward and two backward: for calls whose
// launches cost more than their work, and for float64. Products by multiplications, in the
// precision of the weights.
//
// The floor is mu and rho once, 8 bytes a weight; beyond four replicas it is the noise, made again
// for every 8 rows. sigma is made again wherever a weight is read.
#pragma once
#include "lane_weights.cuh"
#include "linear_kernels.cuh"

namespace bnuq {

constexpr int kDirectRows = 8;

// A kernel reads and writes what it is for; the others are null.
template <typename acc_t>
struct DirectArgs {
  const acc_t *mu, *rho;            // (O, I)
  const acc_t *bias_mu, *bias_rho;  // (O,) or null
  const acc_t* x;                   // (T or 1, N, I)
  const acc_t* grad_y;              // (T, N, O)
  const int64_t* seed;
  acc_t *y, *grad_x;                    // (T, N, O), (direct_sums, N, I)
  acc_t *grad_mu, *grad_rho;            // (O, I) or null
  acc_t *grad_bias_mu, *grad_bias_rho;  // (O,) or null
  int64_t T, N, O, I;
  uint32_t stream;
  bool shared;
  int parts = 1;  // the warps of a block that share a tile
};

// A lane's eight weights of a tile: slot = i % 2 + 2 * (o % 16 / 8) + 4 * (i % 16 / 8). One outside
// the matrix is 0, and so is its spread.
template <typename acc_t>
struct LaneWeights {
  acc_t mean[8] = {}, sigma[8];

  // Of what has mu and rho (O, I).
  template <typename Args>
  BNUQ_DEVICE LaneWeights(const Args& p, int64_t tile_o, int64_t tile_i, int lane) {
    for_lane_weights(
        tile_o, tile_i, lane, p.O, p.I, [&](int slot, int64_t k) { mean[slot] = p.mu[k]; });
    lane_sigma(sigma, p.rho, tile_o, tile_i, lane, p.O, p.I);
  }

  BNUQ_DEVICE void sample(acc_t (&weight)[8], const float (&z)[8]) const {
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) weight[slot] = mean[slot] + sigma[slot] * acc_t(z[slot]);
  }
};

// v[k] = row[k % 2 + k / 2 * 8] for those below n, 0 beyond.
template <typename acc_t>
BNUQ_DEVICE void load_columns(acc_t (&v)[4], const acc_t* row, int64_t n) {
#pragma unroll
  for (int k = 0; k < 4; ++k) v[k] = k % 2 + k / 2 * 8 < n ? row[k % 2 + k / 2 * 8] : acc_t(0);
}

// The noise of a lane's weights in a tile, by slots.
BNUQ_DEVICE void lane_noise(
    float (&z)[8], const RoundKeys& keys, int64_t tile_o, int64_t tile_i, int lane,
    uint64_t replica) {
  normals8(keys.words(uint32_t(tile_o), uint32_t(tile_i * kWarp) + lane, replica), z);
}

// ---- y[t] = x[t] @ weight[t]^T + bias[t] -------------------------------------------------------

// A warp owns 16 outputs, kRows rows and kReplicas replicas, or a part of their sums.
template <typename acc_t, int kRows, int kReplicas>
__global__ void __launch_bounds__(kLinearThreads, 1) direct_forward_kernel(DirectArgs<acc_t> p) {
  BNUQ_DYNAMIC_SHARED(acc_t, shared);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const Lane at;
  const int part = at.warp % p.parts;
  const int64_t groups = ceil_div<int64_t>(p.T, kReplicas);
  const int64_t t0 = blockIdx.x % groups * kReplicas, n0 = blockIdx.x / groups * kRows;
  const int64_t tile_o = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + at.warp / p.parts;
  const int64_t tiles_i = tile_o * kEdge < p.O ? ceil_div<int64_t>(p.I, kEdge) : 0;
  const uint64_t replica = uint64_t(p.seed[1] + t0);
  acc_t acc[kReplicas][kRows][2] = {};
  for (int64_t tile_i = part; tile_i < tiles_i; tile_i += p.parts) {
    const int64_t i = tile_i * kEdge + at.pair;
    const LaneWeights<acc_t> w(p, tile_o, tile_i, at.lane);
#pragma unroll
    for (int r = 0; r < kReplicas; ++r) {
      const int64_t source = p.shared ? 0 : smaller<int64_t>(t0 + r, p.T - 1);
      const acc_t* x = p.x + (source * p.N + n0) * p.I + i;
      float z[8];
      lane_noise(z, keys, tile_o, tile_i, at.lane, replica + r);
      acc_t weight[8];
      w.sample(weight, z);
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        acc_t v[4];
        load_columns(v, x + n * p.I, n0 + n < p.N ? p.I - i : 0);
#pragma unroll
        for (int slot = 0; slot < 8; ++slot)
          acc[r][n][slot / 2 % 2] += weight[slot] * v[slot / 4 * 2 + slot % 2];
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kReplicas * kRows * 2; ++e) {
    acc_t& sum = acc[e / 2 / kRows][e / 2 % kRows][e % 2];
    sum = lanes_sum(sum, 4);
  }
  add_parts(acc, shared, part, p.parts);
  if (part > 0) return;

  const Key bias_key = subkey(p.seed[0], p.stream, kTagBias);
#pragma unroll
  for (int r = 0; r < kReplicas; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t t = t0 + r, o = tile_o * kEdge + at.g + h * 8;
      if (t >= p.T || o >= p.O) continue;
      acc_t bias = 0;
      if (p.bias_mu)
        bias =
            p.bias_mu[o] + softplus(p.bias_rho[o]) * acc_t(vector_normal(bias_key, o, replica + r));
#pragma unroll
      for (int n = 0; n < kRows; ++n)
        if (n % 4 == at.pair / 2 && n0 + n < p.N)
          p.y[(t * p.N + n0 + n) * p.O + o] = acc[r][n][h] + bias;
    }
}

// ---- gradients by mu and rho, and by those of the bias -----------------------------------------

// A warp owns a tile of weights, or a part of its sum over replicas and rows; that of the first
// columns the biases of its rows too.
template <typename acc_t>
__global__ void __launch_bounds__(kLinearThreads, sizeof(acc_t) == 4 ? 2 : 1)
    direct_grad_weight_kernel(DirectArgs<acc_t> p) {
  BNUQ_DYNAMIC_SHARED(acc_t, shared);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const Key bias_key = subkey(p.seed[0], p.stream, kTagBias);
  const Lane at;
  const int part = at.warp % p.parts;
  const int64_t tile_i = blockIdx.x;
  const int64_t tile_o = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + at.warp / p.parts;
  const int64_t o = tile_o * kEdge + at.g, i = tile_i * kEdge + at.pair;
  const bool biases = p.grad_bias_mu && tile_i == 0 && at.pair == 0;
  // 32 bits, enough for what fits into memory: a division of 64 is a call.
  const unsigned blocks = unsigned(ceil_div<int64_t>(p.N, kDirectRows));
  const unsigned turns = tile_o * kEdge < p.O ? unsigned(p.T) * blocks : 0;
  acc_t sums[1][5][4] = {};  // by mu in two rows, by sigma in two; by mu and sigma of two biases
  for (unsigned k = part; k < turns; k += p.parts) {
    const int64_t t = k / blocks, n0 = int64_t(k % blocks) * kDirectRows;
    const uint64_t replica = uint64_t(p.seed[1] + t);
    const acc_t* x = p.x + ((p.shared ? 0 : t) * p.N + n0) * p.I + i;
    const acc_t* grad_y = p.grad_y + (t * p.N + n0) * p.O + o;
    acc_t by_weight[8] = {}, by_bias[2] = {};
#pragma unroll
    for (int n = 0; n < kDirectRows; ++n) {
      const bool inside = n0 + n < p.N;
      acc_t v[4], g[2];
      load_columns(v, x + n * p.I, inside ? p.I - i : 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        g[h] = inside && o + h * 8 < p.O ? grad_y[n * p.O + h * 8] : acc_t(0);
        by_bias[h] += g[h];
      }
#pragma unroll
      for (int slot = 0; slot < 8; ++slot)
        by_weight[slot] += g[slot / 2 % 2] * v[slot / 4 * 2 + slot % 2];
    }
    float z[8] = {};
    if (p.grad_rho) lane_noise(z, keys, tile_o, tile_i, at.lane, replica);
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) {
      sums[0][slot / 4][slot % 4] += by_weight[slot];
      sums[0][2 + slot / 4][slot % 4] += by_weight[slot] * acc_t(z[slot]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[0][4][h] += by_bias[h];
      if (biases)
        sums[0][4][2 + h] += by_bias[h] * acc_t(vector_normal(bias_key, o + h * 8, replica));
    }
  }
  add_parts(sums, shared, part, p.parts);
  if (part > 0) return;
  if (p.grad_mu)
    for_lane_weights(tile_o, tile_i, at.lane, p.O, p.I, [&](int slot, int64_t k) {
      p.grad_mu[k] = sums[0][slot / 4][slot % 4];
      p.grad_rho[k] = sums[0][2 + slot / 4][slot % 4] * sigmoid(p.rho[k]);
    });
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (biases && o + h * 8 < p.O) {
      p.grad_bias_mu[o + h * 8] = sums[0][4][h];
      p.grad_bias_rho[o + h * 8] = sums[0][4][2 + h] * sigmoid(p.bias_rho[o + h * 8]);
    }
}

// ---- gradient by x = grad_y[t] @ weight[t] -----------------------------------------------------

// How many gradients by x a call makes: one a replica; where all share x, few to be added up.
BNUQ_HD int64_t direct_sums(int64_t T, bool shared) {
  return shared && T > 16 ? 16 : T;
}

// A warp owns 16 inputs and kRows rows of one of those sums, or a part of it.
template <typename acc_t, int kRows>
__global__ void __launch_bounds__(kLinearThreads, 1) direct_grad_x_kernel(DirectArgs<acc_t> p) {
  BNUQ_DYNAMIC_SHARED(acc_t, shared);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const Lane at;
  const int part = at.warp % p.parts;
  const int64_t sums = direct_sums(p.T, p.shared);
  const int64_t sum = blockIdx.x % sums, n0 = blockIdx.x / sums * kRows;
  const int64_t tile_i = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + at.warp / p.parts;
  const int64_t i = tile_i * kEdge + at.pair;
  const int64_t tiles_o = tile_i * kEdge < p.I ? ceil_div<int64_t>(p.O, kEdge) : 0;
  acc_t acc[1][kRows][4] = {};
  for (int64_t tile_o = part; tile_o < tiles_o; tile_o += p.parts) {
    const int64_t o = tile_o * kEdge + at.g;
    const LaneWeights<acc_t> w(p, tile_o, tile_i, at.lane);
    for (int64_t t = sum; t < p.T; t += sums) {
      const acc_t* grad_y = p.grad_y + (t * p.N + n0) * p.O + o;
      float z[8];
      lane_noise(z, keys, tile_o, tile_i, at.lane, uint64_t(p.seed[1] + t));
      acc_t weight[8];
      w.sample(weight, z);
#pragma unroll
      for (int n = 0; n < kRows; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const acc_t g = n0 + n < p.N && o + h * 8 < p.O ? grad_y[n * p.O + h * 8] : acc_t(0);
#pragma unroll
          for (int k = 0; k < 4; ++k) acc[0][n][k] += g * weight[k / 2 * 4 + h * 2 + k % 2];
        }
    }
  }
#pragma unroll
  for (int e = 0; e < kRows * 4; ++e)
#pragma unroll
    for (int d = 4; d < kWarp; d *= 2)
      acc[0][e / 4][e % 4] += __shfl_xor_sync(kAllLanes, acc[0][e / 4][e % 4], d);
  add_parts(acc, shared, part, p.parts);
  if (part > 0) return;
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    if (n != at.g || n0 + n >= p.N) continue;
    acc_t* row = p.grad_x + (sum * p.N + n0 + n) * p.I + i;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (i + k % 2 + k / 2 * 8 < p.I) row[k % 2 + k / 2 * 8] = acc[0][n][k];
  }
}

// ---- launches ----------------------------------------------------------------------------------

// A block has its warps' share of the `tiles`, for one of the `columns`; `sums` of a lane. No more
// than `most` warps share a tile.
template <typename acc_t, typename Kernel>
void launch_direct(
    Kernel kernel, DirectArgs<acc_t> p, int64_t columns, int64_t tiles, int sums,
    cudaStream_t stream, int64_t most = kLinearWarps) {
  p.parts = count_parts(columns * tiles, smaller<int64_t>(most, kLinearWarps));
  const dim3 grid(unsigned(columns), unsigned(ceil_div<int64_t>(tiles, kLinearWarps / p.parts)));
  const int shared = parts_bytes(sums, p.parts, sizeof(acc_t));
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

template <typename acc_t, int kRows, int kReplicas>
void launch_direct_forward(const DirectArgs<acc_t>& p, cudaStream_t stream) {
  const auto kernel = direct_forward_kernel<acc_t, kRows, kReplicas>;
  const int64_t columns = ceil_div<int64_t>(p.T, kReplicas) * ceil_div<int64_t>(p.N, kRows);
  launch_direct(kernel, p, columns, ceil_div<int64_t>(p.O, kEdge), kReplicas * kRows * 2, stream);
}

template <typename acc_t>
void run_direct_forward(const DirectArgs<acc_t>& p, cudaStream_t stream) {
  if (p.N == 1 && p.T == 1) return launch_direct_forward<acc_t, 1, 1>(p, stream);
  if (p.N == 1) return launch_direct_forward<acc_t, 1, 4>(p, stream);
  if (p.T == 1) return launch_direct_forward<acc_t, kDirectRows, 1>(p, stream);
  launch_direct_forward<acc_t, kDirectRows, 2>(p, stream);
}

template <typename acc_t>
void run_direct_grad_weight(const DirectArgs<acc_t>& p, cudaStream_t stream) {
  const auto kernel = direct_grad_weight_kernel<acc_t>;
  const int64_t tiles_i = larger<int64_t>(1, ceil_div<int64_t>(p.I, kEdge));
  // One more wave of blocks takes as long as three turns.
  const int64_t most = p.T * ceil_div<int64_t>(p.N, kDirectRows) / 8;
  launch_direct(kernel, p, tiles_i, ceil_div<int64_t>(p.O, kEdge), 5 * 4, stream, most);
}

template <typename acc_t, int kRows>
void launch_direct_grad_x(const DirectArgs<acc_t>& p, cudaStream_t stream) {
  const auto kernel = direct_grad_x_kernel<acc_t, kRows>;
  const int64_t columns = direct_sums(p.T, p.shared) * ceil_div<int64_t>(p.N, kRows);
  launch_direct(kernel, p, columns, ceil_div<int64_t>(p.I, kEdge), kRows * 4, stream);
}

template <typename acc_t>
void run_direct_grad_x(const DirectArgs<acc_t>& p, cudaStream_t stream) {
  p.N == 1 ? launch_direct_grad_x<acc_t, 1>(p, stream)
           : launch_direct_grad_x<acc_t, kDirectRows>(p, stream);
}

}  // namespace bnuq
