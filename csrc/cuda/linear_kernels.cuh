// bayes_linear: products with sigma * eps, whose weights are made in registers in the layout of an
// mma fragment and never leave them. The products with mu are ordinary ones, made by torch, and
// come in.
//
// The floor is the noise: one Philox call (20 wide multiplies, 20 logical operations) and eight
// MUFU operations for the eight weights of a lane; sigma costs 2 bytes a weight, from the
// second-level cache. eps is before kNormalScale here: `sigma` carries that factor, and a power of
// two so that it fits float16.
#pragma once
#include "../linear.h"
#include "mma.cuh"

namespace bnuq {

constexpr int kEdge = 16;  // of a tile of weights
constexpr int kLinearWarps = 8;
constexpr int kLinearThreads = kLinearWarps * kWarp;
constexpr int kStage = 64;          // columns of a matrix that are in shared memory at a time
constexpr int kPitch = kStage + 8;  // 36 words a row: the lanes of a fragment meet 32 banks

// A 16-bit matrix whose rows are padded with zeros to a multiple of 16 columns.
template <typename half_t>
struct Rows {
  const half_t* data;
  int64_t rows, columns;
};

// Copies rows [first, first + kRows) and columns [column, column + kStage) into shared memory,
// zeros for what lies outside. All threads of the block.
template <typename half_t>
BNUQ_DEVICE void stage_rows(
    half_t* shared, const Rows<half_t>& m, int64_t first, int num_rows, int64_t column) {
  constexpr int kVectors = kStage / 8;
  for (int i = threadIdx.x; i < num_rows * kVectors; i += kLinearThreads) {
    const int r = i / kVectors, c = i % kVectors * 8;
    uint4 v = {0, 0, 0, 0};
    if (first + r < m.rows && column + c < m.columns)
      v = *reinterpret_cast<const uint4*>(m.data + (first + r) * m.columns + column + c);
    *reinterpret_cast<uint4*>(shared + r * kPitch + c) = v;
  }
}

template <typename half_t>
BNUQ_DEVICE uint32_t staged_pair(const half_t* shared, int row, int column) {
  return *reinterpret_cast<const uint32_t*>(shared + row * kPitch + column);
}

// The keys of all rounds, held in registers: made anew they are two additions a round.
struct RoundKeys {
  uint32_t k[2 * kPhiloxRounds];

  BNUQ_DEVICE explicit RoundKeys(Key key) {
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      k[2 * round] = key.k0 + uint32_t(round) * 0x9E3779B9u;
      k[2 * round + 1] = key.k1 + uint32_t(round) * 0xBB67AE85u;
    }
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < 2 * kPhiloxRounds; ++i) asm volatile("" : "+r"(k[i]));
#endif
  }

  BNUQ_DEVICE Words4 words(uint64_t index, uint64_t replica) const {
    uint32_t c[4] = {
        uint32_t(index), uint32_t(index >> 32), uint32_t(replica), uint32_t(replica >> 32)};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round)
      philox_round(c, k[2 * round], k[2 * round + 1]);
    return {{c[0], c[1], c[2], c[3]}};
  }
};

// eps of one lane as an A fragment.
template <typename half_t>
BNUQ_DEVICE void noise_fragment(
    uint32_t (&a)[4], const RoundKeys& keys, uint64_t index, uint64_t replica) {
  const Words4 words = keys.words(index, replica);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float z0, z1;
    unit_pair(words.v[r], z0, z1);
    a[r] = pack2<half_t>(z0, z1);
  }
}

// sigma * eps of one lane as an A fragment.
template <typename half_t>
BNUQ_DEVICE void weight_fragment(
    uint32_t (&a)[4], const uint4& sigma, const RoundKeys& keys, uint64_t index, uint64_t replica) {
  noise_fragment<half_t>(a, keys, index, replica);
  a[0] = mul2<half_t>(a[0], sigma.x);
  a[1] = mul2<half_t>(a[1], sigma.y);
  a[2] = mul2<half_t>(a[2], sigma.z);
  a[3] = mul2<half_t>(a[3], sigma.w);
}

