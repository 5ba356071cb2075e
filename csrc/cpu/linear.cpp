#include "../linear.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "noise.h"
#include "weight_noise.h"

namespace bnuq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace st = torch::stable;

// ---- rows: what the loops do with one row of weights --------------------------------------------

template <typename acc_t>
BNUQ_CLONES void sample_row(
    acc_t* __restrict__ w, const acc_t* mu, const acc_t* sigma, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = mu[i] + sigma[i] * acc_t(z[i]);
}

template <typename acc_t>
BNUQ_CLONES acc_t dot(const acc_t* a, const acc_t* b, int64_t n) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename acc_t>
BNUQ_CLONES void add_scaled(acc_t* __restrict__ y, acc_t a, const acc_t* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

template <typename acc_t>
BNUQ_CLONES void set_product(acc_t* __restrict__ y, const acc_t* x, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * acc_t(z[i]);
}

template <typename acc_t>
BNUQ_CLONES void add_noisy(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_sigma, const acc_t* grad, const float* z,
    int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    grad_mu[i] += grad[i];
    grad_sigma[i] += grad[i] * acc_t(z[i]);
  }
}

template <typename acc_t>
BNUQ_CLONES void softplus_row(acc_t* __restrict__ sigma, const acc_t* rho, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sigma[i] = softplus(rho[i]);
}

template <typename acc_t>
BNUQ_CLONES void posterior_row(
    acc_t* __restrict__ w, const acc_t* mu, const acc_t* rho, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) w[i] = mu[i] + softplus(rho[i]) * acc_t(z[i]);
}

template <typename acc_t>
BNUQ_CLONES void posterior_grad_row(
    acc_t* __restrict__ grad_rho, const acc_t* grad, const acc_t* rho, const float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad_rho[i] = grad[i] * acc_t(z[i]) * sigmoid(rho[i]);
}

template <typename acc_t>
BNUQ_CLONES void sigmoid_row(acc_t* __restrict__ grad, const acc_t* rho, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad[i] *= sigmoid(rho[i]);
}

// ---- arguments ---------------------------------------------------------------------------------

struct Noise {
  Key sub;
  uint64_t first;  // number of the first replica
};

Noise noise_of(const Tensor& seed, int64_t stream, int64_t first, uint32_t tag = kTagWeight) {
  STD_TORCH_CHECK(
      seed.numel() == 2 && seed.scalar_type() == ScalarType::Long && seed.is_contiguous(),
      "bayes_linear: seed must be int64, contiguous, and have 2 entries");
  const int64_t* s = seed.const_data_ptr<int64_t>();
  return {subkey(s[0], uint32_t(stream), tag), uint64_t(s[1] + first)};
}

template <typename F>
void dispatch_acc(const Tensor& t, const F& body) {
  if (t.scalar_type() == ScalarType::Double) return body(double());
  STD_TORCH_CHECK(
      t.scalar_type() == ScalarType::Float, "bayes_linear: dtype must be float32 or float64");
  body(float());
}

void check_like(const Tensor& t, const Tensor& like, int64_t numel) {
  STD_TORCH_CHECK(
      t.is_contiguous() && t.numel() == numel && t.scalar_type() == like.scalar_type(),
      "bayes_linear: a tensor must be contiguous and match in size and dtype");
}

int64_t tiles_of(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// row(o, z) for every row o of one replica's weights, in parallel.
template <typename Row>
void for_rows(const Noise& noise, int64_t O, int64_t I, const Row& row) {
  st::parallel_for(0, tiles_of(O), 1 + 2048 / (I + 1), [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band)
      for_band_rows(noise.sub, noise.first, band, O, 0, tiles_of(I), row);
  });
}

// sigma of rho: torch's own softplus takes ten times as long.
Tensor spread_cpu(Tensor rho) {
  check_like(rho, rho, rho.numel());
  Tensor sigma = st::empty_like(rho);
  dispatch_acc(rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* r = static_cast<const acc_t*>(rho.const_data_ptr());
    acc_t* s = static_cast<acc_t*>(sigma.mutable_data_ptr());
    st::parallel_for(0, rho.numel(), 16384, [&](int64_t begin, int64_t end) {
      softplus_row(s + begin, r + begin, end - begin);
    });
  });
  return sigma;
}

