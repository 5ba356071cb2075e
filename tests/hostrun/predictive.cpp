#include "../../csrc/cuda/predictive_backward_kernels.cuh"
#include "../../csrc/cuda/predictive_kernels.cuh"

#include "bindings.h"

void predictive(const Predictive& call) {
  by_dtype(call.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = bnuq::acc_type<scalar_t>;
    bnuq::run_statistics<scalar_t>(
        {static_cast<const scalar_t*>(call.logits),
         static_cast<acc_t*>(call.mean),
         static_cast<acc_t*>(call.m2),
         static_cast<acc_t*>(call.expected_entropy),
         static_cast<acc_t*>(call.entropy),
         call.count,
         {call.T, call.N, call.K, call.S}},
        nullptr);
  });
}

void predictive_backward(const Predictive& call) {
  by_dtype(call.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = bnuq::acc_type<scalar_t>;
    bnuq::run_statistics_grad<scalar_t>(
        {static_cast<const scalar_t*>(call.logits),
         static_cast<const acc_t*>(call.mean),
         static_cast<const acc_t*>(call.grad_mean),
         static_cast<const acc_t*>(call.grad_variance),
         static_cast<const acc_t*>(call.grad_entropy),
         static_cast<const acc_t*>(call.grad_expected_entropy),
         static_cast<scalar_t*>(call.grad_logits),
         {call.T, call.N, call.K, call.S}},
        nullptr);
  });
}
