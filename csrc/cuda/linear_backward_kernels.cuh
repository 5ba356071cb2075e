// The backward of bayes_linear: products with sigma * eps whose noise is made again, as in the
// forward. The floor is that of linear_kernels.cuh, once for grad_x and once for grad_sigma.
#pragma once
#include "linear_kernels.cuh"

namespace bnuq {

// ---- grad_x[t] += grad_y[t] @ (sigma * eps[t]), summed over t where x is shared ----------------

template <typename half_t>
struct BayesGradXArgs {
  const half_t* grad_y;  // (T, N, padded O)
  const uint4* sigma;
  const float *grad_scale, *sigma_scale;
  const int64_t* seed;
  float* grad_x;       // (T or 1, N, I); holds the product with mu
  int64_t T, N, O, I;  // O padded
  uint32_t stream;
  bool shared;
};

// A warp owns 16 columns of x and 16 kTiles rows; a block 8 such, of the same rows, which share
// grad_y. The fragment of the weights is transposed, 8 x 8 at a time, into that of the second
// operand.
template <typename half_t, int kTiles>
__global__ void __launch_bounds__(kLinearThreads) bayes_grad_x_kernel(BayesGradXArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared_grad);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4,
            pair = lane % 4 * 2;
  const int64_t tiles_i = ceil_div<int64_t>(p.I, kEdge);
  const int64_t tile_i = int64_t(blockIdx.x) * kLinearWarps + warp;
  const int64_t row = int64_t(blockIdx.y) * kTiles * kEdge;
  const int64_t first = p.shared ? 0 : blockIdx.z, last = p.shared ? p.T : first + 1;
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  float acc[kTiles][2][4] = {};

  for (int64_t t = first; t < last; ++t) {
    const Rows<half_t> rows = {p.grad_y + t * p.N * p.O, p.N, p.O};
    for (int64_t column = 0; column < p.O; column += kStage) {
      __syncthreads();
      stage_rows(shared_grad, rows, row, kTiles * kEdge, column);
      __syncthreads();
      if (tile_i >= tiles_i) continue;
      const int steps = int(smaller<int64_t>(kStage, p.O - column)) / kEdge;
      for (int step = 0; step < steps; ++step) {
        const int64_t tile_o = column / kEdge + step;
        const uint4 sigma = p.sigma[(tile_o * tiles_i + tile_i) * kWarp + lane];
        uint32_t w[4];
        weight_fragment<half_t>(
            w, sigma, keys, weight_index(tile_o, tile_i, lane), uint64_t(p.seed[1] + t));
        const uint32_t low[2] = {transpose8(w[0]), transpose8(w[1])};
        const uint32_t high[2] = {transpose8(w[2]), transpose8(w[3])};
        const int k = step * kEdge + pair;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const int n = m * kEdge + g;
          const uint32_t a[4] = {
              staged_pair(shared_grad, n, k), staged_pair(shared_grad, n + 8, k),
              staged_pair(shared_grad, n, k + 8), staged_pair(shared_grad, n + 8, k + 8)};
          mma<half_t>(acc[m][0], a, low);
          mma<half_t>(acc[m][1], a, high);
        }
      }
    }
  }

  const float scale = *p.grad_scale * *p.sigma_scale;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t n = row + m * kEdge + g + e / 2 * 8,
                      i = tile_i * kEdge + b * 8 + pair + e % 2;
        if (n < p.N && i < p.I) p.grad_x[(first * p.N + n) * p.I + i] += scale * acc[m][b][e];
      }
}

// ---- grad_sigma = sum over t of eps[t] * (grad_y[t]^T @ x[t]) ----------------------------------

template <typename half_t>
struct BayesGradSigmaArgs {
  const half_t* grad_y;  // (T, O, padded N)
  const half_t* x;       // (T or 1, I, padded N)
  const float *grad_scale, *x_scale;
  const int64_t* seed;
  float* grad_sigma;   // (O, I)
  int64_t T, N, O, I;  // N padded
  uint32_t stream;
  bool shared;
};

constexpr int kGradWarpsO = 4, kGradWarpsI = 2, kGradTiles = 2;
constexpr int kGradRowsO = kGradWarpsO * kEdge, kGradRowsI = kGradWarpsI * kGradTiles * kEdge;

