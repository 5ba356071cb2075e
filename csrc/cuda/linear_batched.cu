#include "linear_ways.h"

#include "linear_batched_kernels.cuh"
#include "products.h"

namespace bnuq {
namespace {

// 4 GB of a product's numbers lie beside the output, and its rows fit a grid's first dimension.
constexpr int64_t kMostProduct = 1 << 30;

// Replicas, of so many numbers each, that a product has.
int64_t replicas_at_once(int64_t chunk, int64_t numbers) {
  return smaller(chunk, larger<int64_t>(1, kMostProduct / larger<int64_t>(1, numbers)));
}

// sigma * eps of weight's replicas, from `first` on.
void sample_noise(
    const Tensor& weight, const Tensor& sigma, const Posterior& q, int64_t first,
    cudaStream_t stream) {
  dispatch_half(weight.scalar_type(), [&](auto zero) {
    run_sample_noise(
        output<decltype(zero)>(weight), pointer<uint4>(sigma), seed_of(q.seed), uint32_t(q.stream),
        first, weight.size(0), weight.size(1), weight.size(2) / kEdge, stream);
  });
}

}  // namespace

Tensor batched_forward(
    const Tensor& x, const Posterior& q, int64_t T, ScalarType type, int64_t most) {
  const int64_t N = x.size(1), O = q.O(), I = padded(q.I());
  const int64_t chunk = replicas_at_once(most, N * O);
  const auto [base, bias, noise] = start_forward(x, q, T, type);
  const Tensor y = empty(x, {T, N, O}), room = empty(x, {smaller(chunk, T), O, I}, type);
  const bool one = x.size(0) == 1;
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t count = smaller(chunk, T - first), place = first * N * O;
    const Tensor weight = matrices(room, count, O, I);
    sample_noise(weight, noise.sigma, q, first, current_stream(x));
    const Tensor product = float_products(
        matrices_from(noise.x, first, count), transposed_matrices(weight, count, O, I));
    run_add_products(
        {pointer<float>(product), pointer<float>(noise.x_scale), pointer<float>(noise.sigma_scale),
         output<float>(base) + (one ? 0 : place),
         q.bias_mu ? output<float>(bias) + first * O : nullptr, output<float>(y) + place, count, N,
         O, O, one, false},
        current_stream(x));
  }
  return y;
}

Gradients batched_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, ScalarType type,
    int64_t most) {
  const int64_t T = grad_y.size(0), N = x.size(1), O = q.O(), I = q.I();
  const int64_t chunk = replicas_at_once(most, N * padded(I));
  const auto [grads, noise] = start_backward(grad_y, x, q, needs, type);
  const Tensor& grad_x = std::get<0>(grads);
  if (grad_x.numel() == 0 || O == 0) return grads;
  const Tensor room = empty(x, {smaller(chunk, T), O, padded(I)}, type);
  const bool one = x.size(0) == 1;
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t count = smaller(chunk, T - first);
    const Tensor weight = matrices(room, count, O, padded(I));
    sample_noise(weight, noise.sigma, q, first, current_stream(x));
    const Tensor grad =
        view_of(noise.grad_y, first * N * padded(O), {count, N, O}, {N * padded(O), padded(O), 1});
    const Tensor product = float_products(grad, weight);
    float* out = output<float>(grad_x) + (one ? 0 : first * N * I);
    run_add_products(
        {pointer<float>(product), pointer<float>(noise.grad_scale),
         pointer<float>(noise.sigma_scale), out, nullptr, out, count, N, I, padded(I), false, one},
        current_stream(x));
  }
  return grads;
}

}  // namespace bnuq
