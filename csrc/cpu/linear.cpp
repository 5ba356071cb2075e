#include <torch/csrc/stable/library.h>

#include <numeric>
#include <tuple>

#include "linear_call.h"
#include "noise.h"
#include "pages.h"
#include "posterior_kl_rows.h"

namespace bnuq {
namespace {

// Biases (T, O) of T replicas, from the first that the noise is of.
Tensor sample_bias(const Tensor& mu, const Tensor& rho, const Noise& noise, int64_t num_samples) {
  const int64_t O = mu.numel();
  const Tensor means = contiguous_as(mu.scalar_type(), mu);
  const Tensor rhos = contiguous_as(mu.scalar_type(), rho);
  const Tensor bias = empty(mu, {num_samples, O});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    std::vector<float> z(O);
    for (int64_t t = 0; t < num_samples; ++t) {
      vector_normals(z.data(), noise.sub, noise.first + t, O);
      posterior_row(
          bias.mutable_data_ptr<acc_t>() + t * O, means.const_data_ptr<acc_t>(),
          rhos.const_data_ptr<acc_t>(), z.data(), O);
    }
  });
  return bias;
}

// ---- few rows a replica: a row of weights is used while it is in the first cache ----------------

Tensor few_rows(const LinearCall& call, const std::optional<Tensor>& bias) {
  const int64_t T = call.T, N = call.N, O = call.O, I = call.I, bands = tiles_of(O);
  const Tensor sigma = sigma_of(call.rho), y = call.empty({T, N, O});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    const acc_t *px = call.x.const_data_ptr<acc_t>(),
                *b = bias ? bias->const_data_ptr<acc_t>() : nullptr;
    acc_t* py = y.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, T * bands, 1 + 2048 / (I + 1), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> w(I);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t band = j / T, t = j % T;  // the means of a band stay in the second cache
        const auto row = [&](int64_t o, auto z) {
          sample_row(w.data(), m + o * I, s + o * I, z, I);
          for (int64_t n = 0; n < N; ++n)
            py[(t * N + n) * O + o] =
                dot(px + t * call.x_stride() + n * I, w.data(), I) + (b ? b[t * O + o] : 0);
        };
        for_band_rows(call.noise.sub, call.noise.first + t, band, O, 0, tiles_of(I), row);
      }
    });
  });
  return y;
}

// ---- many rows a replica: weights into memory for torch's matrix product ------------------------

// A matrix (O, I) that every replica overwrites, no two at once in a thread. Small ones stay in the
// second cache wherever they lie, large ones do not fit it.
Tensor scratch_matrix(const LinearCall& call) {
  const int64_t O = call.O, I = call.I, bytes = O * I * int64_t(call.mu.element_size());
  void* data = bytes >= kScratchBytes / 8 && bytes <= kScratchBytes ? thread_scratch() : nullptr;
  if (!data) return call.empty({O, I});
  return torch::stable::from_blob(data, {O, I}, {I, 1}, call.mu.device(), call.mu.scalar_type());
}

// The only replica's, (N, O), of its weights.
Tensor with_weight(
    const LinearCall& call, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::optional<Tensor> row;
  if (bias) row = view_of(*bias, 0, {call.O}, {1});
  return product(call.x_of(0), Matrix(weight, 0, call.O, call.I).t(), row);
}

// Outputs of the replicas [begin, end), `group` at a time.
void small_products(
    const LinearCall& call, const Tensor& sigma, const std::optional<Tensor>& bias, const Tensor& y,
    int64_t begin, int64_t end, int64_t group) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Tensor weight = call.empty({group, O, I});
  for (int64_t t = begin; t < end; t += group) {
    const int64_t count = std::min(group, end - t);
    for (int64_t k = 0; k < count; ++k)
      sample_weights(Matrix(weight, k * O * I, O, I), call, sigma, t + k);
    std::optional<Tensor> rows;
    if (bias) rows = view_of(*bias, t * O, {count, 1, O}, {O, O, 1});
    const Tensor out = view_of(y, t * N * O, {count, N, O}, {N * O, O, 1});
    multiply_each(out, call.x_of(t, count), view_of(weight, 0, {count, I, O}, {O * I, 1, I}), rows);
  }
}

