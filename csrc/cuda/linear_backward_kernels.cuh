// The backward of bayes_linear: products with sigma * eps whose noise is made again, as in the
// forward. The floor is that of linear_kernels.cuh, once for grad_x and once for grad_rho.
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
  int parts = 1;
};

// A warp owns 16 columns of x and 16 kTiles rows, or a part of their sums; a block 8 such, of the
// same rows, which share grad_y. The fragment of the weights is transposed, 8 x 8 at a time, into
// that of the second operand.
template <typename half_t, int kTiles>
__global__ void __launch_bounds__(kLinearThreads, kTiles <= 2 ? 4 : 2)
    bayes_grad_x_kernel(BayesGradXArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared);
  constexpr int kBuffer = kTiles * kEdge * kPitchBytes, kSteps = kStage / kEdge;
  const Lane at;
  const int part = at.warp % p.parts;
  const int64_t tiles_i = ceil_div<int64_t>(p.I, kEdge);
  const int64_t tile_i = int64_t(blockIdx.y) * (kLinearWarps / p.parts) + at.warp / p.parts;
  const int64_t row = int64_t(blockIdx.z) * kTiles * kEdge;
  const int64_t first = p.shared ? 0 : blockIdx.x, last = p.shared ? p.T : first + 1;
  const int tiles_o = int(p.O / kEdge), stages = ceil_div(tiles_o, kSteps);
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const SharedAddress start = shared_address(shared);
  RowCopy<half_t> grads = RowCopy<half_t>::at(p.grad_y + (first * p.N + row) * p.O, p.O);
  const int rows = int(smaller<int64_t>(kTiles * kEdge, p.N - row));
  int column = grads.column();
  const auto stage = [&](int buffer) {
    grads.template begin<kTiles * kEdge>(
        start + buffer * kBuffer, kTiles * kEdge, column < p.O ? rows : 0);
    grads.from += kStage;
    column += kStage;
  };
  // Of matrices (rows 0, columns 0), (8, 0), (0, 8), (8, 8).
  const SharedAddress own = start + at.lane % 16 * kPitchBytes + at.lane / 16 * 16;
  int buffer = 0;
  float acc[kTiles][2][4] = {};

  if (stages > 0) stage(buffer);
  for (int64_t t = first; t < last; ++t) {
    int tile_o = part;
    const uint4* sigma = p.sigma + (tile_o * tiles_i + tile_i) * kWarp + at.lane;
    for (int i = 0; i < stages; ++i, buffer ^= 1) {
      wait_for_copies();
      __syncthreads();
      if (i + 1 == stages) {
        grads.from += p.N * p.O - stages * kStage;
        column = grads.column();
      }
      if (i + 1 < stages || t + 1 < last) stage(buffer ^ 1);
      if (tile_i >= tiles_i) continue;
      SharedAddress columns = own + buffer * kBuffer + part * kEdge * 2;
      const int stop = smaller((i + 1) * kSteps, tiles_o);
#pragma unroll 1
      for (; tile_o < stop; tile_o += p.parts) {
        uint32_t w[4];
        weight_fragment<half_t>(
            w, __ldg(sigma), keys, uint32_t(tile_o), uint32_t(tile_i * kWarp) + at.lane,
            uint64_t(p.seed[1] + t));
        const uint32_t low[2] = {transpose8(w[0]), transpose8(w[1])};
        const uint32_t high[2] = {transpose8(w[2]), transpose8(w[3])};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t a[4];
          load_matrices<false>(a, columns + m * kEdge * kPitchBytes);
          mma<half_t>(acc[m][0], a, low);
          mma<half_t>(acc[m][1], a, high);
        }
        sigma += p.parts * tiles_i * kWarp;
        columns += p.parts * kEdge * 2;
      }
    }
  }
  add_parts(acc, reinterpret_cast<float*>(shared), part, p.parts);
  if (part > 0) return;

  const float scale = *p.grad_scale * *p.sigma_scale;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    float grad[8];  // all loads before the stores, which the compiler must keep in order
    const auto each = [&](const auto& body) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int64_t n = row + m * kEdge + at.g + k / 2 % 2 * 8,
                      i = tile_i * kEdge + k / 4 * 8 + at.pair + k % 2;
        if (n < p.N && i < p.I) body(k, (first * p.N + n) * p.I + i);
      }
    };
    each([&](int k, int64_t at) { grad[k] = p.grad_x[at] + scale * acc[m][k / 4][k % 4]; });
    each([&](int k, int64_t at) { p.grad_x[at] = grad[k]; });
  }
}

// ---- grad_rho = sigmoid(rho) * sum over t of eps[t] * (grad_y[t]^T @ x[t]) ---------------------

template <typename half_t>
struct BayesGradRhoArgs {
  const half_t* grad_y;  // (T, N, padded O)
  const half_t* x;       // (T or 1, N, padded I)
  const float* rho;      // (O, I)
  const float *grad_scale, *x_scale;
  const int64_t* seed;
  float* grad_rho;  // (O, I)
  int64_t T, N, O, I;
  uint32_t stream;
  bool shared;
  int parts = 1;
  float* sums = nullptr;  // (parts, O, I), where there are several
};

