// gaussian_kl and mixture_kl: one pass over mu and rho, 8 bytes an element, 16 in the backward.
// Each block writes one partial sum in float64 and one block adds the partials in order: the result
// does not depend on the order in which blocks finish.
#pragma once
#include "../kl.h"
#include "weights_kernels.cuh"

namespace bnuq {

constexpr int kKlThreads = 256;
constexpr int kKlBlocks = 1024;  // fill any current GPU; so many partials cost nothing to add

// The sum over the block, in every thread of its first warp.
BNUQ_DEVICE double block_sum(double v) {
  BNUQ_SHARED(double, partial, [kKlThreads / kWarp]);
  v = lanes_sum(v);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = threadIdx.x < kKlThreads / kWarp ? partial[threadIdx.x] : 0.0;
  return threadIdx.x < kWarp ? lanes_sum(v) : 0.0;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads) gaussian_kl_kernel(
    double* __restrict__ partial, const acc_t* __restrict__ mu, const acc_t* __restrict__ rho,
    acc_t log_std, acc_t precision, int64_t n) {
  double sum = 0;
  const int64_t stride = int64_t(gridDim.x) * kKlThreads;
  for (int64_t i = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; i < n; i += stride)
    sum += double(gaussian_kl_term(mu[i], rho[i], log_std, precision).value);
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads) gaussian_kl_backward_kernel(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_rho, const acc_t* __restrict__ grad,
    const acc_t* __restrict__ mu, const acc_t* __restrict__ rho, acc_t precision, int64_t n) {
  const int64_t stride = int64_t(gridDim.x) * kKlThreads;
  for (int64_t i = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; i < n; i += stride) {
    const KlTerm<acc_t> term = gaussian_kl_term(mu[i], rho[i], acc_t(0), precision);
    grad_mu[i] = *grad * term.by_mu;
    grad_rho[i] = *grad * term.by_rho;
  }
}

template <typename acc_t>
struct MixtureArgs {
  const acc_t *mu, *rho;
  const int64_t* seed;
  uint32_t stream;
  int64_t T, O, I;
  bool matrix;  // (O, I) has the weights' noise; else (I,) has a bias's
  Mixture<acc_t> prior;
};

// body(element, posterior, eps) for the eight neighbours of Philox call `group` in replica t.
template <typename acc_t, typename Body>
BNUQ_DEVICE void for_mixture_group(
    const MixtureArgs<acc_t>& p, Key sub, int64_t group, int64_t t, const Body& body) {
  float z[8];
  const uint64_t replica = uint64_t(p.seed[1] + t);
  if (p.matrix) {
    const int64_t tiles_i = ceil_div<int64_t>(p.I, 16), tile = group / kWarp;
    const int64_t tile_o = tile / tiles_i, tile_i = tile % tiles_i;
    const int lane = int(group % kWarp);
    normals8(philox_at(sub, weight_index(tile_o, tile_i, lane), replica), z);
    for_lane_weights(
        tile_o, tile_i, lane, p.O, p.I, [&](int slot, int64_t k) { body(k, acc_t(z[slot])); });
  } else {
    normals8(philox_at(sub, uint64_t(group), replica), z);
#pragma unroll
    for (int slot = 0; slot < 8; ++slot)
      if (group * 8 + slot < p.I) body(group * 8 + slot, acc_t(z[slot]));
  }
}

template <typename acc_t>
BNUQ_HD int64_t mixture_groups(const MixtureArgs<acc_t>& p) {
  return p.matrix ? ((p.O + 15) / 16) * ((p.I + 15) / 16) * kWarp : (p.I + 7) / 8;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads)
    mixture_kl_kernel(double* __restrict__ partial, MixtureArgs<acc_t> p) {
  const Key sub = subkey(p.seed[0], p.stream, p.matrix ? kTagWeight : kTagBias);
  const int64_t stride = int64_t(gridDim.x) * kKlThreads, groups = mixture_groups(p);
  double sum = 0;
  for (int64_t g = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; g < groups; g += stride)
    for (int64_t t = 0; t < p.T; ++t)
      for_mixture_group(p, sub, g, t, [&](int64_t k, acc_t eps) {
        sum += double(mixture_kl_term(p.mu[k], posterior(p.rho[k]), eps, p.prior).value);
      });
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads) mixture_kl_backward_kernel(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_rho, const acc_t* __restrict__ grad,
    MixtureArgs<acc_t> p) {
  const Key sub = subkey(p.seed[0], p.stream, p.matrix ? kTagWeight : kTagBias);
  const int64_t stride = int64_t(gridDim.x) * kKlThreads, groups = mixture_groups(p);
  const acc_t scale = *grad / acc_t(p.T);
  for (int64_t g = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; g < groups; g += stride)
    for (int64_t t = 0; t < p.T; ++t)
      for_mixture_group(p, sub, g, t, [&](int64_t k, acc_t eps) {
        const KlTerm<acc_t> term = mixture_kl_term(p.mu[k], posterior(p.rho[k]), eps, p.prior);
        grad_mu[k] += scale * term.by_mu;
        grad_rho[k] += scale * term.by_rho;
      });
}

// out = scale * the sum of the partials, by one block.
template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads) add_partials_kernel(
    acc_t* __restrict__ out, const double* __restrict__ partial, int n, double scale) {
  double sum = 0;
  for (int i = threadIdx.x; i < n; i += kKlThreads) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = acc_t(scale * sum);
}