Tensor many_rows(const LinearCall& call, const std::optional<Tensor>& bias) {
  const int64_t T = call.T, N = call.N, O = call.O, I = call.I;
  if (T == 1) {
    const Tensor only = with_weight(call, sample_posterior(call), bias);
    return view_of(only, 0, {1, N, O}, {N * O, O, 1});
  }
  const Tensor sigma = sigma_of(call.rho), y = call.empty({T, N, O});
  const int64_t group = replicas_a_call(call);
  for_parts(T, parts_of(call, group * O * I), [&](int64_t, int64_t begin, int64_t end) {
    if (group > 1) return small_products(call, sigma, bias, y, begin, end, group);
    std::optional<Tensor> row;
    const Tensor weight = scratch_matrix(call);
    for (int64_t t = begin; t < end; ++t) {
      sample_weights(Matrix(weight, 0, O, I), call, sigma, t);
      if (bias) row = view_of(*bias, t * O, {O}, {1});
      multiply(Matrix(y, t * N * O, N, O), call.x_of(t), Matrix(weight, 0, O, I).t(), row);
    }
  });
  return y;
}

// sample_posterior, and the weights' divergence.
std::tuple<Tensor, double> sample_with_kl(const LinearCall& call, double prior_std) {
  const int64_t O = call.O, I = call.I;
  const Tensor weight = call.empty({O, I});
  // Of pairs of rows, summed in the same order by any number of threads.
  std::vector<double> by_pair(8 * tiles_of(O));
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *r = call.rho.const_data_ptr<acc_t>();
    const GaussianScale<acc_t> prior = gaussian_scale<acc_t>(prior_std);
    acc_t* w = weight.mutable_data_ptr<acc_t>();
    for_rows(call.noise, 0, O, I, [&](int64_t o, const float* z) {
      for (int64_t i = 0, at = o * I; i < I; i += kSlice, at += kSlice)
        by_pair[o / kEdge * 8 + o % 8] += posterior_kl_row(
            w + at, m + at, r + at, z + i, prior.log_std, prior.precision, std::min(kSlice, I - i));
    });
  });
  return {weight, std::accumulate(by_pair.begin(), by_pair.end(), 0.0)};
}

// ---- the ops ------------------------------------------------------------------------------------

Tensor forward(const LinearCall& call, const std::optional<Tensor>& bias) {
  return call.N > kFewRows ? many_rows(call, bias) : few_rows(call, bias);
}

// (T, N, O) in the type of x.
Tensor forward(
    const LinearArguments& given, const std::optional<Tensor>& bias_mu,
    const std::optional<Tensor>& bias_rho) {
  const int64_t N = given.x.size(-2), O = given.mu.size(0);
  Tensor y;
  given.for_groups([&](const Replicas& some) {
    const LinearCall call(given, some);
    std::optional<Tensor> bias;
    if (bias_mu) bias = sample_bias(*bias_mu, *bias_rho, given.noise(some, kTagBias), some.count);
    const Tensor part = forward(call, bias);
    if (some.count == given.T) {
      y = contiguous_as(given.x.scalar_type(), part);
      return;
    }
    if (some.first == 0) y = empty(given.x, {given.T, N, O});
    Tensor into = view_of(y, some.first * N * O, {some.count, N, O}, {N * O, O, 1});
    torch::stable::copy_(into, part);
  });
  return y;
}

