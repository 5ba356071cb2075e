// What the fused products of bayes_linear read: biases, and 16-bit matrices over a power of two,
// which brings float16's range to where the numbers lie. The matrices in two passes: each block of
// the first keeps its largest number, each of the second finds the largest of those.
#pragma once
#include <type_traits>

#include "weight_fragments.cuh"

namespace bnuq {

constexpr int kOperandThreads = 256;
constexpr int kOperandBlocks = 512;  // of the first pass, at most

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

// The largest v, or |v|, of each block.
template <bool kAbsolute>
__global__ void __launch_bounds__(kOperandThreads)
    largest_kernel(float* __restrict__ partial, const float* __restrict__ v, int64_t n) {
  const int64_t stride = int64_t(gridDim.x) * kOperandThreads;
  float largest = -INFINITY;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x; i < n; i += stride)
    largest = fmaxf(largest, kAbsolute ? fabsf(v[i]) : v[i]);
  largest = block_max(largest);
  if (threadIdx.x == 0) partial[blockIdx.x] = largest;
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

// (rows, columns) to (rows, columns padded to 16), eight numbers a thread. The largest lies in
// [2^13, 2^14) for float16; bfloat16 has the range of float32: no partials, and no scale. `wide`:
// four neighbours of v lie on 16 bytes.
template <typename half_t>
__global__ void __launch_bounds__(kOperandThreads) half_operand_kernel(
    uint4* __restrict__ out, float* __restrict__ scale, const float* __restrict__ v,
    const float* __restrict__ partial, int partials, int64_t rows, int64_t columns, bool wide) {
  const Scale s = partials ? power_of_two(largest_of(partial, partials), 14) : Scale{1.0f, 1.0f};
  const int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x;
  const int64_t groups = ceil_div<int64_t>(columns, kEdge) * 2;
  if (i == 0) *scale = s.factor;
  if (i >= rows * groups) return;
  const int64_t first = i % groups * 8;
  const float* from = v + i / groups * columns + first;
  const int inside = int(smaller<int64_t>(8, columns - first));
  float z[2][4] = {};
  uint32_t pairs[4];
  if (wide) {
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
    pairs[e] = pack2<half_t>(z[e / 2][e % 2 * 2] * s.inverse, z[e / 2][e % 2 * 2 + 1] * s.inverse);
  out[i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// sigma of rho in the order of the fragments. Times eps, at most 5.1, it stays below 65504.
template <typename half_t>
__global__ void __launch_bounds__(kOperandThreads) pack_sigma_kernel(
    uint4* __restrict__ out, float* __restrict__ scale, const float* __restrict__ rho,
    const float* __restrict__ partial, int partials, int64_t O, int64_t I) {
  const Scale s =
      partials ? power_of_two(softplus(largest_of(partial, partials)), 12) : Scale{1.0f, 1.0f};
  const int64_t tiles_i = ceil_div<int64_t>(I, kEdge),
                tiles = ceil_div<int64_t>(O, kEdge) * tiles_i;
  const int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x;
  if (i == 0) *scale = s.factor;
  if (i >= tiles * kWarp) return;
  const int lane = int(i % kWarp);
  const int64_t tile = i / kWarp, row = tile / tiles_i * kEdge, column = tile % tiles_i * kEdge;
  float v[8];
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    const int64_t o = row + lane / 4 + (slot >> 1 & 1) * 8;
    const int64_t k = column + lane % 4 * 2 + (slot & 1) + (slot >> 2) * 8;
    v[slot] = o < O && k < I ? softplus(rho[o * I + k]) * (kNormalScale * s.inverse) : 0.0f;
  }
  out[i] = {
      pack2<half_t>(v[0], v[1]), pack2<half_t>(v[2], v[3]), pack2<half_t>(v[4], v[5]),
      pack2<half_t>(v[6], v[7])};
}

// (R, O, padded I) = sigma * eps of replicas first .. first + R - 1, for a matrix product of
// torch's: one thread a Philox call. The padding is zero, as sigma is there.
template <typename half_t>
__global__ void __launch_bounds__(kOperandThreads) sample_noise_kernel(
    half_t* __restrict__ weight, const uint4* __restrict__ sigma, const int64_t* __restrict__ seed,
    uint32_t stream, int64_t first, int64_t R, int64_t O, int64_t tiles_i) {
  const int64_t tiles_o = ceil_div<int64_t>(O, kEdge), lanes = tiles_o * tiles_i * kWarp;
  const int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x, replica = i / lanes;
  if (replica >= R) return;
  const int64_t own = i % lanes, tile_i = own / kWarp % tiles_i, tile_o = own / kWarp / tiles_i;
  const int lane = int(own % kWarp);
  const RoundKeys keys(subkey(seed[0], stream, kTagWeight));
  uint32_t a[4];
  weight_fragment<half_t>(
      a, __ldg(sigma + own), keys, uint32_t(tile_o), uint32_t(tile_i * kWarp) + lane,
      uint64_t(seed[1] + first + replica));
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int64_t o = tile_o * kEdge + lane / 4 + r % 2 * 8;
    const int64_t k = tile_i * kEdge + lane % 4 * 2 + r / 2 * 8;
    if (o < O)
      *reinterpret_cast<uint32_t*>(weight + ((replica * O + o) * tiles_i * kEdge + k)) = a[r];
  }
}

// The biases of all replicas, (T, O) = mu + softplus(rho) * eps: one thread a Philox call.
template <typename = void>
__global__ void __launch_bounds__(kOperandThreads) sample_bias_kernel(
    float* __restrict__ bias, const float* __restrict__ mu, const float* __restrict__ rho,
    const int64_t* __restrict__ seed, uint32_t stream, int64_t T, int64_t O) {
  const int64_t groups = ceil_div<int64_t>(O, 8);
  const int64_t i = int64_t(blockIdx.x) * kOperandThreads + threadIdx.x;
  if (i >= T * groups) return;
  const int64_t t = i / groups, first = i % groups * 8;
  float z[8];
  normals8(philox_at(subkey(seed[0], stream, kTagBias), first >> 3, uint64_t(seed[1] + t)), z);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (first + e < O) bias[t * O + first + e] = mu[first + e] + softplus(rho[first + e]) * z[e];
}

// ---- launches ----------------------------------------------------------------------------------

inline dim3 operand_grid(int64_t threads) {
  return dim3(unsigned(larger<int64_t>(1, ceil_div<int64_t>(threads, kOperandThreads))));
}

// Returns how many partials there are.
template <bool kAbsolute>
int run_largest(float* partial, const float* v, int64_t n, cudaStream_t stream) {
  const auto kernel = largest_kernel<kAbsolute>;
  const int64_t blocks = ceil_div<int64_t>(n, int64_t(kOperandThreads) * 8);
  const int count = int(larger<int64_t>(1, smaller<int64_t>(kOperandBlocks, blocks)));
  BNUQ_LAUNCH(kernel, dim3(unsigned(count)), dim3(kOperandThreads), 0, stream, partial, v, n);
  return count;
}

template <typename half_t>
constexpr bool kScaled = !std::is_same_v<half_t, __nv_bfloat16>;

template <typename half_t>
void run_half_operand(
    uint4* out, float* scale, float* partial, const float* v, int64_t rows, int64_t columns,
    cudaStream_t stream) {
  const int count = kScaled<half_t> ? run_largest<true>(partial, v, rows * columns, stream) : 0;
  const auto kernel = half_operand_kernel<half_t>;
  const int64_t threads = rows * ceil_div<int64_t>(columns, kEdge) * 2;
  BNUQ_LAUNCH(
      kernel, operand_grid(threads), dim3(kOperandThreads), 0, stream, out, scale, v, partial,
      count, rows, columns, columns % 4 == 0 && aligned(v));
}

template <typename half_t>
void run_pack_sigma(
    uint4* out, float* scale, float* partial, const float* rho, int64_t O, int64_t I,
    cudaStream_t stream) {
  const int count = kScaled<half_t> ? run_largest<false>(partial, rho, O * I, stream) : 0;
  const auto kernel = pack_sigma_kernel<half_t>;
  const int64_t threads = ceil_div<int64_t>(O, kEdge) * ceil_div<int64_t>(I, kEdge) * kWarp;
  BNUQ_LAUNCH(
      kernel, operand_grid(threads), dim3(kOperandThreads), 0, stream, out, scale, rho, partial,
      count, O, I);
}

template <typename half_t>
void run_sample_noise(
    half_t* weight, const uint4* sigma, const int64_t* seed, uint32_t stream_id, int64_t first,
    int64_t R, int64_t O, int64_t tiles_i, cudaStream_t stream) {
  const auto kernel = sample_noise_kernel<half_t>;
  const int64_t threads = R * ceil_div<int64_t>(O, kEdge) * tiles_i * kWarp;
  BNUQ_LAUNCH(
      kernel, operand_grid(threads), dim3(kOperandThreads), 0, stream, weight, sigma, seed,
      stream_id, first, R, O, tiles_i);
}

inline void run_sample_bias(
    float* bias, const float* mu, const float* rho, const int64_t* seed, uint32_t stream_id,
    int64_t T, int64_t O, cudaStream_t stream) {
  const auto kernel = sample_bias_kernel<>;
  BNUQ_LAUNCH(
      kernel, operand_grid(T * ceil_div<int64_t>(O, 8)), dim3(kOperandThreads), 0, stream, bias, mu,
      rho, seed, stream_id, T, O);
}

}  // namespace bnuq
