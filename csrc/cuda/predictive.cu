#include "launch.h"

#include <vector>

#include "../predictive_call.h"
#include "predictive_backward_kernels.cuh"
#include "predictive_kernels.cuh"

namespace bnuq {
namespace {

namespace st = torch::stable;

struct State {
  Tensor mean, m2, expected_entropy;
  std::optional<Tensor> entropy;  // given where the statistics are to be finished
};

void accumulate(const State& state, const Tensor& logits_, int64_t count) {
  const Classes d = classes_of(logits_);
  const DeviceGuard guard(logits_.get_device_index());
  const Tensor logits = st::contiguous(logits_);
  dispatch<__half, __nv_bfloat16>(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const StatisticsArgs<scalar_t> args = {
        pointer<scalar_t>(logits),
        output<acc_t>(state.mean),
        output<acc_t>(state.m2),
        output<acc_t>(state.expected_entropy),
        state.entropy ? output<acc_t>(*state.entropy) : nullptr,
        count,
        d};
    run_statistics(args, current_stream(logits));
  });
}

void predictive_accumulate_cuda(
    Tensor mean, Tensor m2, Tensor expected_entropy, Tensor logits, int64_t count) {
  check_on_device_of(logits, {mean, m2, expected_entropy});
  check_state(mean, m2, expected_entropy, logits);
  if (logits.numel() > 0) accumulate({mean, m2, expected_entropy, std::nullopt}, logits, count);
}

FreshResults predictive_statistics_cuda(Tensor logits) {
  check_on_device_of(logits, {});
  const DeviceGuard guard(logits.get_device_index());
  const FreshResults made = fresh_results(logits);
  const auto& [mean, variance, entropy, expected_entropy] = made;
  if (logits.numel() > 0) accumulate({mean, variance, expected_entropy, entropy}, logits, 0);
  return made;
}

Tensor predictive_statistics_backward_cuda(
    Tensor logits_, Tensor mean_, std::optional<Tensor> grad_mean,
    std::optional<Tensor> grad_variance, std::optional<Tensor> grad_entropy,
    std::optional<Tensor> grad_expected_entropy) {
  check_on_device_of(
      logits_, {mean_, grad_mean, grad_variance, grad_entropy, grad_expected_entropy});
  const DeviceGuard guard(logits_.get_device_index());
  const Classes d = classes_of(logits_);
  const std::optional<Tensor> mean = results_like(logits_, {mean_, {}, {}, {}}).mean;
  const Results grads =
      results_like(logits_, {grad_mean, grad_variance, grad_entropy, grad_expected_entropy});
  const Tensor logits = st::contiguous(logits_);
  const std::vector<int64_t> shape(logits.sizes().begin(), logits.sizes().end());
  const Tensor grad_logits = st::new_empty(logits, shape);
  if (logits.numel() == 0) return grad_logits;
  dispatch<__half, __nv_bfloat16>(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const StatisticsGradArgs<scalar_t> args = {
        pointer<scalar_t>(logits),     pointer<acc_t>(mean),
        pointer<acc_t>(grads.mean),    pointer<acc_t>(grads.variance),
        pointer<acc_t>(grads.entropy), pointer<acc_t>(grads.expected_entropy),
        output<scalar_t>(grad_logits), d};
    run_statistics_grad(args, current_stream(logits));
  });
  return grad_logits;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("predictive_statistics", TORCH_BOX(&predictive_statistics_cuda));
  m.impl("predictive_statistics_backward", TORCH_BOX(&predictive_statistics_backward_cuda));
  m.impl("predictive_accumulate_", TORCH_BOX(&predictive_accumulate_cuda));
}

}  // namespace
}  // namespace bnuq
