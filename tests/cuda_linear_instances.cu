// The kernels of the Bayesian ops, without torch: what test_cuda_linear.py compiles and
// disassembles.
#include "kl_kernels.cuh"
#include "linear_backward_kernels.cuh"
#include "linear_direct_kernels.cuh"
#include "operand_kernels.cuh"

namespace bnuq {

template <typename half_t>
void use_fused() {
  run_operands<half_t>({}, nullptr, nullptr);
  run_sample_noise<half_t>(nullptr, nullptr, nullptr, 0, 0, 1, 1, 1, nullptr);
  run_bayes_forward<half_t>({}, nullptr);
  run_bayes_grad_x<half_t>({}, nullptr);
  run_bayes_grad_rho<half_t>({}, nullptr);
}

template <typename acc_t>
void use_in_memory() {
  acc_t* p = nullptr;
  const cudaStream_t stream = nullptr;
  run_direct_forward<acc_t>({}, stream);
  run_direct_grad_weight<acc_t>({}, stream);
  run_direct_grad_x<acc_t>({}, stream);
  run_gaussian_kl<acc_t>(nullptr, {}, stream);
  run_gaussian_kl_backward<acc_t>(p, {}, stream);
  run_mixture_kl<acc_t>(p, nullptr, {}, stream);
  run_mixture_kl_backward<acc_t>(p, p, p, {}, stream);
}

template void use_fused<__half>();
template void use_fused<__nv_bfloat16>();
template void use_in_memory<float>();
template void use_in_memory<double>();

}  // namespace bnuq