// A gradient by sigma becomes one by rho.
void spread_backward_cpu(Tensor grad, Tensor rho) {
  check_like(rho, rho, rho.numel());
  check_like(grad, rho, rho.numel());
  dispatch_acc(rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* r = static_cast<const acc_t*>(rho.const_data_ptr());
    acc_t* g = static_cast<acc_t*>(grad.mutable_data_ptr());
    st::parallel_for(0, rho.numel(), 16384, [&](int64_t begin, int64_t end) {
      sigmoid_row(g + begin, r + begin, end - begin);
    });
  });
}

// ---- many rows a replica: weights into memory for torch's matrix product ------------------------

void sample_weights_cpu(
    Tensor weight, Tensor mu, Tensor sigma, Tensor seed, int64_t stream, int64_t first) {
  const int64_t R = weight.size(0), O = mu.size(0), I = mu.size(1), bands = tiles_of(O);
  check_like(weight, mu, R * O * I);
  check_like(mu, mu, O * I);
  check_like(sigma, mu, O * I);
  const Noise noise = noise_of(seed, stream, first);
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* s = static_cast<const acc_t*>(sigma.const_data_ptr());
    acc_t* w = static_cast<acc_t*>(weight.mutable_data_ptr());
    st::parallel_for(0, R * bands, 1 + 2048 / (I + 1), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        acc_t* out = w + j / bands * O * I;
        const auto row = [&](int64_t o, const float* z) {
          sample_row(out + o * I, m + o * I, s + o * I, z, I);
        };
        for_band_rows(noise.sub, noise.first + j / bands, j % bands, O, 0, tiles_of(I), row);
      }
    });
  });
}

// Adds one replica's gradient by its weights to those by mu and sigma; of the first replica, whose
// grad_mu is empty, that by sigma is set. Makes its weights again where the gradient by x needs
// them (unless weight, and then sigma, is empty): the noise is drawn once for both.
void weight_backward_cpu(
    Tensor weight, Tensor grad_mu, Tensor grad_sigma, Tensor grad_weight, Tensor mu, Tensor sigma,
    Tensor seed, int64_t stream, int64_t first) {
  const int64_t O = mu.size(0), I = mu.size(1);
  const bool need_weight = weight.numel() > 0, need_mu = grad_mu.numel() > 0;
  if (need_weight) check_like(weight, mu, O * I), check_like(sigma, mu, O * I);
  if (need_mu) check_like(grad_mu, mu, O * I);
  for (const Tensor& t : {grad_sigma, grad_weight, mu}) check_like(t, mu, O * I);
  const Noise noise = noise_of(seed, stream, first);
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* s = static_cast<const acc_t*>(sigma.const_data_ptr());
    const acc_t* g = static_cast<const acc_t*>(grad_weight.const_data_ptr());
    acc_t* w = need_weight ? static_cast<acc_t*>(weight.mutable_data_ptr()) : nullptr;
    acc_t* gm = static_cast<acc_t*>(grad_mu.mutable_data_ptr());
    acc_t* gs = static_cast<acc_t*>(grad_sigma.mutable_data_ptr());
    for_rows(noise, O, I, [&](int64_t o, const float* z) {
      if (need_mu)
        add_noisy(gm + o * I, gs + o * I, g + o * I, z, I);
      else
        set_product(gs + o * I, g + o * I, z, I);
      if (w) sample_row(w + o * I, m + o * I, s + o * I, z, I);
    });
  });
}

// The weights of one replica, with no sigma in memory.
Tensor sample_posterior_cpu(Tensor mu, Tensor rho, Tensor seed, int64_t stream) {
  const int64_t O = mu.size(0), I = mu.size(1);
  for (const Tensor& t : {mu, rho}) check_like(t, mu, O * I);
  const Noise noise = noise_of(seed, stream, 0);
  Tensor weight = st::empty_like(mu);
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* r = static_cast<const acc_t*>(rho.const_data_ptr());
    acc_t* w = static_cast<acc_t*>(weight.mutable_data_ptr());
    for_rows(noise, O, I, [&](int64_t o, const float* z) {
      posterior_row(w + o * I, m + o * I, r + o * I, z, I);
    });
  });
  return weight;
}

