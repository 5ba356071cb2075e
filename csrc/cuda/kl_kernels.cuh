// gaussian_kl and mixture_kl: one pass over mu and rho, 8 bytes an element, 16 in the backward.
// Each block writes one partial sum in float64 and one block adds the partials in order: the result
// does not depend on the order in which blocks finish.
#pragma once
#include "../kl.h"
#include "lane_weights.cuh"

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
struct Gaussian {
  const acc_t *mu, *rho;
  acc_t *grad_mu, *grad_rho;  // of the backward
  acc_t log_std, precision;   // of the prior
  int64_t n;
};

template <typename acc_t>
Gaussian<acc_t> gaussian_of(
    const acc_t* mu, const acc_t* rho, acc_t* grad_mu, acc_t* grad_rho, double prior_std,
    int64_t n) {
  const GaussianScale<acc_t> prior = gaussian_scale<acc_t>(prior_std);
  return {mu, rho, grad_mu, grad_rho, prior.log_std, prior.precision, n};
}

constexpr int kGaussians = 32;  // in a launch, at most: a network's layers cost one

// A row of the grid's blocks has one of them.
template <typename acc_t>
struct Gaussians {
  Gaussian<acc_t> of[kGaussians] = {};
  int count = 0;
  int64_t largest = 0;

  void add(const Gaussian<acc_t>& part) {
    of[count++] = part;
    largest = larger(largest, part.n);
  }
};

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads)
    gaussian_kl_kernel(double* __restrict__ partial, Gaussians<acc_t> p) {
  const Gaussian<acc_t>& q = p.of[blockIdx.y];
  const acc_t* __restrict__ mu = q.mu, * __restrict__ rho = q.rho;
  double sum = 0;
  const int64_t n = q.n, stride = int64_t(gridDim.x) * kKlThreads;
  for (int64_t i = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; i < n; i += stride)
    sum += double(gaussian_kl_term(mu[i], rho[i], q.log_std, q.precision).value);
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads)
    gaussian_kl_backward_kernel(const acc_t* __restrict__ grad, Gaussians<acc_t> p) {
  const Gaussian<acc_t>& q = p.of[blockIdx.y];
  const acc_t* __restrict__ mu = q.mu, * __restrict__ rho = q.rho;
  acc_t* __restrict__ grad_mu = q.grad_mu, * __restrict__ grad_rho = q.grad_rho;
  const int64_t n = q.n, stride = int64_t(gridDim.x) * kKlThreads;
  for (int64_t i = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; i < n; i += stride) {
    const KlTerm<acc_t> term = gaussian_kl_term(mu[i], rho[i], acc_t(0), q.precision);
    const acc_t by_term = unless_pruned(rho[i], *grad);
    grad_mu[i] = by_term * term.by_mu;
    grad_rho[i] = by_term * term.by_rho;
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

// The eight neighbours of one Philox call: read once, however many the replicas.
template <typename acc_t>
struct MixtureGroup {
  uint64_t place;  // of their noise
  acc_t mu[8];
  Posterior<acc_t> q[8];

  BNUQ_DEVICE MixtureGroup(const MixtureArgs<acc_t>& p, int64_t group) {
    acc_t rho[8];
    // Outside the matrix as if pruned: a term of 0.
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) {
      mu[slot] = 0;
      rho[slot] = -acc_t(INFINITY);
    }
    place = for_group(p, group, [&](int slot, int64_t k) {
      mu[slot] = p.mu[k];
      rho[slot] = p.rho[k];
    });
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) q[slot] = posterior(rho[slot]);
  }

  // body(slot, element) for those inside the matrix; returns the place of their noise.
  template <typename Body>
  BNUQ_DEVICE static uint64_t for_group(
      const MixtureArgs<acc_t>& p, int64_t group, const Body& body) {
    if (p.matrix) {
      const int64_t tiles_i = ceil_div<int64_t>(p.I, kEdge), tile = group / kWarp;
      const int64_t tile_o = tile / tiles_i, tile_i = tile % tiles_i;
      const int lane = int(group % kWarp);
      for_lane_weights(tile_o, tile_i, lane, p.O, p.I, body);
      return weight_index(tile_o, tile_i, lane);
    }
#pragma unroll
    for (int slot = 0; slot < 8; ++slot)
      if (group * 8 + slot < p.I) body(slot, group * 8 + slot);
    return uint64_t(group);
  }

  // body(slot, term) for all eight in replica t.
  template <typename Body>
  BNUQ_DEVICE void for_terms(
      const MixtureArgs<acc_t>& p, Key sub, uint64_t replica, const Body& body) const {
    float z[8];
    normals8(philox_at(sub, place, replica), z);
#pragma unroll
    for (int slot = 0; slot < 8; ++slot)
      body(slot, mixture_kl_term(mu[slot], q[slot], acc_t(z[slot]), p.prior));
  }
};

