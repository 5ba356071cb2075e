// The ways of bayes_linear on CUDA, which linear_ways.cu chooses from. They trust what it has
// checked: x is (T or 1, N, I) and contiguous, as grad_y (T, N, O) and the weights are, and all are
// of one dtype, which only the direct way takes for float64. No result of a forward is empty.
#pragma once
#include <tuple>

#include "../philox.h"
#include "launch.h"

namespace bnuq {

// Of the noise of a call, and what it is the noise of.
struct Posterior {
  Tensor mu, rho;                           // (O, I)
  std::optional<Tensor> bias_mu, bias_rho;  // (O,)
  Tensor seed;
  int64_t stream;

  int64_t O() const { return mu.size(0); }
  int64_t I() const { return mu.size(1); }
};

struct Needs {
  bool x, weight, bias;
};

// By x, mu, rho, bias_mu and bias_rho; what is not needed is empty.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// That by x is (sums, N, I), to be summed where x is shared.
inline Gradients gradients_like(const Tensor& x, int64_t sums, const Posterior& q, Needs needs) {
  const auto made = [&](bool needed, std::vector<int64_t> shape) {
    return empty(q.mu, needed ? shape : std::vector<int64_t>{0});
  };
  return {
      made(needs.x, {sums, x.size(1), q.I()}), made(needs.weight, {q.O(), q.I()}),
      made(needs.weight, {q.O(), q.I()}), made(needs.bias, {q.O()}), made(needs.bias, {q.O()})};
}

Tensor direct_forward(const Tensor& x, const Posterior& q, int64_t T);
Gradients direct_backward(const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs);

// The weights of `chunk` replicas in memory at a time.
Tensor sampled_forward(const Tensor& x, const Posterior& q, int64_t T, int64_t chunk);
Gradients sampled_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, int64_t chunk);

// `type` is that of the noise product's operands.
Tensor fused_forward(const Tensor& x, const Posterior& q, int64_t T, ScalarType type);
Gradients fused_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type);

// The noise of up to `most` replicas in memory at a time.
Tensor batched_forward(
    const Tensor& x, const Posterior& q, int64_t T, ScalarType type, int64_t most);
Gradients batched_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type,
    int64_t most);

// ---- what the fused and the batched way share, in linear.cu -------------------------------------

template <typename F>
void dispatch_half(ScalarType type, const F& body) {
  if (type == ScalarType::Half) return body(__half());
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "bayes_linear: an operand must have 16 bits");
  body(__nv_bfloat16());
}

// Columns of a 16-bit matrix.
inline int64_t padded(int64_t columns) {
  return ceil_div<int64_t>(columns, kEdge) * kEdge;
}

// 16-bit matrices with padded rows, and the powers of two that they lack; sigma in fragment order.
struct NoiseOperands {
  Tensor grad_y, grad_scale, x, x_scale, sigma, sigma_scale;  // empty for what is not needed
};

// All of a result but the product with noise.
struct ForwardStart {
  Tensor base;  // x @ mu^T, (T or 1, N, O)
  Tensor bias;  // (T, O), or empty without a bias
  NoiseOperands noise;
};
ForwardStart start_forward(const Tensor& x, const Posterior& q, int64_t T, ScalarType type);

// All gradients but what noise adds to that by x.
struct BackwardStart {
  Gradients grads;
  NoiseOperands noise;
};
BackwardStart start_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type);

}  // namespace bnuq