// Those weights again, for the gradient by x (empty where that is not needed), and the gradient by
// rho.
std::tuple<Tensor, Tensor> sample_posterior_backward_cpu(
    Tensor grad_weight, Tensor mu, Tensor rho, Tensor seed, int64_t stream, bool need_weight) {
  const int64_t O = mu.size(0), I = mu.size(1);
  for (const Tensor& t : {grad_weight, mu, rho}) check_like(t, mu, O * I);
  const Noise noise = noise_of(seed, stream, 0);
  Tensor grad_rho = st::empty_like(mu);
  Tensor weight = need_weight ? st::empty_like(mu) : st::new_empty(mu, {0});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* r = static_cast<const acc_t*>(rho.const_data_ptr());
    const acc_t* g = static_cast<const acc_t*>(grad_weight.const_data_ptr());
    acc_t* w = static_cast<acc_t*>(weight.mutable_data_ptr());
    acc_t* gr = static_cast<acc_t*>(grad_rho.mutable_data_ptr());
    for_rows(noise, O, I, [&](int64_t o, const float* z) {
      posterior_grad_row(gr + o * I, g + o * I, r + o * I, z, I);
      if (need_weight) posterior_row(w + o * I, m + o * I, r + o * I, z, I);
    });
  });
  return {weight, grad_rho};
}

// The biases of T replicas.
Tensor sample_bias_cpu(Tensor mu, Tensor rho, Tensor seed, int64_t stream, int64_t num_samples) {
  const int64_t O = mu.numel();
  for (const Tensor& t : {mu, rho}) check_like(t, mu, O);
  const Noise noise = noise_of(seed, stream, 0, kTagBias);
  Tensor bias = st::new_empty(mu, {num_samples, O});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* r = static_cast<const acc_t*>(rho.const_data_ptr());
    acc_t* b = static_cast<acc_t*>(bias.mutable_data_ptr());
    std::vector<float> z(O);
    for (int64_t t = 0; t < num_samples; ++t) {
      vector_normals(z.data(), noise.sub, noise.first + t, O);
      posterior_row(b + t * O, m, r, z.data(), O);
    }
  });
  return bias;
}

// ---- few rows a replica: a row of weights is used while it is in the first cache ----------------

Tensor bayes_rows_cpu(
    Tensor x, Tensor mu, Tensor sigma, Tensor seed, int64_t stream, int64_t num_samples) {
  const int64_t T = num_samples, N = x.size(1), O = mu.size(0), I = mu.size(1);
  const int64_t x_stride = x.size(0) == 1 ? 0 : N * I, bands = tiles_of(O);
  check_like(x, mu, x.size(0) * N * I);
  check_like(mu, mu, O * I);
  check_like(sigma, mu, O * I);
  const Noise noise = noise_of(seed, stream, 0);
  Tensor y = st::new_empty(mu, {T, N, O});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* s = static_cast<const acc_t*>(sigma.const_data_ptr());
    const acc_t* px = static_cast<const acc_t*>(x.const_data_ptr());
    acc_t* py = static_cast<acc_t*>(y.mutable_data_ptr());
    st::parallel_for(0, T * bands, 1 + 2048 / (I + 1), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> w(I);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t band = j / T, t = j % T;  // the means of a band stay in the second cache
        const auto row = [&](int64_t o, const float* z) {
          sample_row(w.data(), m + o * I, s + o * I, z, I);
          for (int64_t n = 0; n < N; ++n)
            py[(t * N + n) * O + o] = dot(px + t * x_stride + n * I, w.data(), I);
        };
        for_band_rows(noise.sub, noise.first + t, band, O, 0, tiles_of(I), row);
      }
    });
  });
  return y;
}

constexpr int64_t kColumns = 16;  // tiles of columns that one task of bayes_rows_grad_x owns