Tensor bayes_linear_cpu(
    Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_mu, std::optional<Tensor> bias_rho,
    Tensor seed, int64_t stream, int64_t num_samples) {
  const LinearArguments given = {x, mu, rho, seed, stream, num_samples};
  STD_TORCH_CHECK(
      bias_mu.has_value() == bias_rho.has_value(), "bayes_linear: a bias must have both halves");
  check_bias(given, bias_mu);
  check_bias(given, bias_rho);
  return forward(given, bias_mu, bias_rho);
}

std::tuple<Tensor, Tensor> bayes_linear_kl_cpu(
    Tensor x, std::vector<Tensor> mu, std::vector<Tensor> rho, Tensor seed, int64_t stream,
    int64_t num_samples, double prior_std) {
  check_posterior(mu, rho);
  const LinearArguments given = {x, mu[0], rho[0], seed, stream, num_samples};
  std::optional<Tensor> bias_mu, bias_rho, bias;
  if (mu.size() > 1) bias_mu = mu[1], bias_rho = rho[1];
  double kl = bias_mu ? gaussian_kl_of(*bias_mu, *bias_rho, prior_std) : 0;
  const int64_t N = x.size(-2), O = mu[0].size(0);
  if (num_samples > 1 || N <= kFewRows) {
    kl += gaussian_kl_of(mu[0], rho[0], prior_std);
    const Tensor y = forward(given, bias_mu, bias_rho);
    return {view_of(y, 0, {num_samples * N, O}, {O, 1}), scalar_like(mu[0], kl)};
  }
  const LinearCall call(given, {0, 1});
  if (bias_mu) bias = sample_bias(*bias_mu, *bias_rho, given.noise({0, 1}, kTagBias), 1);
  const auto [weight, weight_kl] = sample_with_kl(call, prior_std);
  const Tensor y = contiguous_as(x.scalar_type(), with_weight(call, weight, bias));
  return {y, scalar_like(call.mu, kl + weight_kl)};
}

Tensor linear_cpu(Tensor x_, Tensor weight_, std::optional<Tensor> bias) {
  const Tensor x = torch::stable::contiguous(x_), weight = torch::stable::contiguous(weight_);
  STD_TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
      "linear: x must have the features of weight");
  const Matrix w(weight, 0, weight.size(0), weight.size(1));
  if (bias) bias = torch::stable::contiguous(*bias);  // oneDNN is told no stride of it
  return product(Matrix(x, 0, x.size(0), x.size(1)), w.t(), bias);
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_cpu));
  m.impl("bayes_linear", TORCH_BOX(&bayes_linear_cpu));
  m.impl("bayes_linear_kl", TORCH_BOX(&bayes_linear_kl_cpu));
}

}  // namespace

Tensor sigma_of(const Tensor& rho) {
  const Tensor sigma = empty(rho, {rho.numel()});
  dispatch_acc(rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* r = rho.const_data_ptr<acc_t>();
    acc_t* s = sigma.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, rho.numel(), 16384, [&](int64_t begin, int64_t end) {
      softplus_row(s + begin, r + begin, end - begin);
    });
  });
  return sigma;
}

void sample_weights(
    const Matrix& weight, const LinearCall& call, const Tensor& sigma, int64_t replica) {
  const int64_t O = call.O, I = call.I;
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    acc_t* w = weight.in.mutable_data_ptr<acc_t>() + weight.offset;
    for_rows(call.noise, replica, O, I, [&](int64_t o, auto z) {
      sample_row(w + o * I, m + o * I, s + o * I, z, I);
    });
  });
}

Tensor sample_posterior(const LinearCall& call) {
  const int64_t O = call.O, I = call.I;
  const Tensor weight = call.empty({O, I});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *r = call.rho.const_data_ptr<acc_t>();
    acc_t* w = weight.mutable_data_ptr<acc_t>();
    for_rows(call.noise, 0, O, I, [&](int64_t o, const float* z) {
      posterior_row(w + o * I, m + o * I, r + o * I, z, I);
    });
  });
  return weight;
}

}  // namespace bnuq
