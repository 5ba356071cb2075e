// A linear layer with an independent Gaussian over every weight: the formula of one weight.
// No torch and no CUDA toolkit here.
//
//   weight[t] = mu + sigma * eps[t],   sigma = softplus(rho),   y[t] = x[t] @ weight[t]^T + bias[t]
//   d sigma / d rho = sigmoid(rho)
#pragma once
#include "real.h"

namespace bnuq {

// log(1 + exp(v)), safe for every v: a large v does not overflow, a very negative one gives exp(v).
template <typename acc_t>
BNUQ_HD acc_t softplus(acc_t v) {
  return (v > acc_t(0) ? v : acc_t(0)) + log1p_unit(exp_nonpositive(-std::fabs(v)));
}

template <typename acc_t>
BNUQ_HD acc_t sigmoid(acc_t v) {
  const acc_t e = exp_nonpositive(-std::fabs(v));
  return (v >= acc_t(0) ? acc_t(1) : e) / (acc_t(1) + e);
}

}  // namespace bnuq
