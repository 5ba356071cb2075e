// What the fused products of bayes_linear read: 16-bit matrices over a power of two, which brings
// float16's range to where the numbers lie. In two passes: each block of the first keeps its
// largest number, each of the second finds the largest of those.
#pragma once
#include <type_traits>

#include "lane_weights.cuh"
#include "weight_fragments.cuh"

namespace bnuq {

constexpr int kOperandThreads = 256;
constexpr int kOperandBlocks = 512;      // of the first pass, at most
constexpr int64_t kSampleBlocks = 2112;  // keep a GPU busy; more would make keys for less noise

// The largest of the block's numbers, in every thread; NaN counts for nothing.
BNUQ_DEVICE float block_max(float v) {
  BNUQ_SHARED(float, partial, [kOperandThreads / kWarp]);
  for (int d = kWarp / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, d));
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = partial[threadIdx.x % (kOperandThreads / kWarp)];
  for (int d = kOperandThreads / kWarp / 2; d > 0; d /= 2)
    v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

// A float32 matrix (rows, columns), and what is made of it.
struct Operand {
  const float* from;
  uint4* to;
  float* scale;  // the power of two
  int64_t rows, columns;
  bool sigma;         // of rho its softplus, in the order of the fragments
  bool wide = false;  // four neighbours lie on 16 bytes

  BNUQ_HD int64_t threads() const {
    const int64_t columns16 = ceil_div<int64_t>(columns, kEdge);
    return sigma ? ceil_div<int64_t>(rows, kEdge) * columns16 * kWarp : rows * columns16 * 2;
  }
};

// Those of a call. A row of the grid's blocks has one of them.
struct Operands {
  Operand of[3] = {};
  int count = 0;

  void add(const Operand& operand) { of[count++] = operand; }
};

// The largest finite number of each block; the largest magnitude where there are signs.
template <typename = void>
__global__ void __launch_bounds__(kOperandThreads)
    largest_kernel(float* __restrict__ partial, Operands p) {
  const Operand& m = p.of[blockIdx.y];
  const float* __restrict__ v = m.from;
  const int64_t n = m.rows * m.columns, stride = int64_t(gridDim.x) * kOperandThreads;
  const unsigned kept = m.sigma ? ~0u : ~0u >> 1;
  float largest = -INFINITY;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x; i < n; i += stride) {
    const float magnitude = __uint_as_float(__float_as_uint(v[i]) & kept);
    if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) partial[blockIdx.y * kOperandBlocks + blockIdx.x] = largest;
}

// All threads of the block.
BNUQ_DEVICE float largest_of(const float* partial, int count) {
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < count; i += kOperandThreads) largest = fmaxf(largest, partial[i]);
  return block_max(largest);
}

struct Scale {
  float factor, inverse;
};

// The power of two over which `largest` lies in [2^(exponent - 1), 2^exponent); 1 where there is
// none. Below 2^-113 a number may lose bits: the inverse has to be finite.
BNUQ_DEVICE Scale power_of_two(float largest, int exponent) {
  if (!(largest > 0.0f && largest < INFINITY)) return {1.0f, 1.0f};
  const int shift = larger(int(__float_as_uint(largest) >> 23) - 126, -112) - exponent;
  return {
      __uint_as_float(unsigned(127 + shift) << 23), __uint_as_float(unsigned(127 - shift) << 23)};
}

// (rows, columns) to (rows, columns padded to 16), eight numbers a thread.
template <typename half_t>
BNUQ_DEVICE void pack_rows(const Operand& m, float inverse, int64_t i) {
  const int64_t groups = ceil_div<int64_t>(m.columns, kEdge) * 2, first = i % groups * 8;
  const float* from = m.from + i / groups * m.columns + first;
  const int inside = int(smaller<int64_t>(8, m.columns - first));
  float z[2][4] = {};
  uint32_t pairs[4];
  if (m.wide) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (4 * h < inside) unpack(load_stream<4>(from + 4 * h), z[h]);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (e < inside) z[e / 4][e % 4] = from[e];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e)
    pairs[e] = pack2<half_t>(z[e / 2][e % 2 * 2] * inverse, z[e / 2][e % 2 * 2 + 1] * inverse);
  m.to[i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// sigma of rho in the order of the fragments, a lane's share a thread.
template <typename half_t>
BNUQ_DEVICE void pack_sigma(const Operand& m, float inverse, int64_t i) {
  const int64_t tiles_i = ceil_div<int64_t>(m.columns, kEdge), tile = i / kWarp;
  float v[8];
  lane_sigma(v, m.from, tile / tiles_i, tile % tiles_i, int(i % kWarp), m.rows, m.columns);
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) v[slot] *= kNormalScale * inverse;
  m.to[i] = {
      pack2<half_t>(v[0], v[1]), pack2<half_t>(v[2], v[3]), pack2<half_t>(v[4], v[5]),
      pack2<half_t>(v[6], v[7])};
}

