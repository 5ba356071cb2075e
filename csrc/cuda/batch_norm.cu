#include "launch.h"

#include "../statistics.h"
#include "batch_norm_kernels.cuh"

namespace bnuq {
namespace {

template <typename Statistics>
void forward_into(
    const Tensor& y, const Tensor& x_, const std::optional<Tensor>& residual_,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps, double slope, bool shared) {
  const MemoryFormat format = format_of(x_);
  const Extent e = extent_of(x_, format, T, shared);
  check_arguments(statistics, x_, T, weight, bias);
  check_on_device_of(x_, {y, residual_, weight, bias});
  if (residual_) check_same_sizes(*residual_, x_, "batch_norm: residual must be like x");
  STD_TORCH_CHECK(
      has_format(y, format) && y.numel() == T * e.numel() && y.scalar_type() == x_.scalar_type(),
      "batch_norm: out must have the shape, dtype and memory format of the result");
  if (e.numel() == 0) return;
  const DeviceGuard guard(x_.get_device_index());
  const Tensor x = with_format(x_, format);
  std::optional<Tensor> residual;
  if (residual_) residual = with_format(*residual_, format);
  dispatch_cuda(x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const ForwardArgs<scalar_t> args = {
        pointer<scalar_t>(x),
        pointer<scalar_t>(residual),
        static_cast<scalar_t*>(y.mutable_data_ptr()),
        {pointer<acc_t>(weight), pointer<acc_t>(bias), acc_t(eps), acc_t(slope)},
        {T, e.N, e.C, e.S}};
    run_batch_norm(args, statistics.template source<acc_t>(e.C), shared, current_stream(x));
  });
}

Bank make_bank(
    const Tensor& x, const Tensor& mean, const Tensor& var, const std::optional<Tensor>& seed,
    const std::optional<Tensor>& snapshot) {
  check_on_device_of(x, {mean, var, seed, snapshot});
  return {mean, var, seed, snapshot};
}

Fitted make_fitted(
    const Tensor& x, const Tensor& params, const Tensor& seed, int64_t stream, int64_t family) {
  check_on_device_of(x, {params, seed});
  return {params, seed, stream, family};
}

void batch_norm_bank_out_cuda(
    Tensor out, Tensor x, Tensor mean, Tensor var, std::optional<Tensor> seed,
    std::optional<Tensor> snapshot, int64_t num_samples, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> residual, double eps, double slope,
    bool shared) {
  const Bank bank = make_bank(x, mean, var, seed, snapshot);
  forward_into(out, x, residual, bank, num_samples, weight, bias, eps, slope, shared);
}

Tensor batch_norm_bank_cuda(
    Tensor x, Tensor mean, Tensor var, std::optional<Tensor> seed, std::optional<Tensor> snapshot,
    int64_t num_samples, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> residual, double eps, double slope, bool shared) {
  const Bank bank = make_bank(x, mean, var, seed, snapshot);
  const Tensor y = empty_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
  forward_into(y, x, residual, bank, num_samples, weight, bias, eps, slope, shared);
  return y;
}

void batch_norm_fitted_out_cuda(
    Tensor out, Tensor x, Tensor params, Tensor seed, int64_t stream, int64_t family,
    int64_t num_samples, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> residual, double eps, double slope, bool shared) {
  const Fitted fitted = make_fitted(x, params, seed, stream, family);
  forward_into(out, x, residual, fitted, num_samples, weight, bias, eps, slope, shared);
}

Tensor batch_norm_fitted_cuda(
    Tensor x, Tensor params, Tensor seed, int64_t stream, int64_t family, int64_t num_samples,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, double slope, bool shared) {
  const Fitted fitted = make_fitted(x, params, seed, stream, family);
  const Tensor y = empty_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
  forward_into(y, x, residual, fitted, num_samples, weight, bias, eps, slope, shared);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("batch_norm_bank", TORCH_BOX(&batch_norm_bank_cuda));
  m.impl("batch_norm_bank_out", TORCH_BOX(&batch_norm_bank_out_cuda));
  m.impl("batch_norm_fitted", TORCH_BOX(&batch_norm_fitted_cuda));
  m.impl("batch_norm_fitted_out", TORCH_BOX(&batch_norm_fitted_out_cuda));
}

}  // namespace
}  // namespace bnuq
