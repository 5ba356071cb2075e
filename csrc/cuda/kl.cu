#include "launch.h"

#include <tuple>
#include <vector>

#include "kl_kernels.cuh"

namespace bnuq {
namespace {

using Grads = std::tuple<Tensor, Tensor>;
using Tensors = std::vector<Tensor>;

template <typename F>
void dispatch_kl(const Tensor& mu, const Tensor& rho, const F& body) {
  check_on_device_of(mu, {rho});
  check_alike(mu, rho);
  dispatch_acc(mu, body);
}

Tensor partials(const Tensor& mu, int64_t count = 1) {
  return empty(mu, {count * kKlBlocks}, ScalarType::Double);
}

// ---- the Gaussian prior ------------------------------------------------------------------------

// Of all layers, on one device and of one dtype.
struct GaussianCall {
  const Tensors &mu, &rho;
  const std::vector<double>& prior_std;

  const Tensor& first() const { return mu.at(0); }

  template <typename acc_t>
  Gaussian<acc_t> part(size_t k, const Tensors& grads) const {
    check_on_device_of(first(), {mu[k], rho.at(k)});
    check_alike(mu[k], rho[k]);
    acc_t* grad_mu = grads.empty() ? nullptr : output<acc_t>(grads[2 * k]);
    acc_t* grad_rho = grads.empty() ? nullptr : output<acc_t>(grads[2 * k + 1]);
    return gaussian_of(
        mu[k].const_data_ptr<acc_t>(), rho[k].const_data_ptr<acc_t>(), grad_mu, grad_rho,
        prior_std.at(k), mu[k].numel());
  }

  // body(some) for as many at a time as a launch takes; `grads` are those of mu and rho by turns.
  template <typename acc_t, typename Body>
  void for_parts(const Tensors& grads, const Body& body) const {
    Gaussians<acc_t> some;
    for (size_t k = 0; k < mu.size(); ++k) {
      some.add(part<acc_t>(k, grads));
      if (some.count < kGaussians && k + 1 < mu.size()) continue;
      body(some);
      some = {};
    }
  }
};

Tensor gaussian_kl_sum_cuda(Tensors mu, Tensors rho, std::vector<double> prior_std) {
  const GaussianCall call = {mu, rho, prior_std};
  const DeviceGuard guard(call.first().get_device_index());
  const Tensor out = empty(call.first(), {});
  const Tensor partial = partials(call.first(), int64_t(mu.size()));
  dispatch_acc(call.first(), [&](auto zero) {
    using acc_t = decltype(zero);
    double* sums = partial.mutable_data_ptr<double>();
    int made = 0;
    call.for_parts<acc_t>({}, [&](const Gaussians<acc_t>& some) {
      made += run_gaussian_kl(sums + made, some, current_stream(out));
    });
    run_add_partials(out.mutable_data_ptr<acc_t>(), sums, made, 1.0, current_stream(out));
  });
  return out;
}

Tensors gaussian_kl_sum_backward_cuda(
    Tensor grad, Tensors mu, Tensors rho, std::vector<double> prior_std) {
  const GaussianCall call = {mu, rho, prior_std};
  check_on_device_of(call.first(), {grad});
  check_single(grad);
  const DeviceGuard guard(call.first().get_device_index());
  Tensors grads;
  for (size_t k = 0; k < mu.size(); ++k) {
    grads.push_back(torch::stable::empty_like(mu[k]));
    grads.push_back(torch::stable::empty_like(rho.at(k)));
  }
  dispatch_acc(call.first(), [&](auto zero) {
    using acc_t = decltype(zero);
    call.for_parts<acc_t>(grads, [&](const Gaussians<acc_t>& some) {
      run_gaussian_kl_backward(grad.const_data_ptr<acc_t>(), some, current_stream(grad));
    });
  });
  return grads;
}

Tensor gaussian_kl_cuda(Tensor mu, Tensor rho, double prior_std) {
  return gaussian_kl_sum_cuda({mu}, {rho}, {prior_std});
}

Grads gaussian_kl_backward_cuda(Tensor grad, Tensor mu, Tensor rho, double prior_std) {
  const Tensors grads = gaussian_kl_sum_backward_cuda(grad, {mu}, {rho}, {prior_std});
  return {grads[0], grads[1]};
}

// ---- the scale mixture -------------------------------------------------------------------------

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
  const Tensor out = empty(mu, {}), partial = partials(mu);
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
  check_single(grad);
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
  m.impl("gaussian_kl_sum", TORCH_BOX(&gaussian_kl_sum_cuda));
  m.impl("gaussian_kl_sum_backward", TORCH_BOX(&gaussian_kl_sum_backward_cuda));
  m.impl("mixture_kl", TORCH_BOX(&mixture_kl_cuda));
  m.impl("mixture_kl_backward", TORCH_BOX(&mixture_kl_backward_cuda));
}

}  // namespace
}  // namespace bnuq
