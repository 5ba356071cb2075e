// What adds the batched products of bayes_linear to the rest of its result.
//
// The floor is bytes: a product's 4 are read and a result's 4 are written once.
#pragma once
#include "device.cuh"

namespace bnuq {

constexpr int kAddThreads = 256;

struct AddProductsArgs {
  const float* product;  // (R, N, padded columns)
  const float *scale, *other_scale;
  const float* base;  // (R or 1, N, columns); may be out
  const float* bias;  // (R, columns) or null
  float* out;         // (R, N, columns), or (N, columns) for the sum over R
  int64_t R, N, columns, padded;
  bool one_base, summed;
};

// out[r] = base[r] + bias[r] + scale * other_scale * product[r]
template <typename = void>
__global__ void __launch_bounds__(kAddThreads) add_products_kernel(AddProductsArgs p) {
  const int64_t size = p.N * p.columns, stride = int64_t(gridDim.x) * kAddThreads;
  const int64_t all = p.summed ? size : p.R * size, step = p.N * p.padded;
  const float scale = *p.scale * *p.other_scale;
  for (int64_t i = int64_t(blockIdx.x) * kAddThreads + threadIdx.x; i < all; i += stride) {
    const int64_t row = i / p.columns, column = i - row * p.columns;
    const float* product = p.product + row * p.padded + column;
    float sum = p.base[p.one_base ? i % size : i];
    if (p.bias) sum += p.bias[row / p.N * p.columns + column];
    for (int64_t r = 0; r < (p.summed ? p.R : 1); ++r) sum += scale * product[r * step];
    p.out[i] = sum;
  }
}

inline void run_add_products(const AddProductsArgs& p, cudaStream_t stream) {
  const int64_t all = (p.summed ? 1 : p.R) * p.N * p.columns;
  if (all == 0) return;
  const dim3 blocks(unsigned(smaller<int64_t>(ceil_div<int64_t>(all, kAddThreads), 132 * 16)));
  const auto kernel = add_products_kernel<>;
  BNUQ_LAUNCH(kernel, blocks, dim3(kAddThreads), 0, stream, p);
}

}  // namespace bnuq
