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
constexpr int64_t kBusyBlocks = 528;

// The warps of a block that share an output tile, each with a part of its sum: one, unless the
// tiles alone are too few to keep a GPU busy.
inline int count_parts(int64_t warps, int most) {
  int parts = 1;
  while (parts < most && warps * parts < kBusyBlocks * kLinearWarps) parts *= 2;
  return parts;
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

// A warp owns 16 outputs, 8 kBlocks rows and kReplicas replicas, or a part of their sums; a block
// 8 such, of the same rows and replicas.
template <typename half_t, int kReplicas>
struct ForwardPlace : Lane {
  int part;
  int64_t tile_o, row, t0;
  int tiles_i;
  const uint4* sigma;  // of the lane, in the first tile of the row of tiles
  uint64_t replica;    // number of the first

  BNUQ_DEVICE ForwardPlace(const BayesForwardArgs<half_t>& p, int rows) {
    part = warp % p.parts;
    tile_o = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + warp / p.parts;
    row = int64_t(blockIdx.z) * rows;
    t0 = int64_t(blockIdx.x) * kReplicas;
    tiles_i = int(p.I / kEdge);
    sigma = p.sigma + tile_o * tiles_i * kWarp + lane;
    replica = uint64_t(p.seed[1] + t0);
  }

  BNUQ_DEVICE bool inside(const BayesForwardArgs<half_t>& p) const { return tile_o * kEdge < p.O; }

  // The replica of x that replica r reads.
  BNUQ_DEVICE int64_t source(const BayesForwardArgs<half_t>& p, int r) const {
    return p.shared ? 0 : smaller<int64_t>(t0 + r, p.T - 1);
  }
};

// Up to 8 rows: the little that a lane needs of x it reads for itself, and no warp waits for
// another. A row beyond the last gives sums that are not stored.
template <typename half_t, int kReplicas, bool kShared>
BNUQ_DEVICE void multiply_direct(
    float (&acc)[kReplicas][1][4], const BayesForwardArgs<half_t>& p, const RoundKeys& keys,
    const ForwardPlace<half_t, kReplicas>& at) {
  constexpr int kCopies = kShared ? 1 : kReplicas;
  const uint32_t* x[kCopies];
#pragma unroll
  for (int r = 0; r < kCopies; ++r) {
    const int64_t n = at.source(p, r) * p.N + smaller<int64_t>(at.row + at.g, p.N - 1);
    x[r] = reinterpret_cast<const uint32_t*>(p.x + n * p.I + at.pair);
  }
  const uint4* own_sigma = at.sigma + at.part * kWarp;
  uint32_t place = at.part * kWarp + at.lane;
#pragma unroll(kReplicas == 1 ? 2 : 1)
  for (; place < uint32_t(at.tiles_i * kWarp); place += p.parts * kWarp) {
    const uint4 sigma = __ldg(own_sigma);
    uint32_t b[kCopies][2];
#pragma unroll
    for (int r = 0; r < kCopies; ++r) {
      b[r][0] = __ldg(x[r] + place / kWarp * (kEdge / 2));
      b[r][1] = __ldg(x[r] + place / kWarp * (kEdge / 2) + 4);
    }
#pragma unroll
    for (int r = 0; r < kReplicas; ++r) {
      uint32_t a[4];
      weight_fragment<half_t>(a, sigma, keys, uint32_t(at.tile_o), place, at.replica + r);
      mma<half_t>(acc[r][0], a, b[kShared ? 0 : r]);
    }
    own_sigma += p.parts * kWarp;
  }
}

// More rows: x passes through shared memory, the next columns while these are used.
template <typename half_t, int kBlocks, int kReplicas, bool kShared>
BNUQ_DEVICE void multiply_staged(
    float (&acc)[kReplicas][kBlocks][4], half_t* shared, const BayesForwardArgs<half_t>& p,
    const RoundKeys& keys, const ForwardPlace<half_t, kReplicas>& at) {
  constexpr int kCopies = kShared ? 1 : kReplicas, kCopy = kBlocks * 8 * kPitchBytes;
  constexpr int kTiles = kStage / kEdge;
  const SharedAddress start = shared_address(shared);
  RowCopy<half_t> x[kCopies];
#pragma unroll
  for (int r = 0; r < kCopies; ++r)
    x[r] = RowCopy<half_t>::at(p.x + (at.source(p, r) * p.N + at.row) * p.I, p.I);
  const int rows = int(smaller<int64_t>(kBlocks * 8, p.N - at.row));
  int column = RowCopy<half_t>::column();
  const auto stage = [&](int buffer) {
#pragma unroll
    for (int r = 0; r < kCopies; ++r) {
      x[r].template begin<kBlocks * 8>(
          start + (buffer * kCopies + r) * kCopy, kBlocks * 8, column < p.I ? rows : 0);
      x[r].from += kStage;
    }
    column += kStage;
  };
  // Of matrices (rows 0, columns 0), (0, 8), (8, 0), (8, 8).
  const SharedAddress own =
      start + (at.lane / 16 * 8 + at.lane % 8) * kPitchBytes + at.lane / 8 % 2 * 16;
  const uint4* own_sigma = at.sigma + at.part * kWarp;
  uint32_t place = at.part * kWarp + at.lane;
  int buffer = 0;
  if (at.tiles_i > 0) stage(buffer);
  for (int first = 0; first < at.tiles_i; first += kTiles, buffer ^= 1) {
    wait_for_copies();
    __syncthreads();
    if (first + kTiles < at.tiles_i) stage(buffer ^ 1);
    if (!at.inside(p)) continue;
    SharedAddress columns = own + buffer * kCopies * kCopy + at.part * kEdge * 2;
    const int tiles = smaller(kTiles, at.tiles_i - first);
#pragma unroll 1
    for (int left = tiles - at.part; left > 0; left -= p.parts) {
      const uint4 sigma = __ldg(own_sigma);
#pragma unroll
      for (int r = 0; r < kReplicas; ++r) {
        uint32_t a[4];
        weight_fragment<half_t>(a, sigma, keys, uint32_t(at.tile_o), place, at.replica + r);
#pragma unroll
        for (int b = 0; b < kBlocks; b += 2) {
          uint32_t m[4];
          load_matrices<false>(m, columns + (kShared ? 0 : r) * kCopy + b * 8 * kPitchBytes);
          mma<half_t>(acc[r][b], a, {m[0], m[1]});
          mma<half_t>(acc[r][b + 1], a, {m[2], m[3]});
        }
      }
      own_sigma += p.parts * kWarp;
      columns += p.parts * kEdge * 2;
      place += p.parts * kWarp;
    }
  }
}

constexpr int kTogether = 2;  // blocks of rows that are stored at a time, as far as registers go

// Writes y of replica r and blocks b, b + 1. All loads come before the stores, which might write
// where they read, as far as the compiler knows.
template <bool kShared, typename half_t, int kBlocks, int kReplicas>
BNUQ_DEVICE void store_sums(
    const float (&sum)[kBlocks][4], int b, float scale, const BayesForwardArgs<half_t>& p,
    const ForwardPlace<half_t, kReplicas>& at, int r) {
  constexpr int kSums = smaller(kTogether, kBlocks) * 4;
  const int64_t t = at.t0 + r, first = at.row + b * 8 + at.pair;
  float y[kSums];
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int64_t n = first + i / 4 * 8 + i % 2, o = at.tile_o * kEdge + at.g + i / 2 % 2 * 8;
      if (t < p.T && n < p.N && o < p.O) body(i, n, o);
    }
  };
  each([&](int i, int64_t n, int64_t o) {
    const float base = p.base[((kShared ? 0 : t) * p.N + n) * p.O + o];
    y[i] = base + (p.bias ? p.bias[t * p.O + o] : 0.0f) + scale * sum[b + i / 4][i % 4];
  });
  each([&](int i, int64_t n, int64_t o) { p.y[(t * p.N + n) * p.O + o] = y[i]; });
}

