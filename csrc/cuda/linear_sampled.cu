#include "launch.h"

#include "linear_sampled_kernels.cuh"

namespace bnuq {
namespace {

// A float32 tensor of that many numbers, or null for none.
const float* floats(const std::optional<Tensor>& t, int64_t numel) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(
      t->is_contiguous() && t->scalar_type() == ScalarType::Float && t->numel() == numel,
      "bayes_linear: tensors must be float32, contiguous and match in size");
  return pointer<float>(*t);
}

float* floats_to_write(const std::optional<Tensor>& t, int64_t numel) {
  return const_cast<float*>(floats(t, numel));
}

void check_replicas_of_weights(const Tensor& t) {
  STD_TORCH_CHECK(t.dim() == 3, "bayes_linear: weights must have shape (R, O, I)");
}

// weight (R, O, I) of replicas first .. first + R - 1, and the biases in every row of y (R, N, O).
void sample_weights_cuda(
    Tensor weight, std::optional<Tensor> y, Tensor mu, Tensor rho, std::optional<Tensor> bias_mu,
    std::optional<Tensor> bias_rho, Tensor seed, int64_t stream, int64_t first) {
  check_on_device_of(weight, {y, mu, rho, bias_mu, bias_rho, seed});
  check_replicas_of_weights(weight);
  STD_TORCH_CHECK(!y || (bias_mu && bias_rho), "bayes_linear: a bias must have both halves");
  const int64_t R = weight.size(0), O = weight.size(1), I = weight.size(2);
  const int64_t N = y ? y->size(1) : 0;
  const SampleArgs args = {
      floats(mu, O * I),
      floats(rho, O * I),
      floats(bias_mu, O),
      floats(bias_rho, O),
      seed_of(seed),
      floats_to_write(weight, R * O * I),
      floats_to_write(y, R * N * O),
      first,
      R,
      N,
      O,
      I,
      uint32_t(stream),
      false};
  const DeviceGuard guard(weight.get_device_index());
  if (R * O > 0) run_sample_weights(args, current_stream(weight));
}

// The gradients by mu and rho, and by those of the bias where these are given, of replicas
// first .. first + R - 1 of grad_y (R, N, O): written for first = 0, else added to what is there.
void reduce_grads_cuda(
    Tensor grad_mu, Tensor grad_rho, std::optional<Tensor> grad_bias_mu,
    std::optional<Tensor> grad_bias_rho, Tensor grad_weight, Tensor grad_y, Tensor rho,
    std::optional<Tensor> bias_rho, Tensor seed, int64_t stream, int64_t first) {
  check_on_device_of(
      grad_weight, {grad_mu, grad_rho, grad_bias_mu, grad_bias_rho, grad_y, rho, bias_rho, seed});
  check_replicas_of_weights(grad_weight);
  STD_TORCH_CHECK(
      grad_bias_mu.has_value() == grad_bias_rho.has_value() && (!grad_bias_mu || bias_rho),
      "bayes_linear: bias_rho is needed for its gradient");
  const int64_t R = grad_weight.size(0), O = grad_weight.size(1), I = grad_weight.size(2);
  const int64_t N = grad_y.size(1);
  const ReduceArgs args = {
      floats(grad_weight, R * O * I),
      floats(grad_y, R * N * O),
      floats(rho, O * I),
      floats(bias_rho, O),
      seed_of(seed),
      floats_to_write(grad_mu, O * I),
      floats_to_write(grad_rho, O * I),
      floats_to_write(grad_bias_mu, O),
      floats_to_write(grad_bias_rho, O),
      first,
      R,
      N,
      O,
      I,
      uint32_t(stream)};
  const DeviceGuard guard(grad_weight.get_device_index());
  if (O > 0) run_reduce_grads(args, current_stream(grad_weight));
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("sample_weights_", TORCH_BOX(&sample_weights_cuda));
  m.impl("reduce_grads_", TORCH_BOX(&reduce_grads_cuda));
}

}  // namespace
}  // namespace bnuq
