#include "linear_ways.h"

#include "linear_sampled_kernels.cuh"
#include "products.h"

namespace bnuq {
namespace {

// What samples the weights, but for where they go and of which replicas they are.
SampleArgs sampling(const Posterior& q, int64_t N) {
  SampleArgs args = {};
  args.mu = pointer<float>(q.mu), args.rho = pointer<float>(q.rho);
  args.bias_mu = pointer<float>(q.bias_mu), args.bias_rho = pointer<float>(q.bias_rho);
  args.seed = seed_of(q.seed), args.stream = uint32_t(q.stream);
  args.N = N, args.O = q.O(), args.I = q.I();
  return args;
}

// y is where the biases go, null for none.
void sample(SampleArgs args, int64_t first, const Tensor& weight, float* y, cudaStream_t stream) {
  args.first = first, args.R = weight.size(0);
  args.weight = output<float>(weight), args.y = y;
  if (args.R * args.O > 0) run_sample_weights(args, stream);
}

// grad (R, N, O) @ weight (R, O, I) into replicas `first` and on of grad_x; where all share x, added
// up in its one, which the first replicas write.
void add_grad_x(const Tensor& grad_x, int64_t first, const Tensor& grad, const Tensor& weight) {
  const int64_t R = grad.size(0), N = grad.size(1), O = grad.size(2), I = weight.size(2);
  if (grad_x.size(0) > 1) {
    multiply_each(matrices(grad_x, R, N, I, first * N * I), grad, weight);
    return;
  }
  const Tensor rows = torch::stable::reshape(torch::stable::transpose(grad, 0, 1), {N, R * O});
  (first == 0 ? multiply : multiply_add)(matrix(grad_x, N, I), rows, matrix(weight, R * O, I));
}

// What sums the gradients over replicas, but for which these are.
ReduceArgs reducing(const Gradients& grads, const SampleArgs& from) {
  const auto& [grad_x, grad_mu, grad_rho, grad_bias_mu, grad_bias_rho] = grads;
  ReduceArgs args = {};
  args.rho = from.rho, args.bias_rho = from.bias_rho;
  args.seed = from.seed, args.stream = from.stream;
  args.grad_mu = output<float>(grad_mu), args.grad_rho = output<float>(grad_rho);
  args.grad_bias_mu = output<float>(grad_bias_mu);
  args.grad_bias_rho = output<float>(grad_bias_rho);
  args.N = from.N, args.O = from.O, args.I = args.grad_mu ? from.I : 0;
  return args;
}

}  // namespace

Tensor sampled_forward(const Tensor& x, const Posterior& q, int64_t T, int64_t chunk) {
  const int64_t N = x.size(1), O = q.O(), I = q.I();
  const Tensor y = empty(x, {T, N, O}), room = empty(x, {smaller(chunk, T), O, I});
  const SampleArgs sampled = sampling(q, N);
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t count = smaller(chunk, T - first), place = first * N * O;
    const Tensor weight = matrices(room, count, O, I);
    float* biased = q.bias_mu ? output<float>(y) + place : nullptr;
    sample(sampled, first, weight, biased, current_stream(x));
    (q.bias_mu ? multiply_add_each : multiply_each)(
        matrices(y, count, N, O, place), matrices_from(x, first, count),
        transposed_matrices(weight, count, O, I));
  }
  return y;
}

Gradients sampled_backward(
    const Tensor& grad_y, const Tensor& x, const Posterior& q, Needs needs, int64_t chunk) {
  const int64_t T = grad_y.size(0), N = x.size(1), O = q.O(), I = q.I();
  const Gradients grads = gradients_like(x, x.size(0), q, needs);
  const Tensor room = empty(x, {needs.x || needs.weight ? smaller(chunk, T) : 0, O, I});
  const SampleArgs sampled = sampling(q, N);
  ReduceArgs reduced = reducing(grads, sampled);
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t count = smaller(chunk, T - first), place = first * N * O;
    const Tensor grad = matrices(grad_y, count, N, O, place);
    const Tensor weight = matrices(room, smaller(count, room.size(0)), O, I);
    if (needs.x) {
      sample(sampled, first, weight, nullptr, current_stream(x));
      add_grad_x(std::get<0>(grads), first, grad, weight);
    }
    if (needs.weight) {
      const Tensor rows = matrices_from(x, first, count);
      multiply_each(weight, transposed_matrices(grad, count, N, O), rows);
    }
    reduced.grad_weight = output<float>(weight), reduced.grad_y = pointer<float>(grad);
    reduced.first = first, reduced.R = count;
    if (O > 0) run_reduce_grads(reduced, current_stream(x));
  }
  return grads;
}

}  // namespace bnuq
