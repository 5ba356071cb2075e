// Every kernel of the package, without torch: what test_cuda_build.py compiles and disassembles.
#include "batch_norm_backward_kernels.cuh"
#include "batch_norm_kernels.cuh"
#include "philox_kernels.cuh"
#include "predictive_backward_kernels.cuh"
#include "predictive_kernels.cuh"

namespace bnuq {

template <typename scalar_t>
void use_all() {
  using acc_t = acc_type<scalar_t>;
  const ForwardArgs<scalar_t> forward = {};
  const BackwardArgs<scalar_t> backward = {};
  const cudaStream_t stream = nullptr;
  run_batch_norm(forward, BankSource<acc_t>(), false, stream);
  run_batch_norm(forward, FittedSource<acc_t>(), false, stream);
  run_gradients(backward, BankSource<acc_t>(), false, stream);
  run_sums(backward, BankSource<acc_t>(), false, nullptr, nullptr, plan_sums(backward), stream);
  run_statistics(StatisticsArgs<scalar_t>(), stream);
  run_statistics_grad(StatisticsGradArgs<scalar_t>(), stream);
}

template void use_all<float>();
template void use_all<double>();
template void use_all<__half>();
template void use_all<__nv_bfloat16>();
template void run_fitted_moments<float>(
    const FittedSource<float>&, float*, float*, int64_t*, int64_t, cudaStream_t);
template void run_fitted_moments<double>(
    const FittedSource<double>&, double*, double*, int64_t*, int64_t, cudaStream_t);

}  // namespace bnuq
