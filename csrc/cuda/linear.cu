#include "linear_ways.h"

#include "linear_backward_kernels.cuh"
#include "linear_sampled_kernels.cuh"
#include "operand_kernels.cuh"
#include "products.h"

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
  if (!v) return {empty(like, {0}), empty(like, {0})};
  STD_TORCH_CHECK(v->dim() == (sigma ? 2 : 3), "bayes_linear: an operand lacks dimensions");
  check_floats(*v, v->numel());
  std::vector<int64_t> shape(v->sizes().begin(), v->sizes().end());
  const int64_t columns = shape.back(), rows = sigma ? shape[0] : shape[0] * shape[1];
  shape.back() = ceil_div<int64_t>(columns, kEdge) * kEdge;
  if (sigma) shape = {ceil_div<int64_t>(rows, kEdge) * kEdge * shape[1]};
  const Tensor out = empty(*v, shape, type);
  const Tensor scale = empty(*v, {});
  operands.add(
      {v->const_data_ptr<float>(), output<uint4>(out), scale.mutable_data_ptr<float>(), rows,
       columns, sigma});
  return {out, scale};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> bayes_operands_cuda(
    std::optional<Tensor> grad_y, std::optional<Tensor> x, std::optional<Tensor> rho,
    bool bfloat16) {
  STD_TORCH_CHECK(x || grad_y || rho, "bayes_linear: an operand is needed");
  const Tensor& like = x ? *x : grad_y ? *grad_y : *rho;
  check_on_device_of(like, {grad_y, rho});
  const DeviceGuard guard(like.get_device_index());
  const NoiseOperands made =
      operands_of(grad_y, x, rho, bfloat16 ? ScalarType::BFloat16 : ScalarType::Half);
  return {made.grad_y, made.grad_scale, made.x, made.x_scale, made.sigma, made.sigma_scale};
}