constexpr int kGradWarpsO = 4, kGradWarpsI = 2, kGradTiles = 2;
constexpr int kGradEdge = kGradWarpsO * kEdge;  // of the weights of a block
static_assert(kGradEdge == kStage && kGradWarpsI * kGradTiles * kEdge == kStage);

template <typename half_t>
BNUQ_DEVICE float rho_scale(const BayesGradRhoArgs<half_t>& p) {
  return kNormalScale * *p.grad_scale * *p.x_scale;
}

BNUQ_DEVICE float finished_rho(float sum, float rho, float scale) {
  return scale * sum * sigmoid(rho);
}

// product += grad_y^T @ x over `rows` staged rows, a multiple of 16, for a warp's 16 x 32 weights.
template <typename half_t>
BNUQ_DEVICE void multiply_rows(
    float (&product)[kGradTiles][2][4], SharedAddress grads, SharedAddress xs, int rows) {
#pragma unroll
  for (int step = 0; step < kStage / kEdge; ++step) {
    if (step * kEdge >= rows) break;
    uint32_t a[4];
    load_matrices<true>(a, grads + step * kEdge * kPitchBytes);
#pragma unroll
    for (int j = 0; j < kGradTiles; ++j) {
      uint32_t b[4];
      load_matrices<true>(b, xs + step * kEdge * kPitchBytes + j * kEdge * 2);
      mma<half_t>(product[j][0], a, {b[0], b[1]});
      mma<half_t>(product[j][1], a, {b[2], b[3]});
    }
  }
}

// A warp owns a tile of 16 x 32 weights and all replicas, or a part of them; a block 64 x 64. The
// sums of an mma lie in the lanes that hold the noise of the same weights. Rows are copied while
// noise is made.
template <typename half_t>
__global__ void __launch_bounds__(kLinearThreads, 2)
    bayes_grad_rho_kernel(BayesGradRhoArgs<half_t> p) {
  BNUQ_DYNAMIC_SHARED(half_t, shared);
  constexpr int kMatrix = kStage * kPitchBytes;
  const Lane at;
  const int warp_o = at.warp % kGradWarpsO, warp_i = at.warp / kGradWarpsO * kGradTiles;
  const int64_t row_o = int64_t(blockIdx.x) * kGradEdge, row_i = int64_t(blockIdx.y) * kGradEdge;
  const int64_t tile_o = row_o / kEdge + warp_o, tile_i = row_i / kEdge + warp_i;
  const RoundKeys keys(subkey(p.seed[0], p.stream, kTagWeight));
  const int N = int(p.N), stages = ceil_div(N, kStage);  // 2^31 rows do not fit a GPU
  const uint64_t replica = uint64_t(p.seed[1]);
  const SharedAddress start = shared_address(shared);
  const int64_t pitch_o = ceil_div<int64_t>(p.O, kEdge) * kEdge,
                pitch_i = ceil_div<int64_t>(p.I, kEdge) * kEdge;
  const int64_t first = p.T * blockIdx.z / p.parts, last = p.T * (blockIdx.z + 1) / p.parts;
  RowCopy<half_t> grads = RowCopy<half_t>::at(p.grad_y + first * N * pitch_o + row_o, pitch_o);
  RowCopy<half_t> xs =
      RowCopy<half_t>::at(p.x + (p.shared ? 0 : first) * N * pitch_i + row_i, pitch_i);
  const bool inside_o = row_o + grads.column() < pitch_o, inside_i = row_i + xs.column() < pitch_i;
  // From the last stage of a replica to the first of the next.
  const int64_t next_o = (N - (stages - 1) * kStage) * pitch_o,
                next_i = ((p.shared ? 0 : N) - (stages - 1) * kStage) * pitch_i;
  const auto stage = [&](int left, int buffer) {
    const SharedAddress to = start + buffer * 2 * kMatrix;
    grads.template begin<kStage>(to, left, inside_o ? left : 0);
    xs.template begin<kStage>(to + kMatrix, left, inside_i ? left : 0);
  };
  // Transposed, of matrices (rows 0, columns 0), (0, 8), (8, 0), (8, 8) and of (0, 0), (8, 0),
  // (0, 8), (8, 8).
  const int row = at.lane % 8, eight = at.lane / 8 % 2, other = at.lane / 16;
  const SharedAddress own_grads =
      start + (row + other * 8) * kPitchBytes + eight * 16 + warp_o * kEdge * 2;
  const SharedAddress own_xs =
      start + kMatrix + (row + eight * 8) * kPitchBytes + other * 16 + warp_i * kEdge * 2;
  int buffer = 0;
  float sum[kGradTiles][2][4] = {};

  stage(N, buffer);
  for (int64_t t = first; t < last; ++t) {
    float product[kGradTiles][2][4] = {};
    int left = N;
    for (int i = 0; i < stages; ++i, buffer ^= 1, left -= kStage) {
      wait_for_copies();
      __syncthreads();
      const bool more = i + 1 < stages;
      grads.from += more ? kStage * pitch_o : next_o;
      xs.from += more ? kStage * pitch_i : next_i;
      if (more || t + 1 < last) stage(more ? left - kStage : N, buffer ^ 1);
      multiply_rows<half_t>(
          product, own_grads + buffer * 2 * kMatrix, own_xs + buffer * 2 * kMatrix, left);
    }
#pragma unroll
    for (int j = 0; j < kGradTiles; ++j) {
      const Words4 words =
          keys.words(uint32_t(tile_o), uint32_t((tile_i + j) * kWarp) + at.lane, replica + t);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float z[2];
        unit_pair(words.v[r], z[0], z[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e)
          sum[j][r / 2][r % 2 * 2 + e] += z[e] * product[j][r / 2][r % 2 * 2 + e];
      }
    }
  }

  const auto each = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kGradTiles * 8; ++k) {
      const int64_t o = tile_o * kEdge + at.g + k / 2 % 2 * 8;
      const int64_t i = (tile_i + k / 8) * kEdge + k / 4 % 2 * 8 + at.pair + k % 2;
      if (o < p.O && i < p.I) body(sum[k / 8][k / 4 % 2][k % 4], k, o * p.I + i);
    }
  };
  if (p.parts > 1) {
    float* sums = p.sums + blockIdx.z * p.O * p.I;
    each([&](float own, int, int64_t at) { sums[at] = own; });
    return;
  }
  const float scale = rho_scale(p);
  float rho[kGradTiles * 8];  // all loads before the stores, as in grad_x
  each([&](float, int k, int64_t at) { rho[k] = p.rho[at]; });
  each([&](float own, int k, int64_t at) { p.grad_rho[at] = finished_rho(own, rho[k], scale); });
}

