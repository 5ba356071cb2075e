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

// ---- sigma, in the order of the fragments ------------------------------------------------------

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

// ---- y[t] = base[t] + bias[t] + x[t] @ (sigma * eps[t])^T --------------------------------------

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

// ---- launches ----------------------------------------------------------------------------------

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

}  // namespace bnuq
