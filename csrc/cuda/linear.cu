#include "launch.h"

#include <tuple>

#include "linear_backward_kernels.cuh"
#include "operand_kernels.cuh"

namespace bnuq {
namespace {

// Rows of a 16-bit matrix, padded to whole tiles: 16-byte accesses need no edge.
void check_padded(const Tensor& t) {
  STD_TORCH_CHECK(
      t.dim() == 3 && t.is_contiguous() && t.size(2) % kEdge == 0,
      "bayes_linear: a 16-bit operand must be contiguous with rows of whole tiles");
}

// One for all replicas, or one for each.
void check_replicas(const Tensor& t, int64_t T) {
  STD_TORCH_CHECK(
      t.size(0) == 1 || t.size(0) == T, "bayes_linear: an operand must have one replica or all");
}

void check_floats(const Tensor& t, int64_t numel) {
  STD_TORCH_CHECK(
      t.is_contiguous() && t.scalar_type() == ScalarType::Float && t.numel() == numel,
      "bayes_linear: a tensor must be float32, contiguous and match in size");
}

template <typename F>
void dispatch_half(ScalarType type, const F& body) {
  if (type == ScalarType::Half) return body(__half());
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "bayes_linear: an operand must have 16 bits");
  body(__nv_bfloat16());
}

template <typename F>
void dispatch_half(const Tensor& t, const F& body) {
  dispatch_half(t.scalar_type(), body);
}

const uint4* fragments_of(const Tensor& sigma, int64_t O, int64_t I) {
  const int64_t tiles = ceil_div<int64_t>(O, kEdge) * ceil_div<int64_t>(I, kEdge);
  STD_TORCH_CHECK(
      sigma.is_contiguous() && sigma.numel() == tiles * kEdge * kEdge,
      "bayes_linear: sigma must be packed by bayes_operands");
  return static_cast<const uint4*>(sigma.const_data_ptr());
}

// A 16-bit matrix (*, padded columns) that run_operands will make of v, and the power of two that
// it lacks; of rho (O, I) its sigma in fragment order. Both are empty without v.
std::tuple<Tensor, Tensor> add_operand(
    Operands& operands, const std::optional<Tensor>& v, const Tensor& like, ScalarType type,
    bool sigma) {
  if (!v) return {torch::stable::new_empty(like, {0}), torch::stable::new_empty(like, {0})};
  STD_TORCH_CHECK(v->dim() == (sigma ? 2 : 3), "bayes_linear: an operand lacks dimensions");
  check_floats(*v, v->numel());
  std::vector<int64_t> shape(v->sizes().begin(), v->sizes().end());
  const int64_t columns = shape.back(), rows = sigma ? shape[0] : shape[0] * shape[1];
  shape.back() = ceil_div<int64_t>(columns, kEdge) * kEdge;
  if (sigma) shape = {ceil_div<int64_t>(rows, kEdge) * kEdge * shape[1]};
  const Tensor out = torch::stable::new_empty(*v, shape, type);
  const Tensor scale = torch::stable::new_empty(*v, {});
  operands.add(
      {v->const_data_ptr<float>(), output<uint4>(out), scale.mutable_data_ptr<float>(), rows,
       columns, sigma});
  return {out, scale};
}

// The operands of a product with weights: of grad_y (T, N, O), x (T or 1, N, I) and rho (O, I),
// those that are given.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> bayes_operands_cuda(
    std::optional<Tensor> grad_y, std::optional<Tensor> x, std::optional<Tensor> rho,
    bool bfloat16) {
  STD_TORCH_CHECK(x || grad_y || rho, "bayes_linear: an operand is needed");
  const Tensor& like = x ? *x : grad_y ? *grad_y : *rho;
  check_on_device_of(like, {grad_y, rho});
  const DeviceGuard guard(like.get_device_index());
  const ScalarType type = bfloat16 ? ScalarType::BFloat16 : ScalarType::Half;
  const Tensor partial = torch::stable::new_empty(like, {bfloat16 ? 0 : 3 * kOperandBlocks});
  Operands operands;
  const auto [grad, grad_scale] = add_operand(operands, grad_y, like, type, false);
  const auto [rows, x_scale] = add_operand(operands, x, like, type, false);
  const auto [sigma, sigma_scale] = add_operand(operands, rho, like, type, true);
  dispatch_half(type, [&](auto zero) {
    run_operands<decltype(zero)>(operands, output<float>(partial), current_stream(like));
  });
  return {grad, grad_scale, rows, x_scale, sigma, sigma_scale};
}

// y (T, N, O) = base (T or 1, N, O) + the sampled bias + x (T or 1, N, padded I) @ noise^T.
Tensor bayes_forward_cuda(
    Tensor x, Tensor sigma, Tensor base, std::optional<Tensor> bias_mu,
    std::optional<Tensor> bias_rho, Tensor x_scale, Tensor sigma_scale, Tensor seed, int64_t stream,
    int64_t num_samples) {
  check_on_device_of(x, {sigma, base, bias_mu, bias_rho, x_scale, sigma_scale, seed});
  check_padded(x);
  check_replicas(x, num_samples);
  const int64_t T = num_samples, N = x.size(1), O = base.size(2), I = x.size(2);
  check_floats(base, x.size(0) * N * O);
  STD_TORCH_CHECK(
      bias_mu.has_value() == bias_rho.has_value(), "bayes_linear: a bias must have both halves");
  if (bias_mu) check_floats(*bias_mu, O), check_floats(*bias_rho, O);
  const DeviceGuard guard(x.get_device_index());
  const Tensor y = torch::stable::new_empty(base, {T, N, O});
  const Tensor bias = torch::stable::new_empty(base, {bias_mu ? T : 0, O});
  if (y.numel() == 0) return y;
  if (bias_mu)
    run_sample_bias(
        output<float>(bias), pointer<float>(bias_mu), pointer<float>(bias_rho), seed_of(seed),
        uint32_t(stream), T, O, current_stream(x));
  dispatch_half(x, [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_forward<half_t>(
        {static_cast<const half_t*>(x.const_data_ptr()), fragments_of(sigma, O, I),
         base.const_data_ptr<float>(), output<float>(bias), x_scale.const_data_ptr<float>(),
         sigma_scale.const_data_ptr<float>(), seed_of(seed), y.mutable_data_ptr<float>(), T, N, O,
         I, uint32_t(stream), x.size(0) == 1},
        current_stream(x));
  });
  return y;
}