// ---- sigma, in the order of the fragments
// --------------------------------------------------------

template <typename half_t>
__global__ void __launch_bounds__(kLinearThreads) pack_sigma_kernel(
    uint4* __restrict__ out, const float* __restrict__ rho, const float* __restrict__ scale,
    int64_t O, int64_t I) {
  const int64_t tiles_i = ceil_div<int64_t>(I, kEdge),
                tiles = ceil_div<int64_t>(O, kEdge) * tiles_i;
  const int64_t i = int64_t(blockIdx.x) * kLinearThreads + threadIdx.x;
  if (i >= tiles * kWarp) return;
  const int lane = int(i % kWarp);
  const int64_t tile = i / kWarp, row = tile / tiles_i * kEdge, column = tile % tiles_i * kEdge;
  const float factor = kNormalScale / *scale;
  float v[8];
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    const int64_t o = row + lane / 4 + (slot >> 1 & 1) * 8;
    const int64_t k = column + lane % 4 * 2 + (slot & 1) + (slot >> 2) * 8;
    v[slot] = o < O && k < I ? softplus(rho[o * I + k]) * factor : 0.0f;
  }
  out[i] = {
      pack2<half_t>(v[0], v[1]), pack2<half_t>(v[2], v[3]), pack2<half_t>(v[4], v[5]),
      pack2<half_t>(v[6], v[7])};
}

// ---- y[t] = base[t] + bias[t] + x[t] @ (sigma * eps[t])^T
// -----------------------------------------

template <typename half_t>
struct BayesForwardArgs {
  const half_t* x;     // (T or 1, N, padded I)
  const uint4* sigma;  // (tiles of O, tiles of I, 32)
  const float* base;   // (T or 1, N, O)
  const float* bias;   // (T, O) or null
  const float *x_scale, *sigma_scale;
  const int64_t* seed;
  float* y;            // (T, N, O)
  int64_t T, N, O, I;  // I padded
  uint32_t stream;
  bool shared;
};

// The B fragments of 8 kBlocks staged rows at columns k, k + 1, k + 8 and k + 9.
template <typename half_t, int kBlocks>
BNUQ_DEVICE void load_columns(uint32_t (&x)[kBlocks][2], const half_t* shared, int g, int k) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    x[b][0] = staged_pair(shared, b * 8 + g, k);
    x[b][1] = staged_pair(shared, b * 8 + g, k + 8);
  }
}

// A warp owns 16 outputs, 8 kBlocks rows and kReplicas replicas; a block 8 such, of the same rows
// and replicas, which share x in shared memory.
template <typename half_t, int kBlocks, int kReplicas, bool kShared>
__global__ void __launch_bounds__(kLinearThreads) bayes_forward_kernel(BayesForwardArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared_x);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4,
            pair = lane % 4 * 2;
  const int64_t tiles_o = ceil_div<int64_t>(p.O, kEdge), tiles_i = p.I / kEdge;
  const int64_t tile_o = int64_t(blockIdx.x) * kLinearWarps + warp;
  const int64_t row = int64_t(blockIdx.y) * kBlocks * 8, t0 = int64_t(blockIdx.z) * kReplicas;
  constexpr int copies = kShared ? 1 : kReplicas;
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const int64_t first = p.seed[1] + t0;
  float acc[kReplicas][kBlocks][4] = {};

  for (int64_t column = 0; column < p.I; column += kStage) {
    __syncthreads();
    for (int r = 0; r < copies; ++r) {
      const int64_t t = kShared ? 0 : smaller<int64_t>(t0 + r, p.T - 1);
      const Rows<half_t> rows = {p.x + t * p.N * p.I, p.N, p.I};
      stage_rows(shared_x + r * kBlocks * 8 * kPitch, rows, row, kBlocks * 8, column);
    }
    __syncthreads();
    if (tile_o >= tiles_o) continue;
    const int steps = int(smaller<int64_t>(kStage, p.I - column)) / kEdge;
    for (int step = 0; step < steps; ++step) {
      const int64_t tile_i = column / kEdge + step;
      const uint4 sigma = p.sigma[(tile_o * tiles_i + tile_i) * kWarp + lane];
      const uint64_t index = weight_index(tile_o, tile_i, lane);
      const int k = step * kEdge + pair;
      uint32_t x[kBlocks][2];
      if (kShared) load_columns<half_t, kBlocks>(x, shared_x, g, k);
#pragma unroll
      for (int r = 0; r < kReplicas; ++r) {
        uint32_t a[4];
        weight_fragment<half_t>(a, sigma, keys, index, uint64_t(first + r));
        if (!kShared) load_columns<half_t, kBlocks>(x, shared_x + r * kBlocks * 8 * kPitch, g, k);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) mma<half_t>(acc[r][b], a, x[b]);
      }
    }
  }

  const float scale = *p.x_scale * *p.sigma_scale;
