// The divergence of Gaussian weights from a Gaussian prior, and its gradients, for rows of n of
// them.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <type_traits>

#include "../dispatch.h"
#include "../kl.h"
#include "simd.h"

namespace bnuq {

constexpr int64_t kSlice = 8192;  // elements that one partial sum covers, whatever the threads

BNUQ_CLONES [[gnu::unused]] static bool none_positive(const float* v, int64_t n) {
  int32_t found = 0;  // a bool would not vectorise
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < n; ++i) found |= !(v[i] <= 0.0f);
  return !found;
}

template <typename acc_t>
BNUQ_CLONES static double gaussian_slice(
    const acc_t* mu, const acc_t* rho, acc_t log_std, acc_t precision, int64_t n) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += gaussian_kl_term(mu[i], rho[i], log_std, precision).value;
  return double(sum);
}

// Of a rho that is not positive: with e = exp(rho), log sigma = rho + log(log1p(e) / e) needs no
// logarithm of its own, however small sigma is.
inline float narrow_kl_value(
    float mu, float rho, float e, float sigma, float log_std, float precision) {
  const float value =
      log_std - (rho + log_log1p_ratio(e)) - 0.5f + 0.5f * precision * (sigma * sigma + mu * mu);
  return unless_pruned(rho, value);
}

// gaussian_slice where no rho is positive, in two thirds of its time.
BNUQ_CLONES [[gnu::unused]] static double narrow_slice(
    const float* mu, const float* rho, float log_std, float precision, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float e = exp_nonpositive(rho[i]), sigma = log1p_unit(e);
    sum += narrow_kl_value(mu[i], rho[i], e, sigma, log_std, precision);
  }
  return double(sum);
}

template <typename acc_t>
double gaussian_sum(const acc_t* mu, const acc_t* rho, acc_t log_std, acc_t precision, int64_t n) {
  if constexpr (std::is_same_v<acc_t, float>)
    if (none_positive(rho, n)) return narrow_slice(mu, rho, log_std, precision, n);
  return gaussian_slice(mu, rho, log_std, precision, n);
}

// Gradients of `grad` times the divergence: set, or added to what is there.
template <bool kAdd, typename acc_t>
BNUQ_CLONES static void gaussian_grad_slice(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_rho, const acc_t* mu, const acc_t* rho,
    acc_t grad, acc_t precision, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const KlTerm<acc_t> term = gaussian_kl_term(mu[i], rho[i], acc_t(0), precision);
    const acc_t by_term = unless_pruned(rho[i], grad);
    grad_mu[i] = (kAdd ? grad_mu[i] : acc_t(0)) + by_term * term.by_mu;
    grad_rho[i] = (kAdd ? grad_rho[i] : acc_t(0)) + by_term * term.by_rho;
  }
}

// The same where no rho is positive, in half of its time: with e = exp(rho) and sigma = e r, the
// gradient by rho is (precision sigma^2 - 1) / (r (1 + e)), however small sigma is.
template <bool kAdd>
BNUQ_CLONES static void narrow_grad_slice(
    float* __restrict__ grad_mu, float* __restrict__ grad_rho, const float* mu, const float* rho,
    float grad, float precision, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float e = exp_nonpositive(rho[i]), ratio = log1p_ratio(e), sigma = e * ratio;
    const float by_rho = (sigma * sigma * precision - 1.0f) / (ratio * (1.0f + e));
    const float by_term = unless_pruned(rho[i], grad);
    grad_mu[i] = (kAdd ? grad_mu[i] : 0.0f) + by_term * (mu[i] * precision);
    grad_rho[i] = (kAdd ? grad_rho[i] : 0.0f) + by_term * by_rho;
  }
}

template <bool kAdd, typename acc_t>
void gaussian_grads(
    acc_t* grad_mu, acc_t* grad_rho, const acc_t* mu, const acc_t* rho, acc_t grad, acc_t precision,
    int64_t n) {
  if constexpr (std::is_same_v<acc_t, float>)
    if (none_positive(rho, n))
      return narrow_grad_slice<kAdd>(grad_mu, grad_rho, mu, rho, grad, precision, n);
  gaussian_grad_slice<kAdd>(grad_mu, grad_rho, mu, rho, grad, precision, n);
}

// The sum over the weights.
double gaussian_kl_of(const Tensor& mu, const Tensor& rho, double prior_std);

// Adds the gradients of `grad` times that sum.
void add_gaussian_grads(
    const Tensor& grad_mu, const Tensor& grad_rho, double grad, const Tensor& mu, const Tensor& rho,
    double prior_std);

inline Tensor scalar_like(const Tensor& like, double value) {
  const Tensor out = empty(like, {});
  dispatch_acc(
      like, [&](auto zero) { *out.mutable_data_ptr<decltype(zero)>() = decltype(zero)(value); });
  return out;
}

inline double value_of(const Tensor& scalar) {
  check_single(scalar);
  double value = 0;
  dispatch_acc(scalar, [&](auto zero) { value = *scalar.const_data_ptr<decltype(zero)>(); });
  return value;
}

}  // namespace bnuq
