#include "linear_ways.h"

#include "linear_backward_kernels.cuh"
#include "linear_sampled_kernels.cuh"
#include "operand_kernels.cuh"
#include "products.h"

namespace bnuq {
namespace {

// A 16-bit matrix (*, padded columns) that run_operands will make of v, and the power of two that
// it lacks; of rho (O, I) its sigma in fragment order. Both are empty without v.
std::tuple<Tensor, Tensor> add_operand(
    Operands& operands, const std::optional<Tensor>& v, ScalarType type, bool sigma) {
  if (!v) return {};
  std::vector<int64_t> shape(v->sizes().begin(), v->sizes().end());
  const int64_t columns = shape.back(), rows = sigma ? shape[0] : shape[0] * shape[1];
  shape.back() = padded(columns);
  if (sigma) shape = {padded(rows) * shape[1]};
  const Tensor out = empty(*v, shape, type);
  const Tensor scale = empty(*v, {});
  operands.add(
      {v->const_data_ptr<float>(), output<uint4>(out), scale.mutable_data_ptr<float>(), rows,
       columns, sigma});
  return {out, scale};
}

NoiseOperands operands_of(
    const std::optional<Tensor>& grad_y, const std::optional<Tensor>& x,
    const std::optional<Tensor>& rho, ScalarType type) {
  const Tensor& like = x ? *x : grad_y ? *grad_y : *rho;
  const bool whole_range = type == ScalarType::BFloat16;
  const Tensor partial = empty(like, {whole_range ? 0 : 3 * kOperandBlocks}, ScalarType::Float);
  Operands operands;
  const auto [grad, grad_scale] = add_operand(operands, grad_y, type, false);
  const auto [rows, x_scale] = add_operand(operands, x, type, false);
  const auto [sigma, sigma_scale] = add_operand(operands, rho, type, true);
  dispatch_half(type, [&](auto zero) {
    run_operands<decltype(zero)>(operands, output<float>(partial), current_stream(like));
  });
  return {grad, grad_scale, rows, x_scale, sigma, sigma_scale};
}

// y (T, N, O): what was started, and x @ noise^T.
Tensor noise_forward(const ForwardStart& s, const Tensor& seed, int64_t stream, int64_t T) {
  const int64_t N = s.base.size(1), O = s.base.size(2), I = s.noise.x.size(2);
  const Tensor y = empty(s.base, {T, N, O});
  dispatch_half(s.noise.x.scalar_type(), [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_forward<half_t>(
        {pointer<half_t>(s.noise.x), pointer<uint4>(s.noise.sigma), pointer<float>(s.base),
         output<float>(s.bias), pointer<float>(s.noise.x_scale),
         pointer<float>(s.noise.sigma_scale), seed_of(seed), output<float>(y), T, N, O, I,
         uint32_t(stream), s.base.size(0) == 1},
        current_stream(y));
  });
  return y;
}

// grad_x (T or 1, N, I) += grad_y (T, N, O) @ noise.
void add_noise_grad_x(const Tensor& grad_x, const NoiseOperands& noise, const Posterior& q) {
  const Tensor& grad_y = noise.grad_y;
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = grad_y.size(2), I = q.I();
  if (grad_x.numel() == 0) return;
  dispatch_half(grad_y.scalar_type(), [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_grad_x<half_t>(
        {pointer<half_t>(grad_y), pointer<uint4>(noise.sigma), pointer<float>(noise.grad_scale),
         pointer<float>(noise.sigma_scale), seed_of(q.seed), output<float>(grad_x), T, N, O, I,
         uint32_t(q.stream), grad_x.size(0) == 1},
        current_stream(grad_x));
  });
}

// out (O, I) = sigmoid(rho) * sum over t of eps[t] * (grad_y[t]^T @ x[t]), of (T, N, O) and
// (T or 1, N, I).
void write_grad_rho(Tensor out, const NoiseOperands& noise, const Posterior& q) {
  const Tensor &grad_y = noise.grad_y, &x = noise.x;
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = q.O(), I = q.I();
  if (O * I == 0 || N == 0) {
    torch::stable::zero_(out);
    return;
  }
  const int parts = grad_rho_parts(T, O, I);
  const Tensor sums = empty(q.rho, {parts > 1 ? parts : 0, O, I});
  dispatch_half(grad_y.scalar_type(), [&](auto zero) {
    using half_t = decltype(zero);
    run_bayes_grad_rho<half_t>(
        {pointer<half_t>(grad_y), pointer<half_t>(x), pointer<float>(q.rho),
         pointer<float>(noise.grad_scale), pointer<float>(noise.x_scale), seed_of(q.seed),
         output<float>(out), T, N, O, I, uint32_t(q.stream), x.size(0) == 1, parts,
         output<float>(sums)},
        current_stream(grad_y));
  });
}

Tensor sampled_bias(const Posterior& q, int64_t T) {
  const Tensor bias = empty(q.mu, {q.bias_mu ? T : 0, q.O()});
  if (bias.numel() > 0)
    run_sample_bias(
        output<float>(bias), pointer<float>(q.bias_mu), pointer<float>(q.bias_rho), seed_of(q.seed),
        uint32_t(q.stream), T, q.O(), current_stream(q.mu));
  return bias;
}

// By both halves of the bias, of grad_y (T, N, O).
void write_bias_grads(const Gradients& grads, const Tensor& grad_y, const Posterior& q) {
  ReduceArgs args = {};
  args.grad_y = grad_y.const_data_ptr<float>(), args.bias_rho = pointer<float>(q.bias_rho);
  args.grad_bias_mu = output<float>(std::get<3>(grads));
  args.grad_bias_rho = output<float>(std::get<4>(grads));
  args.seed = seed_of(q.seed), args.stream = uint32_t(q.stream);
  args.R = grad_y.size(0), args.N = grad_y.size(1), args.O = q.O();
  if (args.O > 0) run_reduce_bias_grads(args, current_stream(grad_y));
}

// ---- the fused product by itself, for a benchmark -----------------------------------------------

void check_floats(const Tensor& t, int64_t dim) {
  STD_TORCH_CHECK(
      t.dim() == dim && t.is_contiguous() && t.scalar_type() == ScalarType::Float,
      "bayes_linear: a tensor must be float32, contiguous and have its dimensions");
}

// Of x (T or 1, N, I) and rho (O, I).
std::tuple<Tensor, Tensor, Tensor, Tensor> bayes_operands_cuda(Tensor x, Tensor rho) {
  check_on_device_of(x, {rho});
  check_floats(x, 3), check_floats(rho, 2);
  const DeviceGuard guard(x.get_device_index());
  const NoiseOperands made = operands_of(std::nullopt, x, rho, ScalarType::Half);
  return {made.x, made.x_scale, made.sigma, made.sigma_scale};
}

// base (T or 1, N, O) + x @ noise^T of what bayes_operands made.
Tensor bayes_forward_cuda(
    Tensor x, Tensor x_scale, Tensor sigma, Tensor sigma_scale, Tensor base, Tensor seed,
    int64_t stream, int64_t num_samples) {
  check_on_device_of(x, {x_scale, sigma, sigma_scale, base, seed});
  check_floats(base, 3), check_floats(x_scale, 0), check_floats(sigma_scale, 0);
  STD_TORCH_CHECK(
      x.dim() == 3 && x.is_contiguous() && x.size(2) % kEdge == 0 && x.size(0) == base.size(0) &&
          x.size(1) == base.size(1) && (x.size(0) == 1 || x.size(0) == num_samples),
      "bayes_linear: x must be packed by bayes_operands, for one replica or all");
  STD_TORCH_CHECK(
      sigma.is_contiguous() && sigma.scalar_type() == x.scalar_type() &&
          sigma.numel() == padded(base.size(2)) * x.size(2),
      "bayes_linear: sigma must be packed by bayes_operands");
  STD_TORCH_CHECK(
      aligned(x.const_data_ptr()) && aligned(sigma.const_data_ptr()),
      "bayes_linear: x and sigma must begin on 16 bytes");
  STD_TORCH_CHECK(base.numel() > 0, "bayes_linear: base must not be empty");
  const DeviceGuard guard(x.get_device_index());
  const NoiseOperands noise = {{}, {}, x, x_scale, sigma, sigma_scale};
  return noise_forward({base, empty(base, {0}), noise}, seed, stream, num_samples);
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("bayes_operands", TORCH_BOX(&bayes_operands_cuda));
  m.impl("bayes_forward", TORCH_BOX(&bayes_forward_cuda));
}

}  // namespace

// ---- the parts of a call ------------------------------------------------------------------------

ForwardStart start_forward(const Tensor& x, const Posterior& q, int64_t T, ScalarType type) {
  const int64_t O = q.O(), I = q.I(), rows = x.size(0) * x.size(1);
  const Tensor base = empty(x, {x.size(0), x.size(1), O});
  multiply(matrix(base, rows, O), matrix(x, rows, I), transposed(q.mu, O, I));
  return {base, sampled_bias(q, T), operands_of(std::nullopt, x, q.rho, type)};
}

BackwardStart start_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type) {
  const int64_t O = q.O(), I = q.I(), rows = x.size(0) * x.size(1);
  const Gradients grads = gradients_like(x, x.size(0), q, needs);
  if (needs.bias) write_bias_grads(grads, grad_y, q);
  if (!needs.x && !needs.weight) return {grads, {}};
  const NoiseOperands noise = operands_of(
      grad_y, needs.weight ? std::optional(x) : std::nullopt,
      needs.x ? std::optional(q.rho) : std::nullopt, type);
  // For the products with mu, whose x may be that of all replicas.
  const bool every = x.size(0) == grad_y.size(0);
  const Tensor summed =
      matrix(every ? grad_y : torch::stable::sum(grad_y, std::vector<int64_t>{0}), rows, O);
  if (needs.weight) {
    multiply(std::get<1>(grads), transposed(summed, rows, O), matrix(x, rows, I));
    write_grad_rho(std::get<2>(grads), noise, q);
  }
  if (needs.x) multiply(matrix(std::get<0>(grads), rows, I), summed, q.mu);
  return {grads, noise};
}

Tensor fused_forward(const Tensor& x, const Posterior& q, int64_t T, ScalarType type) {
  return noise_forward(start_forward(x, q, T, type), q.seed, q.stream, T);
}

Gradients fused_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type) {
  const BackwardStart start = start_backward(grad_y, x, q, needs, type);
  if (needs.x) add_noise_grad_x(std::get<0>(start.grads), start.noise, q);
  return start.grads;
}

}  // namespace bnuq
