#include "linear_ways.h"

#include "linear_direct_kernels.cuh"

namespace bnuq {
namespace {

template <typename acc_t>
DirectArgs<acc_t> arguments_of(const Tensor& x, const Posterior& q, int64_t T) {
  DirectArgs<acc_t> args = {};
  args.x = x.const_data_ptr<acc_t>();
  args.mu = q.mu.const_data_ptr<acc_t>(), args.rho = q.rho.const_data_ptr<acc_t>();
  args.bias_mu = pointer<acc_t>(q.bias_mu), args.bias_rho = pointer<acc_t>(q.bias_rho);
  args.seed = seed_of(q.seed), args.stream = uint32_t(q.stream);
  args.T = T, args.N = x.size(1), args.O = q.O(), args.I = q.I(), args.shared = x.size(0) == 1;
  return args;
}

}  // namespace

Tensor direct_forward(const Tensor& x, const Posterior& q, int64_t T) {
  const Tensor y = empty(x, {T, x.size(1), q.O()});
  dispatch_acc(q.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    auto args = arguments_of<acc_t>(x, q, T);
    args.y = output<acc_t>(y);
    run_direct_forward(args, current_stream(x));
  });
  return y;
}

Gradients direct_backward(const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs) {
  const int64_t T = grad_y.size(0);
  const Gradients grads = gradients_like(x, direct_sums(T, x.size(0) == 1), q, needs);
  const Tensor& grad_x = std::get<0>(grads);
  dispatch_acc(q.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    auto args = arguments_of<acc_t>(x, q, T);
    args.grad_y = grad_y.const_data_ptr<acc_t>();
    args.grad_x = output<acc_t>(grad_x);
    args.grad_mu = output<acc_t>(std::get<1>(grads));
    args.grad_rho = output<acc_t>(std::get<2>(grads));
    args.grad_bias_mu = output<acc_t>(std::get<3>(grads));
    args.grad_bias_rho = output<acc_t>(std::get<4>(grads));
    if (q.O() > 0 && (needs.weight || needs.bias)) run_direct_grad_weight(args, current_stream(x));
    if (grad_x.numel() > 0) run_direct_grad_x(args, current_stream(x));
  });
  return grads;
}

}  // namespace bnuq