// grad_x (T or 1, N, I) += grad_y (T, N, padded O) @ noise.
void bayes_grad_x_cuda(
    Tensor grad_x, Tensor grad_y, Tensor sigma, Tensor grad_scale, Tensor sigma_scale, Tensor seed,
    int64_t stream) {
  check_on_device_of(grad_x, {grad_y, sigma, grad_scale, sigma_scale, seed});
  check_padded(grad_y);
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = grad_y.size(2), I = grad_x.size(2);
  check_replicas(grad_x, T);
  check_floats(grad_x, grad_x.size(0) * N * I);
  const DeviceGuard guard(grad_x.get_device_index());
  if (grad_x.numel() == 0 || T == 0) return;
  dispatch_half(grad_y, [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_grad_x<half_t>(
        {static_cast<const half_t*>(grad_y.const_data_ptr()), fragments_of(sigma, O, I),
         grad_scale.const_data_ptr<float>(), sigma_scale.const_data_ptr<float>(), seed_of(seed),
         grad_x.mutable_data_ptr<float>(), T, N, O, I, uint32_t(stream), grad_x.size(0) == 1},
        current_stream(grad_x));
  });
}

// (O, I) = sigmoid(rho) * sum over t of eps[t] * (grad_y[t]^T @ x[t]), of (T, N, padded O) and
// (T or 1, N, padded I).
Tensor bayes_grad_rho_cuda(
    Tensor grad_y, Tensor x, Tensor rho, Tensor grad_scale, Tensor x_scale, Tensor seed,
    int64_t stream) {
  check_on_device_of(grad_y, {x, rho, grad_scale, x_scale, seed});
  check_padded(grad_y);
  check_padded(x);
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = rho.size(0), I = rho.size(1);
  check_replicas(x, T);
  check_floats(rho, O * I);
  STD_TORCH_CHECK(
      x.size(1) == N && grad_y.size(2) == ceil_div<int64_t>(O, kEdge) * kEdge &&
          x.size(2) == ceil_div<int64_t>(I, kEdge) * kEdge,
      "bayes_linear: x and grad_y must have the same rows, and those of the weights' padded size");
  const DeviceGuard guard(grad_y.get_device_index());
  if (O * I == 0 || T == 0 || N == 0) return torch::stable::new_zeros(rho, {O, I});
  const Tensor out = torch::stable::new_empty(rho, {O, I});
  const int parts = grad_rho_parts(T, O, I);
  const Tensor sums = torch::stable::new_empty(rho, {parts > 1 ? parts : 0, O, I});
  dispatch_half(grad_y, [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_grad_rho<half_t>(
        {static_cast<const half_t*>(grad_y.const_data_ptr()),
         static_cast<const half_t*>(x.const_data_ptr()), rho.const_data_ptr<float>(),
         grad_scale.const_data_ptr<float>(), x_scale.const_data_ptr<float>(), seed_of(seed),
         out.mutable_data_ptr<float>(), T, N, O, I, uint32_t(stream), x.size(0) == 1, parts,
         output<float>(sums)},
        current_stream(grad_y));
  });
  return out;
}

// ---- noise in memory for a matrix product of torch's -------------------------------------------

// weight (R, O, padded I) = sigma * eps of replicas first .. first + R - 1.
void sample_noise_cuda(Tensor weight, Tensor sigma, Tensor seed, int64_t stream, int64_t first) {
  check_on_device_of(weight, {sigma, seed});
  check_padded(weight);
  const int64_t R = weight.size(0), O = weight.size(1), I = weight.size(2);
  STD_TORCH_CHECK(
      sigma.scalar_type() == weight.scalar_type(), "sample_noise_: sigma must have weight's dtype");
  const DeviceGuard guard(weight.get_device_index());
  if (weight.numel() == 0) return;
  dispatch_half(weight, [&](auto zero) {
    using half_t = decltype(zero);
    run_sample_noise<half_t>(
        static_cast<half_t*>(weight.mutable_data_ptr()), fragments_of(sigma, O, I), seed_of(seed),
        uint32_t(stream), first, R, O, I / kEdge, current_stream(weight));
  });
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("bayes_operands", TORCH_BOX(&bayes_operands_cuda));
  m.impl("bayes_forward", TORCH_BOX(&bayes_forward_cuda));
  m.impl("bayes_grad_x_", TORCH_BOX(&bayes_grad_x_cuda));
  m.impl("bayes_grad_rho", TORCH_BOX(&bayes_grad_rho_cuda));
  m.impl("sample_noise_", TORCH_BOX(&sample_noise_cuda));
}

}  // namespace
}  // namespace bnuq