// Float16 has its largest number in [2^13, 2^14); sigma in [2^11, 2^12): times eps, at most 5.1, it
// stays below 65504. bfloat16 has the range of float32: no partials, and no scale.
template <typename half_t>
__global__ void __launch_bounds__(kOperandThreads)
    operand_kernel(Operands p, const float* __restrict__ partial, int partials) {
  const Operand& m = p.of[blockIdx.y];
  const int64_t first = int64_t(blockIdx.x) * kOperandThreads, i = first + threadIdx.x;
  if (first > 0 && first >= m.threads()) return;
  Scale s = {1.0f, 1.0f};
  if (partials) {
    const float largest = largest_of(partial + blockIdx.y * kOperandBlocks, partials);
    s = power_of_two(m.sigma ? softplus(largest) : largest, m.sigma ? 12 : 14);
  }
  if (i == 0) *m.scale = s.factor;
  if (i >= m.threads()) return;
  m.sigma ? pack_sigma<half_t>(m, s.inverse, i) : pack_rows<half_t>(m, s.inverse, i);
}

// ---- launches ----------------------------------------------------------------------------------

inline dim3 operand_grid(int64_t threads, int rows = 1) {
  const int64_t blocks = larger<int64_t>(1, ceil_div<int64_t>(threads, kOperandThreads));
  return dim3(unsigned(blocks), unsigned(rows));
}

template <typename half_t>
constexpr bool kScaled = !std::is_same_v<half_t, __nv_bfloat16>;

// partial: (3, kOperandBlocks), to work in; null for bfloat16.
template <typename half_t>
void run_operands(Operands p, float* partial, cudaStream_t stream) {
  int64_t largest = 0, threads = 0;
  for (int k = 0; k < p.count; ++k) {
    Operand& m = p.of[k];
    m.wide = m.columns % 4 == 0 && aligned(m.from);
    largest = larger(largest, m.rows * m.columns), threads = larger(threads, m.threads());
  }
  int partials = 0;
  if (kScaled<half_t>) {
    const auto kernel = largest_kernel<>;
    const dim3 grid = operand_grid(
        smaller<int64_t>(kOperandBlocks * kOperandThreads, ceil_div<int64_t>(largest, 8)), p.count);
    partials = int(grid.x);
    BNUQ_LAUNCH(kernel, grid, dim3(kOperandThreads), 0, stream, partial, p);
  }
  const auto kernel = operand_kernel<half_t>;
  BNUQ_LAUNCH(
      kernel, operand_grid(threads, p.count), dim3(kOperandThreads), 0, stream, p, partial,
      partials);
}

// For weights of R replicas: rows of tiles, their columns, and groups of replicas, evenly, into as
// few as keep a GPU busy.
inline dim3 sample_grid(int64_t R, int64_t O, int64_t tiles_i) {
  const int64_t tiles_o = ceil_div<int64_t>(O, kEdge);
  const int64_t steps = larger<int64_t>(1, ceil_div<int64_t>(tiles_i * kWarp, kOperandThreads));
  const auto split = [](int64_t work, int64_t blocks) {
    const int64_t parts = smaller(work, ceil_div<int64_t>(kSampleBlocks, blocks));
    return ceil_div(work, ceil_div(work, parts));
  };
  const int64_t columns = split(steps, tiles_o), groups = split(R, tiles_o * columns);
  return dim3(unsigned(tiles_o), unsigned(columns), unsigned(groups));
}

}  // namespace bnuq
