// What the CPU's passes of bayes_linear do with one row of n weights, and the walk over the rows.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "../linear.h"
#include "weight_noise.h"

namespace bnuq {

// `noise` is what for_normals takes.
template <typename acc_t, typename Noise>
BNUQ_CLONES static void sample_row(
    acc_t* __restrict__ w, const acc_t* mu, const acc_t* sigma, Noise noise, int64_t n) {
  const auto use = [&](int64_t i, const float* z, int64_t count) BNUQ_INLINE {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) w[i + j] = mu[i + j] + sigma[i + j] * acc_t(z[j]);
  };
  for_normals(noise, n, use);
}

template <typename acc_t>
BNUQ_CLONES static acc_t dot(const acc_t* a, const acc_t* b, int64_t n) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename acc_t>
BNUQ_CLONES static void add_scaled(acc_t* __restrict__ y, acc_t a, const acc_t* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// Adds a replica's gradient by its weights to those by mu and sigma; of the first one, whose
// gradient lies in the place of that by mu, sets that by sigma. If kWeights, writes its weights,
// where the gradient may lie.
template <bool kFirst, bool kWeights, typename acc_t, typename Noise>
BNUQ_CLONES static void add_noisy(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_sigma, const acc_t* grad, Noise noise,
    int64_t n, acc_t* w = nullptr, const acc_t* mu = nullptr, const acc_t* sigma = nullptr) {
  const auto use = [&](int64_t at, const float* z, int64_t count) BNUQ_INLINE {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = at + j;
      const acc_t by_mu = grad[i], by_sigma = by_mu * acc_t(z[j]);
      if (!kFirst) grad_mu[i] += by_mu;
      grad_sigma[i] = kFirst ? by_sigma : grad_sigma[i] + by_sigma;
      if (kWeights) w[i] = mu[i] + sigma[i] * acc_t(z[j]);
    }
  };
  for_normals(noise, n, use);
}

template <typename acc_t>
BNUQ_CLONES static void softplus_row(acc_t* __restrict__ sigma, const acc_t* rho, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sigma[i] = softplus(rho[i]);
}

template <typename acc_t>
BNUQ_CLONES static void posterior_row(
    acc_t* __restrict__ w, const acc_t* mu, const acc_t* rho, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = mu[i] + softplus(rho[i]) * acc_t(z[i]);
}

template <typename acc_t>
BNUQ_CLONES static void posterior_grad_row(
    acc_t* __restrict__ grad_rho, const acc_t* grad, const acc_t* rho, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad_rho[i] = grad[i] * acc_t(z[i]) * sigmoid(rho[i]);
}

template <typename acc_t>
BNUQ_CLONES static void sigmoid_row(acc_t* __restrict__ grad, const acc_t* rho, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad[i] *= sigmoid(rho[i]);
}

// Where the noise of a call comes from.
struct Noise {
  Key sub;
  uint64_t first;  // number of the first replica
};

// row(o, z) for every row o of one replica's weights, in parallel.
template <typename Row>
void for_rows(const Noise& noise, int64_t replica, int64_t O, int64_t I, const Row& row) {
  torch::stable::parallel_for(
      0, 8 * tiles_of(O), 1 + 16384 / (I + 1), [&](int64_t begin, int64_t end) {
        for_row_pairs(noise.sub, noise.first + replica, begin, end, O, 0, tiles_of(I), row);
      });
}

}  // namespace bnuq
