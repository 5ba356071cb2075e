#include "../../csrc/cuda/batch_norm_kernels.cuh"

#include "batch_norm_source.h"

void batch_norm(const BatchNorm& call) {
  by_dtype(call.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = bnuq::acc_type<scalar_t>;
    const bnuq::ForwardArgs<scalar_t> args = {
        static_cast<const scalar_t*>(call.x),
        static_cast<const scalar_t*>(call.residual),
        static_cast<scalar_t*>(call.y),
        parameters<acc_t>(call),
        {call.T, call.N, call.C, call.S}};
    if (call.params)
      bnuq::run_batch_norm(args, fitted_source<acc_t>(call), call.shared, nullptr);
    else
      bnuq::run_batch_norm(args, bank_source<acc_t>(call), call.shared, nullptr);
  });
}