template <typename acc_t>
BNUQ_HD int64_t mixture_groups(const MixtureArgs<acc_t>& p) {
  if (!p.matrix) return ceil_div<int64_t>(p.I, 8);
  return ceil_div<int64_t>(p.O, kEdge) * ceil_div<int64_t>(p.I, kEdge) * kWarp;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads)
    mixture_kl_kernel(double* __restrict__ partial, MixtureArgs<acc_t> p) {
  const Key sub = subkey(p.seed[0], p.stream, p.matrix ? kTagWeight : kTagBias);
  const uint64_t first = uint64_t(p.seed[1]);
  const int64_t stride = int64_t(gridDim.x) * kKlThreads, groups = mixture_groups(p);
  double sum = 0;
  for (int64_t g = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; g < groups; g += stride) {
    const MixtureGroup<acc_t> group(p, g);
    for (int64_t t = 0; t < p.T; ++t)
      group.for_terms(
          p, sub, first + t, [&](int, const KlTerm<acc_t>& term) { sum += double(term.value); });
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename acc_t>
__global__ void __launch_bounds__(kKlThreads) mixture_kl_backward_kernel(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_rho, const acc_t* __restrict__ grad,
    MixtureArgs<acc_t> p) {
  const Key sub = subkey(p.seed[0], p.stream, p.matrix ? kTagWeight : kTagBias);
  const uint64_t first = uint64_t(p.seed[1]);
  const int64_t stride = int64_t(gridDim.x) * kKlThreads, groups = mixture_groups(p);
  const acc_t scale = *grad / acc_t(p.T);
  for (int64_t g = int64_t(blockIdx.x) * kKlThreads + threadIdx.x; g < groups; g += stride) {
    const MixtureGroup<acc_t> group(p, g);
    acc_t by_mu[8] = {}, by_rho[8] = {};
    for (int64_t t = 0; t < p.T; ++t)
      group.for_terms(p, sub, first + t, [&](int slot, const KlTerm<acc_t>& term) {
        by_mu[slot] += term.by_mu;
        by_rho[slot] += term.by_rho;
      });
    MixtureGroup<acc_t>::for_group(p, g, [&](int slot, int64_t k) {
      const acc_t by_terms = unless_pruned(group.q[slot].log_sigma, scale);
      grad_mu[k] = by_terms * by_mu[slot];
      grad_rho[k] = by_terms * by_rho[slot];
    });
  }
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
dim3 gaussian_grid(const Gaussians<acc_t>& p) {
  return dim3(unsigned(kl_blocks(p.largest)), unsigned(p.count));
}

// Returns how many partials there are, at most kKlBlocks of each.
template <typename acc_t>
int run_gaussian_kl(double* partial, const Gaussians<acc_t>& p, cudaStream_t stream) {
  const auto kernel = gaussian_kl_kernel<acc_t>;
  const dim3 grid = gaussian_grid(p);
  BNUQ_LAUNCH(kernel, grid, dim3(kKlThreads), 0, stream, partial, p);
  return int(grid.x * grid.y);
}

template <typename acc_t>
void run_gaussian_kl_backward(const acc_t* grad, const Gaussians<acc_t>& p, cudaStream_t stream) {
  const auto kernel = gaussian_kl_backward_kernel<acc_t>;
  BNUQ_LAUNCH(kernel, gaussian_grid(p), dim3(kKlThreads), 0, stream, grad, p);
}

template <typename acc_t>
void run_mixture_kl(acc_t* out, double* partial, const MixtureArgs<acc_t>& p, cudaStream_t stream) {
  const auto kernel = mixture_kl_kernel<acc_t>;
  const int blocks = kl_blocks(mixture_groups(p));
  BNUQ_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(kKlThreads), 0, stream, partial, p);
  run_add_partials(out, partial, blocks, 1.0 / double(p.T), stream);
}

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