template <typename half_t, int kBlocks, int kReplicas, bool kShared>
__global__ void __launch_bounds__(kLinearThreads) bayes_forward_kernel(BayesForwardArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const ForwardPlace<half_t, kReplicas> at(p, kBlocks * 8);
  float acc[kReplicas][kBlocks][4] = {};
  if constexpr (kBlocks > 1)
    multiply_staged<half_t, kBlocks, kReplicas, kShared>(acc, shared, p, keys, at);
  else if (at.inside(p))
    multiply_direct<half_t, kReplicas, kShared>(acc, p, keys, at);
  add_parts(acc, reinterpret_cast<float*>(shared), at.part, p.parts);
  if (at.part > 0) return;

  const float scale = *p.x_scale * *p.sigma_scale;
#pragma unroll
  for (int r = 0; r < kReplicas; ++r)
#pragma unroll
    for (int b = 0; b < kBlocks; b += kTogether) store_sums<kShared>(acc[r], b, scale, p, at, r);
}

// ---- launches ----------------------------------------------------------------------------------

template <typename half_t, int kBlocks, int kReplicas>
void launch_forward(BayesForwardArgs<half_t> p, cudaStream_t stream) {
  const int64_t groups = ceil_div<int64_t>(p.T, kReplicas),
                row_blocks = ceil_div<int64_t>(p.N, kBlocks * 8),
                tiles_o = ceil_div<int64_t>(p.O, kEdge);
  p.parts = count_parts(groups * row_blocks * tiles_o, kBlocks > 1 ? 4 : 8);
  const dim3 grid(
      unsigned(groups), unsigned(ceil_div<int64_t>(tiles_o, kLinearWarps / p.parts)),
      unsigned(row_blocks));
  const int copies = p.shared ? 1 : kReplicas, rows = kBlocks > 1 ? 2 * copies * kBlocks * 8 : 0;
  const int shared = larger(rows * kPitchBytes, parts_bytes(kReplicas * kBlocks * 4, p.parts));
  const auto kernel = p.shared ? bayes_forward_kernel<half_t, kBlocks, kReplicas, true>
                               : bayes_forward_kernel<half_t, kBlocks, kReplicas, false>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

// Four replicas a warp share what it loads; two or one where that many would be made for nothing.
template <typename half_t, int kBlocks>
void launch_replicas(const BayesForwardArgs<half_t>& p, cudaStream_t stream) {
  const int64_t made = ceil_div<int64_t>(p.T, 4) * 4;
  if (p.T == 1) return launch_forward<half_t, kBlocks, 1>(p, stream);
  if ((made - p.T) * 8 > p.T) return launch_forward<half_t, kBlocks, 2>(p, stream);
  launch_forward<half_t, kBlocks, 4>(p, stream);
}

// The noise is made again for every 8 kBlocks rows, so a warp's rows cover N as far as registers
// go: 64 sums a lane.
template <typename half_t>
void run_bayes_forward(const BayesForwardArgs<half_t>& p, cudaStream_t stream) {
  if (p.N <= 8) return launch_replicas<half_t, 1>(p, stream);
  if (p.N <= 32) return launch_replicas<half_t, 4>(p, stream);
  if (p.N <= 64 && p.T > 1) return launch_forward<half_t, 8, 2>(p, stream);
  if (p.N <= 64) return launch_forward<half_t, 8, 1>(p, stream);
  launch_forward<half_t, 16, 1>(p, stream);
}

}  // namespace bnuq
