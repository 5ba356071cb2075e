// bayes_linear: products with sigma * eps, whose weights are made in registers in the layout of an
// mma fragment and never leave them. The products with mu are ordinary ones, made by torch, and
// come in.
//
// The floor is the noise: one Philox call (20 wide multiplies, 20 logical operations) and eight
// MUFU operations for the eight weights of a lane; sigma costs 2 bytes a weight, from the
// second-level cache.
#pragma once
#include "staging.cuh"
#include "weight_fragments.cuh"

namespace bnuq {

// ---- where a warp works, and with which others -------------------------------------------------

// Four for each multiprocessor of an H200: one more then costs a fifth of the time, not a third.
constexpr int64_t kBusyBlocks = 528, kBusyWarps = kBusyBlocks * kLinearWarps;

// The warps of a block that share an output tile, each with a part of its sum: one, unless the
// tiles alone are too few to keep a GPU busy.
inline int count_parts(int64_t warps, int64_t most, int64_t busy = kBusyWarps) {
  int parts = 1;
  while (2 * parts <= most && warps * parts < busy) parts *= 2;
  return parts;
}

// Measured on an H200: up to 32 rows a second wave pays; beyond 64, few warps fill it.
constexpr int64_t busy_warps(int rows) {
  return rows <= 32 ? 2 * kBusyWarps : kBusyWarps * 32 / rows;
}

struct Lane {
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int g = lane / 4, pair = lane % 4 * 2;  // of a fragment, as mma.cuh has them
};

// Adds up, in the order of the warps, what the `parts` warps of a tile have summed; the first of
// them gets it. All threads of the block.
template <typename acc_t, int A, int B, int C>
BNUQ_DEVICE void add_parts(acc_t (&acc)[A][B][C], acc_t* shared, int part, int parts) {
  const Lane at;
  acc_t* sums = shared + at.warp / parts * A * B * C * kWarp + at.lane;
  for (int from = 1; from < parts; ++from) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < A * B * C; ++i)
      if (part == from) sums[i * kWarp] = acc[i / C / B][i / C % B][i % C];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < A * B * C; ++i)
      if (part == 0) acc[i / C / B][i / C % B][i % C] += sums[i * kWarp];
  }
}

constexpr int parts_bytes(int sums, int parts, int bytes = sizeof(float)) {
  return parts == 1 ? 0 : kLinearWarps / parts * sums * kWarp * bytes;
}

// ---- bias[t] = bias_mu + softplus(bias_rho) * eps[t] -------------------------------------------

// (T, O), a thread each: all of a Philox call but one number is thrown away, lest stores be apart.
template <typename = void>
__global__ void __launch_bounds__(kLinearThreads) sample_bias_kernel(
    float* __restrict__ bias, const float* __restrict__ mu, const float* __restrict__ rho,
    const int64_t* __restrict__ seed, uint32_t stream, int64_t T, int64_t O) {
  const int64_t i = int64_t(blockIdx.x) * kLinearThreads + threadIdx.x;
  if (i >= T * O) return;
  const int64_t t = i / O, o = i % O;
  const Key key = subkey(seed[0], stream, kTagBias);
  bias[i] = mu[o] + softplus(rho[o]) * vector_normal(key, o, uint64_t(seed[1] + t));
}

inline void run_sample_bias(
    float* bias, const float* mu, const float* rho, const int64_t* seed, uint32_t stream_id,
    int64_t T, int64_t O, cudaStream_t stream) {
  const dim3 blocks(unsigned(ceil_div<int64_t>(T * O, kLinearThreads)));
  const auto kernel = sample_bias_kernel<>;
  BNUQ_LAUNCH(
      kernel, blocks, dim3(kLinearThreads), 0, stream, bias, mu, rho, seed, stream_id, T, O);
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
  int parts = 1;
};

// A warp owns 16 outputs and 8 kBlocks rows of a replica, or a part of their sums; a block 8 such,
// of the same rows and replica.
template <typename half_t>
struct ForwardPlace : Lane {
  int part;
  int64_t tile_o, row, t;
  int64_t first_row;  // of x and base
  int tiles_i;
  const uint4* sigma;  // of the lane, in its first tile
  uint32_t place;      // the lane in that tile: weight_fragment's
  uint64_t replica;

