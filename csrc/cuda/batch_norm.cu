#include "launch.h"

#include "../statistics.h"
#include "batch_norm_kernels.cuh"
#include "philox_kernels.cuh"

namespace bnuq {
namespace {

template <typename Statistics>
void forward_into(
    const Tensor& y, const Tensor& given_x, const std::optional<Tensor>& given_residual,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps, double slope, bool shared) {
  check_on_device_of(given_x, {y, given_residual, weight, bias});
  const DeviceGuard guard(given_x.get_device_index());
  const ForwardInputs in =
      forward_inputs(y, given_x, given_residual, statistics, T, weight, bias, shared);
  const Extent e = in.extent;
  if (e.numel() == 0) return;
  dispatch<__half, __nv_bfloat16>(in.x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const ForwardArgs<scalar_t> args = {
        pointer<scalar_t>(in.x),
        pointer<scalar_t>(in.residual),
        static_cast<scalar_t*>(y.mutable_data_ptr()),
        {pointer<acc_t>(weight), pointer<acc_t>(bias), acc_t(eps), acc_t(slope)},
        {T, e.N, e.C, e.S}};
    run_batch_norm(args, statistics.template source<acc_t>(e.C), shared, current_stream(in.x));
  });
}

// With the replicas' rows drawn, which a block of the kernels would take longer for than the rest of it.
Bank make_bank(
    const Tensor& x, const Tensor& mean, const Tensor& var, const std::optional<Tensor>& seed,
    const std::optional<Tensor>& snapshot, int64_t T) {
  check_on_device_of(x, {mean, var, seed, snapshot});
  if (!seed || snapshot) return {mean, var, seed, snapshot};
  STD_TORCH_CHECK(mean.size(0) >= 1 && T >= 1, "batch_norm_bank: the bank must not be empty");
  const DeviceGuard guard(x.get_device_index());
  const Tensor drawn = empty(*seed, {T});
  run_snapshot_indices(output<int64_t>(drawn), seed_of(*seed), mean.size(0), T, current_stream(x));
  return {mean, var, std::nullopt, drawn};
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
  const Bank bank = make_bank(x, mean, var, seed, snapshot, num_samples);
  forward_into(out, x, residual, bank, num_samples, weight, bias, eps, slope, shared);
}

Tensor batch_norm_bank_cuda(
    Tensor x, Tensor mean, Tensor var, std::optional<Tensor> seed, std::optional<Tensor> snapshot,
    int64_t num_samples, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> residual, double eps, double slope, bool shared) {
  const Bank bank = make_bank(x, mean, var, seed, snapshot, num_samples);
  const Tensor y = empty_rows(x, result_rows(x, num_samples, shared), format_of(x));
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
  const Tensor y = empty_rows(x, result_rows(x, num_samples, shared), format_of(x));
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
