#include "launch.h"

#include <tuple>

#include "../statistics.h"
#include "batch_norm_backward_kernels.cuh"

namespace bnuq {
namespace {

namespace st = torch::stable;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

struct Needs {
  bool x, residual, sums;
};

template <typename scalar_t>
void run_backward(
    const BackwardArgs<scalar_t>& args, const Bank& bank, bool shared, const Tensor& grad_y,
    const Tensor& sums) {
  using acc_t = acc_type<scalar_t>;
  const cudaStream_t stream = current_stream(grad_y);
  const BankSource<acc_t> source = bank.source<acc_t>(args.d.C);
  if (args.grad_x || args.grad_residual) run_gradients(args, source, shared, stream);
  if (!args.x) return;
  const SumsPlan plan = plan_sums(args);
  const Tensor partial = empty(grad_y, {plan.partials}, acc_of(grad_y.scalar_type()));
  run_sums(args, source, shared, output<acc_t>(partial), output<acc_t>(sums), plan, stream);
}

Gradients backward(
    const Tensor& given_grad_y, const std::optional<Tensor>& given_x,
    const std::optional<Tensor>& given_y, const Bank& bank, int64_t T,
    const std::optional<Tensor>& weight, double eps, double slope, bool shared, Needs needs) {
  check_on_device_of(given_grad_y, {given_x, given_y, weight});
  const DeviceGuard guard(given_grad_y.get_device_index());
  const BackwardInputs in =
      backward_inputs(given_grad_y, given_x, given_y, bank, T, weight, slope, shared, needs.sums);
  const Extent e = in.extent;
  const Tensor& grad_y = in.grad_y;
  const ScalarType acc = acc_of(grad_y.scalar_type());
  const auto none = [&] { return empty(grad_y, {0}); };  // results must not alias
  const Tensor grad_x = needs.x ? empty_rows(grad_y, in.rows, in.format) : none();
  const Tensor grad_residual = needs.residual ? empty_rows(grad_y, in.rows, in.format) : none();
  if (e.numel() == 0)
    return {
        grad_x, grad_residual,
        needs.sums ? st::new_zeros(grad_y, {2, T, e.C}, acc) : empty(grad_y, {0}, acc)};
  const Tensor sums = needs.sums ? empty(grad_y, {2, T, e.C}, acc) : empty(grad_y, {0}, acc);
  dispatch<__half, __nv_bfloat16>(grad_y.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const BackwardArgs<scalar_t> args = {
        pointer<scalar_t>(grad_y),
        pointer<scalar_t>(in.y),
        pointer<scalar_t>(in.x),
        output<scalar_t>(grad_x),
        output<scalar_t>(grad_residual),
        {pointer<acc_t>(weight), nullptr, acc_t(eps), acc_t(slope)},
        {T, e.N, e.C, e.S}};
    run_backward(args, bank, shared, grad_y, sums);
  });
  return {grad_x, grad_residual, sums};
}

// The statistics of every replica as a bank of T rows.
Bank drawn(const Fitted& fitted, const Tensor& grad_y, int64_t T) {
  const ScalarType acc = acc_of(grad_y.scalar_type());
  const int64_t C = grad_y.size(1);
  const DeviceGuard guard(grad_y.get_device_index());
  const Tensor mean = empty(grad_y, {T, C}, acc), var = empty(grad_y, {T, C}, acc);
  const Tensor snapshot = empty(grad_y, {T}, ScalarType::Long);
  if (mean.numel() > 0)
    dispatch<__half, __nv_bfloat16>(acc, [&](auto zero) {
      using acc_t = acc_type<decltype(zero)>;
      run_fitted_moments(
          fitted.source<acc_t>(C), output<acc_t>(mean), output<acc_t>(var),
          output<int64_t>(snapshot), T, current_stream(grad_y));
    });
  return {mean, var, std::nullopt, snapshot};
}

Gradients batch_norm_bank_backward_cuda(
    Tensor grad_y, std::optional<Tensor> x, std::optional<Tensor> y, Tensor mean, Tensor var,
    std::optional<Tensor> seed, std::optional<Tensor> snapshot, int64_t num_samples,
    std::optional<Tensor> weight, double eps, double slope, bool shared, bool need_x,
    bool need_residual, bool need_sums) {
  check_on_device_of(grad_y, {mean, var, seed, snapshot});
  return backward(
      grad_y, x, y, {mean, var, seed, snapshot}, num_samples, weight, eps, slope, shared,
      {need_x, need_residual, need_sums});
}

Gradients batch_norm_fitted_backward_cuda(
    Tensor grad_y, std::optional<Tensor> x, std::optional<Tensor> y, Tensor params, Tensor seed,
    int64_t stream, int64_t family, int64_t num_samples, std::optional<Tensor> weight, double eps,
    double slope, bool shared, bool need_x, bool need_residual, bool need_sums) {
  check_on_device_of(grad_y, {params, seed});
  const Fitted fitted = {params, seed, stream, family};
  fitted.check(num_samples, grad_y.size(1), acc_of(grad_y.scalar_type()));
  return backward(
      grad_y, x, y, drawn(fitted, grad_y, num_samples), num_samples, weight, eps, slope, shared,
      {need_x, need_residual, need_sums});
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("batch_norm_bank_backward", TORCH_BOX(&batch_norm_bank_backward_cuda));
  m.impl("batch_norm_fitted_backward", TORCH_BOX(&batch_norm_fitted_backward_cuda));
}

}  // namespace
}  // namespace bnuq
