// One replica's row of n weights, in one pass with the divergence from a Gaussian prior.
#pragma once
#include <type_traits>

#include "gaussian_kl.h"
#include "linear_rows.h"

namespace bnuq {

// posterior_row and narrow_slice.
BNUQ_CLONES [[gnu::unused]] static double narrow_posterior_kl(
    float* __restrict__ w, const float* mu, const float* rho, const float* z, float log_std,
    float precision, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float e = exp_nonpositive(rho[i]), sigma = log1p_unit(e);
    sum += narrow_kl_value(mu[i], rho[i], e, sigma, log_std, precision);
    w[i] = mu[i] + sigma * z[i];
  }
  return double(sum);
}

// posterior_grad_row, posterior_row if kWeights, and narrow_grad_slice: with sigma = e r,
//   d rho = (grad z sigma + kl_grad (precision sigma^2 - 1)) / (r (1 + e))
template <bool kWeights>
BNUQ_CLONES static void narrow_posterior_grads(
    float* __restrict__ w, float* __restrict__ grad_mu, float* __restrict__ grad_rho,
    const float* mu, const float* rho, const float* z, float kl_grad, float precision, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float e = exp_nonpositive(rho[i]), ratio = log1p_ratio(e), sigma = e * ratio;
    const float by_term = unless_pruned(rho[i], kl_grad);
    const float by_prior = by_term * (sigma * sigma * precision - 1.0f);
    grad_rho[i] = (grad_mu[i] * z[i] * sigma + by_prior) / (ratio * (1.0f + e));
    grad_mu[i] += by_term * (mu[i] * precision);
    if (kWeights) w[i] = mu[i] + sigma * z[i];
  }
}

// Writes the weights; returns the divergence.
template <typename acc_t>
double posterior_kl_row(
    acc_t* w, const acc_t* mu, const acc_t* rho, const float* z, acc_t log_std, acc_t precision,
    int64_t n) {
  if constexpr (std::is_same_v<acc_t, float>)
    if (none_positive(rho, n)) return narrow_posterior_kl(w, mu, rho, z, log_std, precision, n);
  posterior_row(w, mu, rho, z, n);
  return gaussian_slice(mu, rho, log_std, precision, n);
}

// Writes the gradients by rho, and the weights if kWeights; adds the divergence's gradients to
// those by mu, which are those by the weights.
template <bool kWeights, typename acc_t>
void posterior_grads_row(
    acc_t* w, acc_t* grad_mu, acc_t* grad_rho, const acc_t* mu, const acc_t* rho, const float* z,
    acc_t kl_grad, acc_t precision, int64_t n) {
  if constexpr (std::is_same_v<acc_t, float>)
    if (none_positive(rho, n))
      return narrow_posterior_grads<kWeights>(
          w, grad_mu, grad_rho, mu, rho, z, kl_grad, precision, n);
  if (kWeights) posterior_row(w, mu, rho, z, n);
  posterior_grad_row(grad_rho, grad_mu, rho, z, n);
  gaussian_grad_slice<true>(grad_mu, grad_rho, mu, rho, kl_grad, precision, n);
}

}  // namespace bnuq