  BNUQ_DEVICE ForwardPlace(const BayesForwardArgs<half_t>& p, int rows) {
    part = warp % p.parts;
    tile_o = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + warp / p.parts;
    row = int64_t(blockIdx.z) * rows;
    t = blockIdx.x;
    first_row = (p.shared ? 0 : t) * p.N + row;
    tiles_i = int(p.I / kEdge);
    place = part * kWarp + lane;
    sigma = p.sigma + tile_o * tiles_i * kWarp + place;
    replica = uint64_t(p.seed[1] + t);
  }

  BNUQ_DEVICE bool inside(const BayesForwardArgs<half_t>& p) const { return tile_o * kEdge < p.O; }
};

// Up to 8 rows: the little that a lane needs of x it reads for itself, and no warp waits for
// another. A row beyond the last gives sums that are not stored.
template <typename half_t>
BNUQ_DEVICE void multiply_direct(
    float (&acc)[1][4], const BayesForwardArgs<half_t>& p, const RoundKeys& keys,
    const ForwardPlace<half_t>& at) {
  const int64_t n = at.first_row + smaller<int64_t>(at.g, p.N - 1 - at.row);
  const uint32_t* x = reinterpret_cast<const uint32_t*>(p.x + n * p.I + at.pair);
  const uint4* own_sigma = at.sigma;
  uint32_t place = at.place;
#pragma unroll 2
  for (; place < uint32_t(at.tiles_i * kWarp); place += p.parts * kWarp) {
    const uint4 sigma = __ldg(own_sigma);
    const uint32_t* columns = x + place / kWarp * (kEdge / 2);
    const uint32_t b[2] = {__ldg(columns), __ldg(columns + 4)};
    uint32_t a[4];
    weight_fragment<half_t>(a, sigma, keys, uint32_t(at.tile_o), place, at.replica);
    mma<half_t>(acc[0], a, b);
    own_sigma += p.parts * kWarp;
  }
}

// Columns of x in shared memory at a time: the longer, the fewer barriers; measured, with more rows
// blocks that take more of it lose as much.
constexpr int forward_columns(int kBlocks) {
  return kBlocks <= 4 ? 4 * kStage : kStage;
}

// More rows: x passes through shared memory, the next columns while these are used.
template <typename half_t, int kBlocks>
BNUQ_DEVICE void multiply_staged(
    float (&acc)[kBlocks][4], half_t* shared, const BayesForwardArgs<half_t>& p,
    const RoundKeys& keys, const ForwardPlace<half_t>& at) {
  constexpr int kColumns = forward_columns(kBlocks), kPitchBytes = pitch_bytes(kColumns);
  constexpr int kBuffer = kBlocks * 8 * kPitchBytes, kTiles = kColumns / kEdge;
  const SharedAddress start = shared_address(shared);
  auto x = RowCopy<half_t, kColumns>::at(p.x + at.first_row * p.I, p.I);
  const int rows = int(smaller<int64_t>(kBlocks * 8, p.N - at.row));
  int column = x.column();
  const auto stage = [&](int buffer) {
    x.template begin<kBlocks * 8>(start + buffer * kBuffer, kBlocks * 8, column < p.I ? rows : 0);
    x.from += kColumns;
    column += kColumns;
  };
  // Of matrices (rows 0, columns 0), (0, 8), (8, 0), (8, 8).
  const SharedAddress own =
      start + (at.lane / 16 * 8 + at.lane % 8) * kPitchBytes + at.lane / 8 % 2 * 16;
  const uint4* own_sigma = at.sigma;
  uint32_t place = at.place;
  int buffer = 0;
  if (at.tiles_i > 0) stage(buffer);
  for (int first = 0; first < at.tiles_i; first += kTiles, buffer ^= 1) {
    wait_for_copies();
    __syncthreads();
    if (first + kTiles < at.tiles_i) stage(buffer ^ 1);
    if (!at.inside(p)) continue;
    SharedAddress columns = own + buffer * kBuffer + at.part * kEdge * 2;
    const int tiles = smaller(kTiles, at.tiles_i - first);
#pragma unroll 1
    for (int left = tiles - at.part; left > 0; left -= p.parts) {
      uint32_t a[4];
      weight_fragment<half_t>(a, __ldg(own_sigma), keys, uint32_t(at.tile_o), place, at.replica);
#pragma unroll
      for (int b = 0; b < kBlocks; b += 2) {
        uint32_t m[4];
        load_matrices<false>(m, columns + b * 8 * kPitchBytes);
        mma<half_t>(acc[b], a, {m[0], m[1]});
        mma<half_t>(acc[b + 1], a, {m[2], m[3]});
      }
      own_sigma += p.parts * kWarp;
      columns += p.parts * kEdge * 2;
      place += p.parts * kWarp;
    }
  }
}