Tensor bayes_rows_grad_x_cpu(Tensor grad_y, Tensor mu, Tensor sigma, Tensor seed, int64_t stream) {
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = mu.size(0), I = mu.size(1);
  const int64_t tiles = tiles_of(I), parts = (tiles + kColumns - 1) / kColumns;
  check_like(grad_y, mu, T * N * O);
  check_like(mu, mu, O * I);
  check_like(sigma, mu, O * I);
  const Noise noise = noise_of(seed, stream, 0);
  Tensor grad_x = st::new_zeros(mu, {T, N, I});
  dispatch_acc(mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* m = static_cast<const acc_t*>(mu.const_data_ptr());
    const acc_t* s = static_cast<const acc_t*>(sigma.const_data_ptr());
    const acc_t* g = static_cast<const acc_t*>(grad_y.const_data_ptr());
    acc_t* gx = static_cast<acc_t*>(grad_x.mutable_data_ptr());
    st::parallel_for(0, T * parts, 1 + 128 / (O + 1), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> w(kColumns * kTile);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t t = j / parts, tile = j % parts * kColumns;
        const int64_t stop = std::min(tiles, tile + kColumns), first = tile * kTile;
        const int64_t width = std::min(I, stop * kTile) - first;
        const auto row = [&](int64_t o, const float* z) {
          sample_row(w.data(), m + o * I + first, s + o * I + first, z, width);
          for (int64_t n = 0; n < N; ++n)
            add_scaled(gx + (t * N + n) * I + first, g[(t * N + n) * O + o], w.data(), width);
        };
        for (int64_t band = 0; band < tiles_of(O); ++band)
          for_band_rows(noise.sub, noise.first + t, band, O, tile, stop, row);
      }
    });
  });
  return grad_x;
}

std::tuple<Tensor, Tensor> bayes_rows_grad_weight_cpu(
    Tensor grad_y, Tensor x, Tensor seed, int64_t stream) {
  const int64_t T = grad_y.size(0), N = grad_y.size(1), O = grad_y.size(2), I = x.size(2);
  const int64_t x_stride = x.size(0) == 1 ? 0 : N * I;
  check_like(grad_y, x, T * N * O);
  check_like(x, x, x.size(0) * N * I);
  const Noise noise = noise_of(seed, stream, 0);
  Tensor grad_mu = st::new_zeros(x, {O, I}), grad_sigma = st::new_zeros(x, {O, I});
  dispatch_acc(x, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* px = static_cast<const acc_t*>(x.const_data_ptr());
    const acc_t* g = static_cast<const acc_t*>(grad_y.const_data_ptr());
    acc_t* gm = static_cast<acc_t*>(grad_mu.mutable_data_ptr());
    acc_t* gs = static_cast<acc_t*>(grad_sigma.mutable_data_ptr());
    st::parallel_for(0, tiles_of(O), 1, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> grad(I);
      for (int64_t band = begin; band < end; ++band)
        for (int64_t t = 0; t < T; ++t) {
          const auto row = [&](int64_t o, const float* z) {
            std::fill(grad.begin(), grad.end(), acc_t(0));
            for (int64_t n = 0; n < N; ++n)
              add_scaled(grad.data(), g[(t * N + n) * O + o], px + t * x_stride + n * I, I);
            add_noisy(gm + o * I, gs + o * I, grad.data(), z, I);
          };
          for_band_rows(noise.sub, noise.first + t, band, O, 0, tiles_of(I), row);
        }
    });
  });
  return {grad_mu, grad_sigma};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("spread", TORCH_BOX(&spread_cpu));
  m.impl("spread_backward_", TORCH_BOX(&spread_backward_cpu));
  m.impl("sample_weights_", TORCH_BOX(&sample_weights_cpu));
  m.impl("weight_backward_", TORCH_BOX(&weight_backward_cpu));
  m.impl("sample_posterior", TORCH_BOX(&sample_posterior_cpu));
  m.impl("sample_posterior_backward", TORCH_BOX(&sample_posterior_backward_cpu));
  m.impl("sample_bias", TORCH_BOX(&sample_bias_cpu));
  m.impl("bayes_rows", TORCH_BOX(&bayes_rows_cpu));
  m.impl("bayes_rows_grad_x", TORCH_BOX(&bayes_rows_grad_x_cpu));
  m.impl("bayes_rows_grad_weight", TORCH_BOX(&bayes_rows_grad_weight_cpu));
}

}  // namespace
}  // namespace bnuq