// A warp owns a tile of 16 x 32 weights and all replicas; a block 64 x 64. The sums of an mma lie
// in the lanes that hold the noise of the same weights.
template <typename half_t>
__global__ void __launch_bounds__(kLinearThreads, 2)
    bayes_grad_sigma_kernel(BayesGradSigmaArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared_grad);
  half_t* shared_x = shared_grad + kGradRowsO * kPitch;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4,
            pair = lane % 4 * 2;
  const int warp_o = warp % kGradWarpsO, warp_i = warp / kGradWarpsO;
  const int64_t row_o = int64_t(blockIdx.x) * kGradRowsO, row_i = int64_t(blockIdx.y) * kGradRowsI;
  const int64_t tile_o = row_o / kEdge + warp_o, tile_i = row_i / kEdge + warp_i * kGradTiles;
  const Key sub = subkey(p.seed[0], p.stream, kTagWeight);
  float sum[kGradTiles][2][4] = {};

  for (int64_t t = 0; t < p.T; ++t) {
    const Rows<half_t> grads = {p.grad_y + t * p.O * p.N, p.O, p.N};
    const Rows<half_t> xs = {p.x + (p.shared ? 0 : t) * p.I * p.N, p.I, p.N};
    float product[kGradTiles][2][4] = {};
    for (int64_t column = 0; column < p.N; column += kStage) {
      __syncthreads();
      stage_rows(shared_grad, grads, row_o, kGradRowsO, column);
      stage_rows(shared_x, xs, row_i, kGradRowsI, column);
      __syncthreads();
      const int steps = int(smaller<int64_t>(kStage, p.N - column)) / kEdge;
      for (int step = 0; step < steps; ++step) {
        const int k = step * kEdge + pair, o = warp_o * kEdge + g;
        const uint32_t a[4] = {
            staged_pair(shared_grad, o, k), staged_pair(shared_grad, o + 8, k),
            staged_pair(shared_grad, o, k + 8), staged_pair(shared_grad, o + 8, k + 8)};
#pragma unroll
        for (int j = 0; j < kGradTiles; ++j)
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            const int i = (warp_i * kGradTiles + j) * kEdge + b * 8 + g;
            const uint32_t fragment[2] = {
                staged_pair(shared_x, i, k), staged_pair(shared_x, i, k + 8)};
            mma<half_t>(product[j][b], a, fragment);
          }
      }
    }
#pragma unroll
    for (int j = 0; j < kGradTiles; ++j) {
      const Words4 words =
          philox_at(sub, weight_index(tile_o, tile_i + j, lane), uint64_t(p.seed[1] + t));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float z0, z1;
        unit_pair(words.v[r], z0, z1);
        const int b = r / 2, e = r % 2 * 2;
        sum[j][b][e] += z0 * product[j][b][e];
        sum[j][b][e + 1] += z1 * product[j][b][e + 1];
      }
    }
  }

  const float scale = kNormalScale * *p.grad_scale * *p.x_scale;
#pragma unroll
  for (int j = 0; j < kGradTiles; ++j)
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t o = tile_o * kEdge + g + e / 2 * 8;
        const int64_t i = (tile_i + j) * kEdge + b * 8 + pair + e % 2;
        if (o < p.O && i < p.I) p.grad_sigma[o * p.I + i] = scale * sum[j][b][e];
      }
}

// ---- launches ----------------------------------------------------------------------------------

template <typename half_t, int kTiles>
void launch_grad_x(const BayesGradXArgs<half_t>& p, cudaStream_t stream) {
  const dim3 grid(
      unsigned(ceil_div<int64_t>(p.I, kEdge * kLinearWarps)),
      unsigned(ceil_div<int64_t>(p.N, kTiles * kEdge)), unsigned(p.shared ? 1 : p.T));
  const int shared = kTiles * kEdge * kPitch * int(sizeof(half_t));
  const auto kernel = bayes_grad_x_kernel<half_t, kTiles>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

template <typename half_t>
void run_bayes_grad_x(const BayesGradXArgs<half_t>& p, cudaStream_t stream) {
  if (p.N <= 16) return launch_grad_x<half_t, 1>(p, stream);
  if (p.N <= 32) return launch_grad_x<half_t, 2>(p, stream);
  launch_grad_x<half_t, 8>(p, stream);
}

template <typename half_t>
void run_bayes_grad_sigma(const BayesGradSigmaArgs<half_t>& p, cudaStream_t stream) {
  const dim3 grid(
      unsigned(ceil_div<int64_t>(p.O, kGradRowsO)), unsigned(ceil_div<int64_t>(p.I, kGradRowsI)));
  const int shared = (kGradRowsO + kGradRowsI) * kPitch * int(sizeof(half_t));
  const auto kernel = bayes_grad_sigma_kernel<half_t>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

}  // namespace bnuq