// y (T, N, O) = base (T or 1, N, O) + bias (T, O) or none + x (T or 1, N, padded I) @ noise^T.
Tensor noise_forward(
    const Tensor& x, const Tensor& sigma, const Tensor& base, const Tensor& bias,
    const Tensor& x_scale, const Tensor& sigma_scale, const Tensor& seed, int64_t stream,
    int64_t T) {
  check_padded(x);
  check_replicas(x, T);
  const int64_t N = x.size(1), O = base.size(2), I = x.size(2);
  check_floats(base, x.size(0) * N * O);
  const Tensor y = empty(base, {T, N, O});
  if (y.numel() == 0) return y;
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

Tensor bayes_forward_cuda(
    Tensor x, Tensor sigma, Tensor base, Tensor x_scale, Tensor sigma_scale, Tensor seed,
    int64_t stream, int64_t num_samples) {
  check_on_device_of(x, {sigma, base, x_scale, sigma_scale, seed});
  const DeviceGuard guard(x.get_device_index());
  return noise_forward(
      x, sigma, base, empty(base, {0}), x_scale, sigma_scale, seed, stream, num_samples);
}

// grad_x (T or 1, N, I) += grad_y (T, N, padded O) @ noise.
void add_noise_grad_x(
    const Tensor& grad_x, const Tensor& grad_y, const Tensor& sigma, const Tensor& grad_scale,
    const Tensor& sigma_scale, const Tensor& seed, int64_t stream) {
  check_padded(grad_y);
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = grad_y.size(2), I = grad_x.size(2);
  check_replicas(grad_x, T);
  check_floats(grad_x, grad_x.size(0) * N * I);
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

// out (O, I) = sigmoid(rho) * sum over t of eps[t] * (grad_y[t]^T @ x[t]), of (T, N, padded O) and
// (T or 1, N, padded I).
void write_grad_rho(
    Tensor out, const Tensor& grad_y, const Tensor& x, const Tensor& rho, const Tensor& grad_scale,
    const Tensor& x_scale, const Tensor& seed, int64_t stream) {
  check_padded(grad_y);
  check_padded(x);
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = rho.size(0), I = rho.size(1);
  check_replicas(x, T);
  check_floats(rho, O * I), check_floats(out, O * I);
  STD_TORCH_CHECK(
      x.size(1) == N && grad_y.size(2) == ceil_div<int64_t>(O, kEdge) * kEdge &&
          x.size(2) == ceil_div<int64_t>(I, kEdge) * kEdge,
      "bayes_linear: x and grad_y must have the same rows, and those of the weights' padded size");
  if (O * I == 0 || T == 0 || N == 0) {
    torch::stable::zero_(out);
    return;
  }
  const int parts = grad_rho_parts(T, O, I);
  const Tensor sums = empty(rho, {parts > 1 ? parts : 0, O, I});
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
}

// By both halves of the bias, of grad_y (T, N, O).
void write_bias_grads(const Gradients& grads, const Tensor& grad_y, const Posterior& q) {
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = grad_y.size(2);
  check_floats(grad_y, T * N * O), check_floats(*q.bias_rho, O);
  ReduceArgs args = {};
  args.grad_y = pointer<float>(grad_y), args.bias_rho = pointer<float>(q.bias_rho);
  args.grad_bias_mu = output<float>(std::get<3>(grads));
  args.grad_bias_rho = output<float>(std::get<4>(grads));
  args.seed = seed_of(q.seed), args.stream = uint32_t(q.stream);
  args.R = T, args.N = N, args.O = O;
  if (O > 0) run_reduce_grads(args, current_stream(grad_y));
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("bayes_operands", TORCH_BOX(&bayes_operands_cuda));
  m.impl("bayes_forward", TORCH_BOX(&bayes_forward_cuda));
}

}  // namespace

NoiseOperands operands_of(
    const std::optional<Tensor>& grad_y, const std::optional<Tensor>& x,
    const std::optional<Tensor>& rho, ScalarType type) {
  const Tensor& like = x ? *x : grad_y ? *grad_y : *rho;
  const bool whole_range = type == ScalarType::BFloat16;
  const Tensor partial = empty(like, {whole_range ? 0 : 3 * kOperandBlocks}, ScalarType::Float);
  Operands operands;
  const auto [grad, grad_scale] = add_operand(operands, grad_y, like, type, false);
  const auto [rows, x_scale] = add_operand(operands, x, like, type, false);
  const auto [sigma, sigma_scale] = add_operand(operands, rho, like, type, true);
  dispatch_half(type, [&](auto zero) {
    run_operands<decltype(zero)>(operands, output<float>(partial), current_stream(like));
  });
  return {grad, grad_scale, rows, x_scale, sigma, sigma_scale};
}

Tensor sampled_bias(const Posterior& q, int64_t T) {
  const Tensor bias = empty(q.mu, {q.bias_mu ? T : 0, q.O()});
  if (bias.numel() == 0) return bias;
  check_floats(*q.bias_mu, q.O()), check_floats(*q.bias_rho, q.O());
  run_sample_bias(
      output<float>(bias), pointer<float>(q.bias_mu), pointer<float>(q.bias_rho), seed_of(q.seed),
      uint32_t(q.stream), T, q.O(), current_stream(q.mu));
  return bias;
}

Tensor write_weight_grads(
    const Gradients& grads, const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs,
    const NoiseOperands& o) {
  const int64_t O = q.O(), I = q.I(), rows = x.size(0) * x.size(1);
  if (needs.bias) write_bias_grads(grads, grad_y, q);
  if (!needs.x && !needs.weight) return grad_y;
  const bool every = x.size(0) == grad_y.size(0);
  const Tensor summed =
      matrix(every ? grad_y : torch::stable::sum(grad_y, std::vector<int64_t>{0}), rows, O);
  if (needs.weight) {
    multiply(std::get<1>(grads), transposed(summed, rows, O), matrix(x, rows, I));
    write_grad_rho(
        std::get<2>(grads), o.grad_y, o.x, q.rho, o.grad_scale, o.x_scale, q.seed, q.stream);
  }
  return summed;
}

NoiseOperands operands_for(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type) {
  const int64_t T = grad_y.size(0), O = q.O(), I = q.I(), rows = x.size(0) * x.size(1);
  check_floats(grad_y, T * x.size(1) * O), check_floats(x, rows * I), check_floats(q.mu, O * I);
  if (!needs.x && !needs.weight) return {};
  return operands_of(
      grad_y, needs.weight ? std::optional(x) : std::nullopt,
      needs.x ? std::optional(q.rho) : std::nullopt, type);
}

// ---- all of a call whose products are fused -----------------------------------------------------

Tensor fused_forward(const Tensor& x, const Posterior& q, int64_t T, ScalarType type) {
  const int64_t O = q.O(), I = q.I(), rows = x.size(0) * x.size(1);
  check_floats(x, rows * I), check_floats(q.mu, O * I);
  const Tensor base = empty(x, {x.size(0), x.size(1), O});
  multiply(matrix(base, rows, O), matrix(x, rows, I), transposed(q.mu, O, I));
  const NoiseOperands o = operands_of(std::nullopt, x, q.rho, type);
  const Tensor bias = sampled_bias(q, T);
  return noise_forward(o.x, o.sigma, base, bias, o.x_scale, o.sigma_scale, q.seed, q.stream, T);
}

Gradients fused_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type) {
  const int64_t I = q.I(), rows = x.size(0) * x.size(1);
  const Gradients grads = gradients_like(x, x.size(0), q, needs);
  const NoiseOperands o = operands_for(grad_y, x, q, needs, type);
  const Tensor summed = write_weight_grads(grads, grad_y, x, q, needs, o);
  if (!needs.x) return grads;
  const Tensor& grad_x = std::get<0>(grads);
  multiply(matrix(grad_x, rows, I), summed, q.mu);
  add_noise_grad_x(grad_x, o.grad_y, o.sigma, o.grad_scale, o.sigma_scale, q.seed, q.stream);
  return grads;
}

}  // namespace bnuq
