#include "launch.h"

#include <tuple>

#include "../dispatch.h"
#include "kl_kernels.cuh"

namespace bnuq {
namespace {

using Grads = std::tuple<Tensor, Tensor>;

template <typename F>
void dispatch_kl(const Tensor& mu, const Tensor& rho, const F& body) {
  check_on_device_of(mu, {rho});
  STD_TORCH_CHECK(
      mu.is_contiguous() && rho.is_contiguous() && mu.numel() == rho.numel() &&
          mu.scalar_type() == rho.scalar_type(),
      "kl: mu and rho must be contiguous and alike");
  dispatch_acc(mu, body);
}

Tensor partials(const Tensor& mu) {
  return torch::stable::new_empty(mu, {kKlBlocks}, ScalarType::Double);
}

Tensor gaussian_kl_cuda(Tensor mu, Tensor rho, double prior_std) {
  const Tensor out = torch::stable::new_empty(mu, {}), partial = partials(mu);
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const DeviceGuard guard(mu.get_device_index());
    run_gaussian_kl<acc_t>(
        out.mutable_data_ptr<acc_t>(), partial.mutable_data_ptr<double>(),
        mu.const_data_ptr<acc_t>(), rho.const_data_ptr<acc_t>(), prior_std, mu.numel(),
        current_stream(mu));
  });
  return out;
}

Grads gaussian_kl_backward_cuda(Tensor grad, Tensor mu, Tensor rho, double prior_std) {
  check_on_device_of(mu, {grad});
  const Tensor grad_mu = torch::stable::empty_like(mu), grad_rho = torch::stable::empty_like(rho);
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const DeviceGuard guard(mu.get_device_index());
    if (mu.numel() == 0) return;
    run_gaussian_kl_backward<acc_t>(
        grad_mu.mutable_data_ptr<acc_t>(), grad_rho.mutable_data_ptr<acc_t>(),
        grad.const_data_ptr<acc_t>(), mu.const_data_ptr<acc_t>(), rho.const_data_ptr<acc_t>(),
        prior_std, mu.numel(), current_stream(mu));
  });
  return {grad_mu, grad_rho};
}

struct MixtureCall {
  Tensor mu, rho, seed;
  int64_t stream, num_samples;
  double pi, std1, std2;

  template <typename acc_t>
  MixtureArgs<acc_t> args() const {
    check_on_device_of(mu, {seed});
    const bool matrix = mu.dim() == 2;
    return {
        mu.const_data_ptr<acc_t>(),
        rho.const_data_ptr<acc_t>(),
        seed_of(seed),
        uint32_t(stream),
        num_samples,
        matrix ? mu.size(0) : 1,
        mu.size(matrix ? 1 : 0),
        matrix,
        mixture_of<acc_t>(pi, std1, std2)};
  }
};

Tensor mixture_kl_cuda(
    Tensor mu, Tensor rho, Tensor seed, int64_t stream, int64_t num_samples, double pi, double std1,
    double std2) {
  const MixtureCall call = {mu, rho, seed, stream, num_samples, pi, std1, std2};
  const Tensor out = torch::stable::new_empty(mu, {}), partial = partials(mu);
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const DeviceGuard guard(mu.get_device_index());
    run_mixture_kl<acc_t>(
        out.mutable_data_ptr<acc_t>(), partial.mutable_data_ptr<double>(), call.args<acc_t>(),
        current_stream(mu));
  });
  return out;
}

Grads mixture_kl_backward_cuda(
    Tensor grad, Tensor mu, Tensor rho, Tensor seed, int64_t stream, int64_t num_samples, double pi,
    double std1, double std2) {
  check_on_device_of(mu, {grad});
  const MixtureCall call = {mu, rho, seed, stream, num_samples, pi, std1, std2};
  const Tensor grad_mu = torch::stable::empty_like(mu), grad_rho = torch::stable::empty_like(rho);
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const DeviceGuard guard(mu.get_device_index());
    if (mu.numel() == 0) return;
    run_mixture_kl_backward<acc_t>(
        grad_mu.mutable_data_ptr<acc_t>(), grad_rho.mutable_data_ptr<acc_t>(),
        grad.const_data_ptr<acc_t>(), call.args<acc_t>(), current_stream(mu));
  });
  return {grad_mu, grad_rho};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("gaussian_kl", TORCH_BOX(&gaussian_kl_cuda));
  m.impl("gaussian_kl_backward", TORCH_BOX(&gaussian_kl_backward_cuda));
  m.impl("mixture_kl", TORCH_BOX(&mixture_kl_cuda));
  m.impl("mixture_kl_backward", TORCH_BOX(&mixture_kl_backward_cuda));
}

}  // namespace
}  // namespace bnuq
