#include "launch.h"

#include <tuple>

#include "linear_direct_kernels.cuh"

namespace bnuq {
namespace {

// Sizes, and memory that the kernels may read: x (T or 1, N, I), mu and rho (O, I), biases (O,).
template <typename acc_t>
DirectArgs<acc_t> arguments_of(
    const Tensor& x, const Tensor& mu, const Tensor& rho, const std::optional<Tensor>& bias_mu,
    const std::optional<Tensor>& bias_rho, const Tensor& seed, int64_t stream, int64_t T) {
  const int64_t O = mu.size(0), I = mu.size(1);
  const auto check = [&](const Tensor& t, int64_t numel) {
    STD_TORCH_CHECK(
        t.is_contiguous() && t.scalar_type() == mu.scalar_type() && t.numel() == numel,
        "bayes_linear: tensors must be contiguous and match in dtype and size");
  };
  STD_TORCH_CHECK(
      x.dim() == 3 && (x.size(0) == 1 || x.size(0) == T),
      "bayes_linear: x must have one replica or all");
  check(x, x.size(0) * x.size(1) * I);
  check(mu, O * I);
  check(rho, O * I);
  if (bias_mu) check(*bias_mu, O);
  if (bias_rho) check(*bias_rho, O);
  DirectArgs<acc_t> args = {};
  args.mu = mu.const_data_ptr<acc_t>(), args.rho = rho.const_data_ptr<acc_t>();
  if (bias_mu) args.bias_mu = bias_mu->const_data_ptr<acc_t>();
  if (bias_rho) args.bias_rho = bias_rho->const_data_ptr<acc_t>();
  args.x = x.const_data_ptr<acc_t>(), args.seed = seed_of(seed), args.stream = uint32_t(stream);
  args.T = T, args.N = x.size(1), args.O = O, args.I = I, args.shared = x.size(0) == 1;
  return args;
}

Tensor bayes_direct_cuda(
    Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_mu, std::optional<Tensor> bias_rho,
    Tensor seed, int64_t stream, int64_t num_samples) {
  STD_TORCH_CHECK(
      bias_mu.has_value() == bias_rho.has_value(), "bayes_linear: a bias must have both halves");
  check_on_device_of(x, {mu, rho, bias_mu, bias_rho, seed});
  const DeviceGuard guard(x.get_device_index());
  const Tensor y = torch::stable::new_empty(x, {num_samples, x.size(1), mu.size(0)});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    auto args = arguments_of<acc_t>(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples);
    args.y = output<acc_t>(y);
    if (y.numel() > 0) run_direct_forward(args, current_stream(x));
  });
  return y;
}

// Gradients by x, (direct_sums, N, I) to be summed where x is shared, by mu, rho, bias_mu and
// bias_rho; what is not needed stays empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bayes_direct_backward_cuda(
    Tensor grad_y, Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_rho, Tensor seed,
    int64_t stream, bool need_x, bool need_weight, bool need_bias) {
  check_on_device_of(x, {grad_y, mu, rho, bias_rho, seed});
  STD_TORCH_CHECK(!need_bias || bias_rho, "bayes_linear: bias_rho is needed for its gradient");
  const DeviceGuard guard(x.get_device_index());
  const int64_t T = grad_y.size(0), O = mu.size(0), I = mu.size(1), N = x.size(1);
  const auto made = [&](bool needed, std::vector<int64_t> shape) {
    return torch::stable::new_empty(mu, needed ? shape : std::vector<int64_t>{0});
  };
  const Tensor grad_x = made(need_x, {direct_sums(T, x.size(0) == 1), N, I});
  const Tensor grad_mu = made(need_weight, {O, I}), grad_rho = made(need_weight, {O, I});
  const Tensor grad_bias_mu = made(need_bias, {O}), grad_bias_rho = made(need_bias, {O});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    auto args = arguments_of<acc_t>(x, mu, rho, std::nullopt, bias_rho, seed, stream, T);
    STD_TORCH_CHECK(
        grad_y.is_contiguous() && grad_y.scalar_type() == mu.scalar_type() &&
            grad_y.numel() == T * N * O,
        "bayes_linear: grad_y must be contiguous, in mu's dtype, of shape (T, N, O)");
    args.grad_y = grad_y.const_data_ptr<acc_t>();
    args.grad_x = output<acc_t>(grad_x);
    args.grad_mu = output<acc_t>(grad_mu), args.grad_rho = output<acc_t>(grad_rho);
    args.grad_bias_mu = output<acc_t>(grad_bias_mu);
    args.grad_bias_rho = output<acc_t>(grad_bias_rho);
    if (O > 0 && (need_weight || need_bias)) run_direct_grad_weight(args, current_stream(x));
    if (grad_x.numel() > 0) run_direct_grad_x(args, current_stream(x));
  });
  return {grad_x, grad_mu, grad_rho, grad_bias_mu, grad_bias_rho};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("bayes_direct", TORCH_BOX(&bayes_direct_cuda));
  m.impl("bayes_direct_backward", TORCH_BOX(&bayes_direct_backward_cuda));
}

}  // namespace
}  // namespace bnuq
