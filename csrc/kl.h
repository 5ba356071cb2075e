// Divergences of a Gaussian posterior N(mu, sigma^2), sigma = softplus(rho), from a prior over one
// weight, in nats, and their gradients by mu and rho. No torch and no CUDA toolkit here.
//
// For the prior N(0, s^2):
//   KL = log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2
// For the mixture p = pi N(0, s1^2) + (1 - pi) N(0, s2^2), at w = mu + sigma * eps:
//   log q(w) - log p(w)
//
// Below kTinyRho softplus(rho) is exp(rho) to the last bit, and log sigma is rho itself: sigma may
// underflow, its logarithm and the ratio sigmoid / softplus may not.
#pragma once
#include "linear.h"

namespace bnuq {

constexpr float kTinyRho = -40.0f;

// Of a rho of -inf, which stands for a pruned weight: its term is 0, and what its gradients are
// multiplied by.
template <typename acc_t>
BNUQ_HD acc_t unless_pruned(acc_t rho, acc_t value) {
  return rho == -acc_t(INFINITY) ? acc_t(0) : value;
}

template <typename acc_t>
struct Posterior {
  acc_t sigma, log_sigma;
  acc_t slope;      // d sigma / d rho
  acc_t log_slope;  // d log sigma / d rho
};

template <typename acc_t>
BNUQ_HD Posterior<acc_t> posterior(acc_t rho) {
  const acc_t sigma = softplus(rho), slope = sigmoid(rho);
  const bool tiny = rho < acc_t(kTinyRho);
  const acc_t safe = tiny ? acc_t(1) : sigma;
  return {sigma, tiny ? rho : log_positive(safe), slope, tiny ? acc_t(1) : slope / safe};
}

// Of the prior N(0, s^2): log s and 1 / s^2.
template <typename acc_t>
struct GaussianScale {
  acc_t log_std, precision;
};

template <typename acc_t>
GaussianScale<acc_t> gaussian_scale(double prior_std) {
  return {acc_t(std::log(prior_std)), acc_t(1 / (prior_std * prior_std))};
}

template <typename acc_t>
struct KlTerm {  // its gradients as if not pruned
  acc_t value, by_mu, by_rho;
};

template <typename acc_t>
BNUQ_HD KlTerm<acc_t> gaussian_kl_term(acc_t mu, acc_t rho, acc_t log_std, acc_t precision) {
  const Posterior<acc_t> q = posterior(rho);
  const acc_t value =
      log_std - q.log_sigma - acc_t(0.5) + acc_t(0.5) * precision * (q.sigma * q.sigma + mu * mu);
  return {unless_pruned(rho, value), mu * precision, q.sigma * q.slope * precision - q.log_slope};
}

// log(log(1 + x) / x) for 0 <= x <= 1, absolute error below 1e-7.
inline float log_log1p_ratio(float x) {
  return x *
         (-0.499998897f +
          x * (0.2082946f +
               x * (-0.124529198f +
                    x * (0.0843195245f +
                         x * (-0.0561299101f +
                              x * (0.0310471803f + x * (-0.0115643563f + x * 0.00204814901f)))))));
}

// log pi - log s1, log(1 - pi) - log s2 and the precisions: what the mixture needs of its
// arguments. The 1/2 log(2 pi) of q and p cancel.
template <typename acc_t>
struct Mixture {
  acc_t log_scale1, log_scale2;
  acc_t precision1, precision2;
};

template <typename acc_t>
Mixture<acc_t> mixture_of(double pi, double std1, double std2) {
  return {
      acc_t(std::log(pi / std1)), acc_t(std::log((1 - pi) / std2)), acc_t(1 / (std1 * std1)),
      acc_t(1 / (std2 * std2))};
}

// q by value: behind a reference, the loops around it do not vectorise.
template <typename acc_t>
BNUQ_HD KlTerm<acc_t> mixture_kl_term(
    acc_t mu, Posterior<acc_t> q, acc_t eps, const Mixture<acc_t>& p) {
  const acc_t w = mu + q.sigma * eps, square = w * w;
  const acc_t a = p.log_scale1 - acc_t(0.5) * square * p.precision1;
  const acc_t b = p.log_scale2 - acc_t(0.5) * square * p.precision2;
  // log of the first density over the second; a - b would be NaN where w * w overflows.
  const acc_t ratio =
      p.log_scale1 - p.log_scale2 + acc_t(0.5) * square * (p.precision2 - p.precision1);
  const bool first = ratio > acc_t(0);
  const acc_t e = exp_nonpositive(-std::fabs(ratio));  // the smaller density over the larger
  const acc_t log_p = (first ? a : b) + log1p_unit(e);
  const acc_t larger = acc_t(1) / (acc_t(1) + e);
  // Both shares as products: 1 minus the other one loses the small share of a narrow component.
  const acc_t share1 = first ? larger : e * larger, share2 = first ? e * larger : larger;
  const acc_t by_w = w * (share1 * p.precision1 + share2 * p.precision2);
  const acc_t value = -acc_t(0.5) * eps * eps - q.log_sigma - log_p;
  return {unless_pruned(q.log_sigma, value), by_w, by_w * eps * q.slope - q.log_slope};
}

}  // namespace bnuq
