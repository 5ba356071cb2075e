#include "linear_ways.h"

#include <algorithm>
#include <atomic>

#include "products.h"

// bayes_linear on CUDA, in one of four ways.
//
//   y[t] = x[t] @ mu^T + bias[t] + x[t] @ (sigma * eps[t])^T
//
// Fused: the first product is torch's, in its float32 precision. The second is a kernel's with
// 16-bit operands and float32 sums: float16 (11 bits), scaled by powers of two to its range, for
// float32 and float16 x; bfloat16 (8 bits) for bfloat16 x. So the noise of an output is off by about
// 2^-11 (2^-8) of its own size.
//
// Batched: the same with many rows, by 16-bit products of torch's with the noise of a chunk of
// replicas in memory.
//
// Direct: one kernel for all of it, two for the gradients, in the precision of the weights. For
// float64, and for few rows of few weights, whose price are launches.
//
// Sampled: the weights of a chunk of replicas in memory, and float32 products of torch's. For more
// rows of not many weights, whose price are launches too.
namespace bnuq {
namespace {

// The fused kernel makes a weight's noise once for 128 rows. With so many it takes 2.5 times its
// noise (measured on an H200), by counting as long as writing the noise for a product of torch's.
constexpr int64_t kMostFusedRows = 128;

// Measured on an H200: of so many rows and weights a few replicas are made in two thirds of the fused
// way's time, launches included, a hundred in twice that. T has no say: a replica alone is what it is
// among others.
constexpr int64_t kMostDirectRows = 8, kMostDirectWeights = 3 << 16;
constexpr int64_t kMostSampledRows = 512, kMostSampledWeights = 1 << 19;

// A chunk stays in a GPU's second-level cache.
constexpr int64_t kChunkBytes = 32 << 20;

enum class Way { kBySize, kDirect, kSampled, kFused, kBatched };

// What tests and benchmarks ask for in the place of what the sizes say.
std::atomic<Way> asked_way = Way::kBySize;
std::atomic<int64_t> asked_chunk_bytes = 0;

void ask_bayes_linear_way(int64_t way, int64_t chunk_bytes) {
  STD_TORCH_CHECK(
      way >= 0 && way <= int64_t(Way::kBatched), "bayes_linear: way must lie in [0, 4]");
  asked_way = Way(way), asked_chunk_bytes = chunk_bytes;
}

Way way_by_size(int64_t rows, int64_t weights) {
  if (rows <= kMostDirectRows && weights <= kMostDirectWeights) return Way::kDirect;
  if (rows <= kMostSampledRows && weights <= kMostSampledWeights) return Way::kSampled;
  return Way::kFused;
}

Way way_of(const Tensor& x, const Tensor& mu) {
  if (x.scalar_type() == ScalarType::Double) return Way::kDirect;
  const int64_t rows = x.size(-2);
  const Way asked = asked_way, way = asked == Way::kBySize ? way_by_size(rows, mu.numel()) : asked;
  return way == Way::kFused && rows > kMostFusedRows ? Way::kBatched : way;
}

int64_t bayes_linear_way(Tensor x, Tensor mu) {
  return int64_t(way_of(x, mu));
}

// Replicas whose weights, of so many bytes each, lie in memory at a time.
int64_t chunk_of(const Tensor& mu, int64_t bytes) {
  const int64_t most = asked_chunk_bytes > 0 ? asked_chunk_bytes.load() : kChunkBytes;
  return larger<int64_t>(1, most / larger<int64_t>(1, mu.numel() * bytes));
}

// (T or 1, N, I), in the precision of the weights.
Tensor replicas_of(const Tensor& x, const Tensor& mu) {
  const Tensor rows = contiguous_as(mu.scalar_type(), x);
  return x.dim() == 3 ? rows : matrices(rows, 1, x.size(0), x.size(1));
}

bool like(const Tensor& t, const Tensor& mu, Sizes sizes) {
  return t.scalar_type() == mu.scalar_type() && t.dim() == int64_t(sizes.size()) &&
         std::equal(sizes.begin(), sizes.end(), t.sizes().begin());
}

std::optional<Tensor> bias_like(const std::optional<Tensor>& bias, const Tensor& mu) {
  if (!bias) return {};
  STD_TORCH_CHECK(
      like(*bias, mu, {mu.size(0)}), "bayes_linear: a bias must be (O,) in the dtype of mu");
  return contiguous_as(mu.scalar_type(), *bias);
}

// Inputs and outputs of a layer, by the blocks that a grid has for them.
constexpr int64_t kMostFeatures = 65535 * 64;

// Checked against x and T: the ways read through raw pointers.
Posterior posterior_of(
    const Tensor& x, const Tensor& mu, const Tensor& rho, const std::optional<Tensor>& bias_mu,
    const std::optional<Tensor>& bias_rho, const Tensor& seed, int64_t stream, int64_t T) {
  check_on_device_of(x, {mu, rho, bias_mu, bias_rho, seed});
  STD_TORCH_CHECK(
      (x.dim() == 2 || x.dim() == 3) && mu.dim() == 2 && x.size(-1) == mu.size(1) &&
          acc_of(x.scalar_type()) == mu.scalar_type(),
      "bayes_linear: x must be (N, I) or (T, N, I), and mu (O, I) in the dtype that x has sums of");
  STD_TORCH_CHECK(
      T >= 1 && (x.dim() == 2 || x.size(0) == T),
      "bayes_linear: x must have all replicas or none, and these be one or more");
  STD_TORCH_CHECK(
      mu.size(0) <= kMostFeatures && mu.size(1) <= kMostFeatures,
      "bayes_linear: mu must have at most ", kMostFeatures, " rows and columns on CUDA");
  STD_TORCH_CHECK(like(rho, mu, {mu.size(0), mu.size(1)}), "bayes_linear: rho must be like mu");
  const ScalarType type = mu.scalar_type();
  return {
      contiguous_as(type, mu),
      contiguous_as(type, rho),
      bias_like(bias_mu, mu),
      bias_like(bias_rho, mu),
      seed,
      stream};
}

ScalarType operand_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::BFloat16 ? ScalarType::BFloat16 : ScalarType::Half;
}

Tensor bayes_linear_cuda(
    Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_mu, std::optional<Tensor> bias_rho,
    Tensor seed, int64_t stream, int64_t num_samples) {
  STD_TORCH_CHECK(
      bias_mu.has_value() == bias_rho.has_value(), "bayes_linear: a bias must have both halves");
  const DeviceGuard guard(x.get_device_index());
  const Posterior q = posterior_of(x, mu, rho, bias_mu, bias_rho, seed, stream, num_samples);
  if (x.size(-2) == 0 || q.O() == 0) return empty(x, {num_samples, x.size(-2), q.O()});
  const Tensor xs = replicas_of(x, mu);
  const auto forward = [&] {
    switch (way_of(x, mu)) {
      case Way::kDirect:
        return direct_forward(xs, q, num_samples);
      case Way::kSampled:
        return sampled_forward(xs, q, num_samples, chunk_of(mu, 4));
      case Way::kFused:
        return fused_forward(xs, q, num_samples, operand_type(x));
      default:
        return batched_forward(xs, q, num_samples, operand_type(x), chunk_of(mu, 2));
    }
  };
  return contiguous_as(x.scalar_type(), forward());
}

Gradients gradients_of(
    const Tensor& grad_y, const Tensor& x, const Tensor& xs, const Posterior& q, Needs needs) {
  switch (way_of(x, q.mu)) {
    case Way::kDirect:
      return direct_backward(grad_y, xs, q, needs);
    case Way::kSampled:
      return sampled_backward(grad_y, xs, q, needs, chunk_of(q.mu, 4));
    case Way::kFused:
      return fused_backward(grad_y, xs, q, needs, operand_type(x));
    default:
      return batched_backward(grad_y, xs, q, needs, operand_type(x), chunk_of(q.mu, 2));
  }
}

Gradients bayes_linear_backward_cuda(
    Tensor grad_y, Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_rho, Tensor seed,
    int64_t stream, int64_t num_samples, bool need_x, bool need_weight, bool need_bias) {
  check_on_device_of(x, {grad_y});
  STD_TORCH_CHECK(!need_bias || bias_rho, "bayes_linear: bias_rho is needed for its gradient");
  const DeviceGuard guard(x.get_device_index());
  const Posterior q = posterior_of(x, mu, rho, std::nullopt, bias_rho, seed, stream, num_samples);
  STD_TORCH_CHECK(
      grad_y.dim() == 3 && grad_y.size(0) == num_samples && grad_y.size(1) == x.size(-2) &&
          grad_y.size(2) == q.O(),
      "bayes_linear: grad_y must have shape (T, N, O)");
  auto [grad_x, grad_mu, grad_rho, grad_bias_mu, grad_bias_rho] = gradients_of(
      contiguous_as(mu.scalar_type(), grad_y), x, replicas_of(x, mu), q,
      {need_x, need_weight, need_bias});
  if (need_x && x.dim() == 2)
    grad_x = grad_x.size(0) == 1 ? matrix(grad_x, x.size(0), x.size(1))
                                 : torch::stable::sum(grad_x, std::vector<int64_t>{0});
  return {contiguous_as(x.scalar_type(), grad_x), grad_mu, grad_rho, grad_bias_mu, grad_bias_rho};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("bayes_linear", TORCH_BOX(&bayes_linear_cuda));
  m.impl("bayes_linear_backward", TORCH_BOX(&bayes_linear_backward_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CompositeExplicitAutograd, m) {
  m.impl("ask_bayes_linear_way", TORCH_BOX(&ask_bayes_linear_way));
  m.impl("bayes_linear_way", TORCH_BOX(&bayes_linear_way));
}

}  // namespace
}  // namespace bnuq