constexpr int kTogether = 2;  // blocks of rows that are stored at a time, as far as registers go

// Writes y of blocks b, b + 1. All loads come before the stores, which might write where they read,
// as far as the compiler knows.
template <typename half_t, int kBlocks>
BNUQ_DEVICE void store_sums(
    const float (&sum)[kBlocks][4], int b, float scale, const BayesForwardArgs<half_t>& p,
    const ForwardPlace<half_t>& at) {
  constexpr int kSums = smaller(kTogether, kBlocks) * 4;
  const int first = b * 8 + at.pair;
  float y[kSums];
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int64_t n = first + i / 4 * 8 + i % 2, o = at.tile_o * kEdge + at.g + i / 2 % 2 * 8;
      if (at.row + n < p.N && o < p.O) body(i, n, o);
    }
  };
  each([&](int i, int64_t n, int64_t o) {
    const float base = p.base[(at.first_row + n) * p.O + o];
    y[i] = base + (p.bias ? p.bias[at.t * p.O + o] : 0.0f) + scale * sum[b + i / 4][i % 4];
  });
  each([&](int i, int64_t n, int64_t o) { p.y[(at.t * p.N + at.row + n) * p.O + o] = y[i]; });
}

// Blocks of a multiprocessor: what registers for 8 kBlocks rows leave room for.
constexpr int forward_blocks(int kBlocks) {
  return kBlocks <= 4 ? 4 : kBlocks == 8 ? 3 : 2;
}

template <typename half_t, int kBlocks>
__global__ void __launch_bounds__(kLinearThreads, forward_blocks(kBlocks))
    bayes_forward_kernel(BayesForwardArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const ForwardPlace<half_t> at(p, kBlocks * 8);
  float acc[1][kBlocks][4] = {};
  if constexpr (kBlocks > 1)
    multiply_staged<half_t, kBlocks>(acc[0], shared, p, keys, at);
  else if (at.inside(p))
    multiply_direct<half_t>(acc[0], p, keys, at);
  add_parts(acc, reinterpret_cast<float*>(shared), at.part, p.parts);
  if (at.part > 0) return;

  const float scale = *p.x_scale * *p.sigma_scale;
#pragma unroll
  for (int b = 0; b < kBlocks; b += kTogether) store_sums(acc[0], b, scale, p, at);
}

// ---- launches ----------------------------------------------------------------------------------

template <typename half_t, int kBlocks>
void launch_forward(BayesForwardArgs<half_t> p, cudaStream_t stream) {
  const int64_t row_blocks = ceil_div<int64_t>(p.N, kBlocks * 8),
                tiles_o = ceil_div<int64_t>(p.O, kEdge);
  // No fewer than four tiles for each.
  const int64_t most = smaller<int64_t>(kBlocks > 1 ? 4 : 8, p.I / kEdge / 4);
  p.parts = count_parts(p.T * row_blocks * tiles_o, most, busy_warps(kBlocks * 8));
  const dim3 grid(
      unsigned(p.T), unsigned(ceil_div<int64_t>(tiles_o, kLinearWarps / p.parts)),
      unsigned(row_blocks));
  const int rows = kBlocks > 1 ? 2 * kBlocks * 8 : 0;
  const int staged = rows * pitch_bytes(forward_columns(kBlocks));
  const int shared = larger(staged, parts_bytes(kBlocks * 4, p.parts));
  const auto kernel = bayes_forward_kernel<half_t, kBlocks>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

// The noise is made again for every 8 kBlocks rows, so a warp's rows cover N as far as registers
// go: 64 sums a lane, or 32 where so few warps leave a GPU idle.
template <typename half_t>
void run_bayes_forward(const BayesForwardArgs<half_t>& p, cudaStream_t stream) {
  if (p.N <= 8) return launch_forward<half_t, 1>(p, stream);
  if (p.N <= 32) return launch_forward<half_t, 4>(p, stream);
  const int64_t warps = p.T * ceil_div<int64_t>(p.N, 128) * ceil_div<int64_t>(p.O, kEdge);
  if (p.N <= 64 || warps < busy_warps(128)) return launch_forward<half_t, 8>(p, stream);
  launch_forward<half_t, 16>(p, stream);
}

}  // namespace bnuq
