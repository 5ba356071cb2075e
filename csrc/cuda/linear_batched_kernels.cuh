// The noise of bayes_linear as matrices for products of torch's, and what adds these to the rest of
// its result.
//
// The floor is bytes: a weight's 2 are written once, a product's 4 are read and a result's 4 are
// written once.
#pragma once
#include "operand_kernels.cuh"

namespace bnuq {

// (R, O, padded I) = sigma * eps of replicas first .. first + R - 1. A block has a row of tiles, or
// some of it, and some replicas. The padding is zero, as sigma is there.
template <typename half_t>
__global__ void __launch_bounds__(kOperandThreads) sample_noise_kernel(
    half_t* __restrict__ weight, const uint4* __restrict__ sigma, const int64_t* __restrict__ seed,
    uint32_t stream, int64_t first, int64_t R, int64_t O, int64_t tiles_i) {
  const int64_t tile_o = blockIdx.x, pitch = tiles_i * kEdge;
  const uint32_t places = uint32_t(tiles_i * kWarp), step = gridDim.y * kOperandThreads;
  const int64_t begin = R * blockIdx.z / gridDim.z, end = R * (blockIdx.z + 1) / gridDim.z;
  const RoundKeys keys(subkey(seed[0], stream, kTagWeight));
  const uint64_t replica = uint64_t(seed[1] + first);
  for (uint32_t place = blockIdx.y * kOperandThreads + threadIdx.x; place < places; place += step) {
    const uint4 own = __ldg(sigma + tile_o * places + place);
    const int lane = int(place % kWarp);
    const int64_t o = tile_o * kEdge + lane / 4, k = place / kWarp * kEdge + lane % 4 * 2;
    half_t* to = weight + (begin * O + o) * pitch + k;
    for (int64_t t = begin; t < end; ++t, to += O * pitch) {
      uint32_t a[4];
      weight_fragment<half_t>(a, own, keys, uint32_t(tile_o), place, replica + t);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (o + r % 2 * 8 < O)
          *reinterpret_cast<uint32_t*>(to + r % 2 * 8 * pitch + r / 2 * 8) = a[r];
    }
  }
}

constexpr int kAddThreads = 256, kAddEach = 4;

struct AddProductsArgs {
  const float* product;  // (R, N, padded columns)
  const float *scale, *other_scale;
  const float* base;  // (R or 1, N, columns); may be out
  const float* bias;  // (R, columns) or null
  float* out;         // (R, N, columns), or (N, columns) for the sum over R
  int64_t R, N, columns, padded;
  bool one_base, summed;
};

// out[r] = base[r] + bias[r] + scale * other_scale * product[r]. A block has one row, or some of
// it.
template <typename = void>
__global__ void __launch_bounds__(kAddThreads) add_products_kernel(AddProductsArgs p) {
  const int64_t row = blockIdx.x, replica = row / p.N;
  const float* product = p.product + row * p.padded;
  const float* base = p.base + (p.one_base ? row - replica * p.N : row) * p.columns;
  const float scale = *p.scale * *p.other_scale;
  const int64_t first = int64_t(blockIdx.y) * (kAddThreads * kAddEach) + threadIdx.x;
#pragma unroll
  for (int e = 0; e < kAddEach; ++e) {
    const int64_t column = first + e * kAddThreads;
    if (column >= p.columns) break;
    float sum = base[column];
    if (p.bias) sum += p.bias[replica * p.columns + column];
    for (int64_t r = 0; r < (p.summed ? p.R : 1); ++r)
      sum += scale * product[r * p.N * p.padded + column];
    p.out[row * p.columns + column] = sum;
  }
}

// ---- launches ----------------------------------------------------------------------------------

template <typename half_t>
void run_sample_noise(
    half_t* weight, const uint4* sigma, const int64_t* seed, uint32_t stream_id, int64_t first,
    int64_t R, int64_t O, int64_t tiles_i, cudaStream_t stream) {
  const auto kernel = sample_noise_kernel<half_t>;
  BNUQ_LAUNCH(
      kernel, sample_grid(R, O, tiles_i), dim3(kOperandThreads), 0, stream, weight, sigma, seed,
      stream_id, first, R, O, tiles_i);
}

inline void run_add_products(const AddProductsArgs& p, cudaStream_t stream) {
  const int64_t rows = (p.summed ? 1 : p.R) * p.N;
  if (rows * p.columns == 0) return;
  const int64_t columns = ceil_div<int64_t>(p.columns, kAddThreads * kAddEach);
  const auto kernel = add_products_kernel<>;
  BNUQ_LAUNCH(kernel, dim3(unsigned(rows), unsigned(columns)), dim3(kAddThreads), 0, stream, p);
}

}  // namespace bnuq