// Adds up the parts in their order.
template <typename half_t>
__global__ void __launch_bounds__(kLinearThreads)
    finish_grad_rho_kernel(BayesGradRhoArgs<half_t> p) {
  const int64_t n = p.O * p.I, k = int64_t(blockIdx.x) * kLinearThreads + threadIdx.x;
  if (k >= n) return;
  float sum = 0;
  for (int part = 0; part < p.parts; ++part) sum += p.sums[part * n + k];
  p.grad_rho[k] = finished_rho(sum, p.rho[k], rho_scale(p));
}

// ---- launches ----------------------------------------------------------------------------------

template <typename half_t, int kTiles>
void launch_grad_x(BayesGradXArgs<half_t> p, cudaStream_t stream) {
  const int64_t replicas = p.shared ? 1 : p.T, row_blocks = ceil_div<int64_t>(p.N, kTiles * kEdge),
                tiles_i = ceil_div<int64_t>(p.I, kEdge);
  p.parts =
      count_parts(replicas * row_blocks * tiles_i, kStage / kEdge, busy_warps(kTiles * kEdge));
  const dim3 grid(
      unsigned(replicas), unsigned(ceil_div<int64_t>(tiles_i, kLinearWarps / p.parts)),
      unsigned(row_blocks));
  const int shared = larger(2 * kTiles * kEdge * kPitchBytes, parts_bytes(kTiles * 8, p.parts));
  const auto kernel = bayes_grad_x_kernel<half_t, kTiles>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
}

template <typename half_t>
void run_bayes_grad_x(const BayesGradXArgs<half_t>& p, cudaStream_t stream) {
  if (p.N <= 16) return launch_grad_x<half_t, 1>(p, stream);
  if (p.N <= 32) return launch_grad_x<half_t, 2>(p, stream);
  if (p.N <= 64) return launch_grad_x<half_t, 4>(p, stream);
  launch_grad_x<half_t, 8>(p, stream);
}

// Of the replicas: one, unless the weights alone are too few for two blocks a multiprocessor. Each
// part writes and reads O * I sums, which together take some megabytes at the most.
inline int grad_rho_parts(int64_t T, int64_t O, int64_t I) {
  const int64_t blocks = ceil_div<int64_t>(O, kGradEdge) * ceil_div<int64_t>(I, kGradEdge);
  int parts = 1;
  while (2 * parts <= T && blocks * parts < kBusyBlocks / 2) parts *= 2;
  return parts;
}

template <typename half_t>
void run_bayes_grad_rho(const BayesGradRhoArgs<half_t>& p, cudaStream_t stream) {
  const dim3 grid(
      unsigned(ceil_div<int64_t>(p.O, kGradEdge)), unsigned(ceil_div<int64_t>(p.I, kGradEdge)),
      unsigned(p.parts));
  const int shared = 4 * kStage * kPitchBytes;
  const auto kernel = bayes_grad_rho_kernel<half_t>;
  BNUQ_LAUNCH(kernel, grid, dim3(kLinearThreads), shared, stream, p);
  if (p.parts == 1) return;
  const auto finish = finish_grad_rho_kernel<half_t>;
  const dim3 blocks(unsigned(ceil_div<int64_t>(p.O * p.I, kLinearThreads)));
  BNUQ_LAUNCH(finish, blocks, dim3(kLinearThreads), 0, stream, p);
}

}  // namespace bnuq