#pragma unroll
  for (int r = 0; r < kReplicas; ++r)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t t = t0 + r, n = row + b * 8 + pair + e % 2,
                      o = tile_o * kEdge + g + e / 2 * 8;
        if (t >= p.T || n >= p.N || o >= p.O) continue;
        const float base = p.base[((kShared ? 0 : t) * p.N + n) * p.O + o];
        const float bias = p.bias ? p.bias[t * p.O + o] : 0.0f;
        p.y[(t * p.N + n) * p.O + o] = base + bias + scale * acc[r][b][e];
      }
}

// ---- grad_x[t] += grad_y[t] @ (sigma * eps[t]), summed over t where x is shared
// ---------------------

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

// ---- grad_sigma = sum over t of eps[t] * (grad_y[t]^T @ x[t])
// ----------------------------------------

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

// ---- launches
// ------------------------------------------------------------------------------------

template <typename half_t>
void run_pack_sigma(
    uint4* out, const float* rho, const float* scale, int64_t O, int64_t I, cudaStream_t stream) {
  const int64_t lanes = ceil_div<int64_t>(O, kEdge) * ceil_div<int64_t>(I, kEdge) * kWarp;
  const auto kernel = pack_sigma_kernel<half_t>;
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(ceil_div<int64_t>(lanes, kLinearThreads))), dim3(kLinearThreads), 0,
      stream, out, rho, scale, O, I);
}

template <typename half_t, int kBlocks, int kReplicas>
void launch_forward(const BayesForwardArgs<half_t>& p, cudaStream_t stream) {
  const dim3 grid(
      unsigned(ceil_div<int64_t>(p.O, kEdge * kLinearWarps)),
      unsigned(ceil_div<int64_t>(p.N, kBlocks * 8)), unsigned(ceil_div<int64_t>(p.T, kReplicas)));
  const int shared = (p.shared ? 1 : kReplicas) * kBlocks * 8 * kPitch * int(sizeof(half_t));
  const auto kernel = p.shared ? bayes_forward_kernel<half_t, kBlocks, kReplicas, true>
                               : bayes_forward_kernel<half_t, kBlocks, kReplicas, false>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

// The noise is made again for every 8 kBlocks rows, so a warp's rows cover N as far as registers
// go: 64 sums a lane.
template <typename half_t>
void run_bayes_forward(const BayesForwardArgs<half_t>& p, cudaStream_t stream) {
  if (p.N <= 8) return launch_forward<half_t, 1, 4>(p, stream);
  if (p.N <= 32) return launch_forward<half_t, 4, 4>(p, stream);
  if (p.N <= 64) return launch_forward<half_t, 8, 2>(p, stream);
  launch_forward<half_t, 16, 1>(p, stream);
}

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
