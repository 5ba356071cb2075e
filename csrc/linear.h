// A linear layer with an independent Gaussian over every weight: the formula of one weight.
// No torch and no CUDA toolkit here.
//
//   weight[t] = mu + sigma * eps[t],   sigma = softplus(rho),   y[t] = x[t] @ weight[t]^T + bias[t]
//   d sigma / d rho = sigmoid(rho)
#pragma once
#include "philox.h"

namespace bnuq {

// log(1 + exp(v)) without overflow; 0 below -104 in float, v above 17.
template <typename acc_t>
BNUQ_HD acc_t softplus(acc_t v) {
  const acc_t tail = std::log1p(std::exp(-std::fabs(v)));
  return (v > acc_t(0) ? v : acc_t(0)) + tail;
}

template <typename acc_t>
BNUQ_HD acc_t sigmoid(acc_t v) {
  const acc_t e = std::exp(-std::fabs(v));
  return (v >= acc_t(0) ? acc_t(1) : e) / (acc_t(1) + e);
}

}  // namespace bnuq
