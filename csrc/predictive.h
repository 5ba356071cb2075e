// Predictive statistics over replicas: the formulas of one element. No torch and no CUDA toolkit.
//
//   p_t = softmax(logits_t),  mean = sum_t p_t / T,  variance = sum_t (p_t - mean)^2 / T,
//   entropy = H[mean],  expected_entropy = sum_t H[p_t] / T,  H[p] = -sum_k p_k log p_k in nats
//
// Welford's recursion takes the replicas one after another, so a result has the same bits under any
// chunking of T. The expected entropy is a running mean too, not a sum: replicas that agree add
// exactly nothing, however many.
#pragma once
#include "philox.h"

namespace bnuq {

// N rows, K classes, S positions; one (n, s) at a time.
struct Classes {
  int64_t T, N, K, S;
};

// -p log p; a probability of zero adds nothing, NaN stays NaN.
template <typename acc_t>
BNUQ_HD acc_t entropy_term(acc_t p, acc_t log_p) {
  return p == acc_t(0) ? acc_t(0) : -p * log_p;
}

// a * b as a rounded number, which nvcc does not fuse into a sum. (g++ may: a product on the CPU
// goes through memory.)
BNUQ_HD float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

BNUQ_HD double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Takes in one replica more; `weight` is 1 / (replicas so far, this one included). The sum of
// squares grows by a square, so it is never negative; for it to stay 0 while all replicas agree, p
// must be a rounded number (see above).
template <typename acc_t>
BNUQ_HD void welford(acc_t p, acc_t weight, acc_t& mean, acc_t& m2) {
  const acc_t delta = p - mean;
  mean += delta * weight;
  m2 += delta * delta * (acc_t(1) - weight);
}

// d loss / d p_tk, up to a constant over k that the softmax's gradient removes. log_p and log_mean
// are 0 where their probability is.
template <typename acc_t>
BNUQ_HD acc_t probability_grad(
    acc_t p, acc_t log_p, acc_t mean, acc_t log_mean, acc_t grad_mean, acc_t grad_variance,
    acc_t grad_entropy, acc_t grad_expected_entropy, acc_t T) {
  const acc_t entropies = grad_entropy * log_mean + grad_expected_entropy * log_p;
  return (grad_mean + acc_t(2) * grad_variance * (p - mean) - entropies) / T;
}

// d loss / d logit_tk = p_tk (a_tk - sum_j p_tj a_tj).
template <typename acc_t>
BNUQ_HD acc_t logit_grad(acc_t p, acc_t probability_grad, acc_t expected_grad) {
  return p == acc_t(0) ? acc_t(0) : p * (probability_grad - expected_grad);
}

}  // namespace bnuq