// ---- launches ----------------------------------------------------------------------------------

inline int kl_blocks(int64_t threads) {
  return int(
      larger<int64_t>(1, smaller<int64_t>(ceil_div<int64_t>(threads, kKlThreads), kKlBlocks)));
}

template <typename acc_t>
void run_add_partials(acc_t* out, const double* partial, int n, double scale, cudaStream_t stream) {
  const auto kernel = add_partials_kernel<acc_t>;
  BNUQ_LAUNCH(kernel, dim3(1), dim3(kKlThreads), 0, stream, out, partial, n, scale);
}

template <typename acc_t>
void run_gaussian_kl(
    acc_t* out, double* partial, const acc_t* mu, const acc_t* rho, double prior_std, int64_t n,
    cudaStream_t stream) {
  const auto kernel = gaussian_kl_kernel<acc_t>;
  const int blocks = kl_blocks(n);
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(blocks)), dim3(kKlThreads), 0, stream, partial, mu, rho,
      acc_t(std::log(prior_std)), acc_t(1 / (prior_std * prior_std)), n);
  run_add_partials(out, partial, blocks, 1.0, stream);
}

template <typename acc_t>
void run_gaussian_kl_backward(
    acc_t* grad_mu, acc_t* grad_rho, const acc_t* grad, const acc_t* mu, const acc_t* rho,
    double prior_std, int64_t n, cudaStream_t stream) {
  const auto kernel = gaussian_kl_backward_kernel<acc_t>;
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(kl_blocks(n))), dim3(kKlThreads), 0, stream, grad_mu, grad_rho, grad,
      mu, rho, acc_t(1 / (prior_std * prior_std)), n);
}

template <typename acc_t>
void run_mixture_kl(acc_t* out, double* partial, const MixtureArgs<acc_t>& p, cudaStream_t stream) {
  const auto kernel = mixture_kl_kernel<acc_t>;
  const int blocks = kl_blocks(mixture_groups(p));
  BNUQ_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(kKlThreads), 0, stream, partial, p);
  run_add_partials(out, partial, blocks, 1.0 / double(p.T), stream);
}

// Adds to grad_mu and grad_rho.
template <typename acc_t>
void run_mixture_kl_backward(
    acc_t* grad_mu, acc_t* grad_rho, const acc_t* grad, const MixtureArgs<acc_t>& p,
    cudaStream_t stream) {
  const auto kernel = mixture_kl_backward_kernel<acc_t>;
  BNUQ_LAUNCH(
      kernel, dim3(unsigned(kl_blocks(mixture_groups(p)))), dim3(kKlThreads), 0, stream, grad_mu,
      grad_rho, grad, p);
}

}  // namespace bnuq
