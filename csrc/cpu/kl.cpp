#include "../kl.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "../arithmetic.h"
#include "../dispatch.h"
#include "../seed.h"
#include "gaussian_kl.h"
#include "noise.h"
#include "weight_noise.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

template <typename F>
void dispatch_kl(const Tensor& mu, const Tensor& rho, const F& body) {
  check_alike(mu, rho);
  dispatch_acc(mu, body);
}

// The sum of part(begin, end) over slices of [0, n), added in the order of the slices.
template <typename Part>
double sum_slices(int64_t n, int64_t slice, const Part& part) {
  const int64_t slices = ceil_div(n, slice);
  std::vector<double> partial(slices);
  st::parallel_for(0, slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k)
      partial[k] = part(k * slice, std::min(n, (k + 1) * slice));
  });
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

template <bool kAdd>
void write_gaussian_grads(
    const Tensor& grad_mu, const Tensor& grad_rho, double grad, const Tensor& mu, const Tensor& rho,
    double prior_std) {
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = mu.const_data_ptr<acc_t>(), *r = rho.const_data_ptr<acc_t>();
    acc_t *gm = grad_mu.mutable_data_ptr<acc_t>(), *gr = grad_rho.mutable_data_ptr<acc_t>();
    const acc_t g = acc_t(grad), precision = gaussian_scale<acc_t>(prior_std).precision;
    const int64_t n = mu.numel(), slices = ceil_div(n, kSlice);
    // Which way a slice goes must not depend on the threads either.
    st::parallel_for(0, slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kSlice; i < std::min(n, end * kSlice); i += kSlice)
        gaussian_grads<kAdd>(gm + i, gr + i, m + i, r + i, g, precision, std::min(kSlice, n - i));
    });
  });
}

// ---- the Gaussian prior -------------------------------------------------------------------------

Tensor gaussian_kl_cpu(Tensor mu, Tensor rho, double prior_std) {
  return scalar_like(mu, gaussian_kl_of(mu, rho, prior_std));
}

Tensor gaussian_kl_sum_cpu(
    std::vector<Tensor> mu, std::vector<Tensor> rho, std::vector<double> prior_std) {
  double sum = 0;
  for (size_t k = 0; k < mu.size(); ++k) sum += gaussian_kl_of(mu[k], rho.at(k), prior_std.at(k));
  return scalar_like(mu.at(0), sum);
}

std::tuple<Tensor, Tensor> gaussian_kl_backward_cpu(
    Tensor grad, Tensor mu, Tensor rho, double prior_std) {
  const Tensor grad_mu = st::empty_like(mu), grad_rho = st::empty_like(rho);
  write_gaussian_grads<false>(grad_mu, grad_rho, value_of(grad), mu, rho, prior_std);
  return {grad_mu, grad_rho};
}

std::vector<Tensor> gaussian_kl_sum_backward_cpu(
    Tensor grad, std::vector<Tensor> mu, std::vector<Tensor> rho, std::vector<double> prior_std) {
  std::vector<Tensor> grads;
  for (size_t k = 0; k < mu.size(); ++k) {
    auto [grad_mu, grad_rho] = gaussian_kl_backward_cpu(grad, mu[k], rho.at(k), prior_std.at(k));
    grads.push_back(grad_mu);
    grads.push_back(grad_rho);
  }
  return grads;
}

// ---- the scale mixture: at the very weights of the forward --------------------------------------

template <typename acc_t>
BNUQ_CLONES double mixture_row(
    const acc_t* mu, const acc_t* rho, const float* z, const Mixture<acc_t>& p, int64_t n) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i)
    sum += mixture_kl_term(mu[i], posterior(rho[i]), acc_t(z[i]), p).value;
  return double(sum);
}

template <typename acc_t>
BNUQ_CLONES void mixture_grad_row(
    acc_t* __restrict__ grad_mu, acc_t* __restrict__ grad_rho, const acc_t* mu, const acc_t* rho,
    const float* z, const Mixture<acc_t>& p, acc_t grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const KlTerm<acc_t> term = mixture_kl_term(mu[i], posterior(rho[i]), acc_t(z[i]), p);
    const acc_t by_term = unless_pruned(rho[i], grad);
    grad_mu[i] += by_term * term.by_mu;
    grad_rho[i] += by_term * term.by_rho;
  }
}

// The noise of a matrix is that of weights, the noise of a vector that of a bias.
struct Places {
  bool matrix;
  int64_t O, I, tasks;
  Key sub;
  int64_t first;

  Places(const Tensor& mu, const Tensor& seed, int64_t stream) {
    const int64_t* s = seed_of(seed);
    matrix = mu.dim() == 2;
    O = matrix ? mu.size(0) : 1;
    I = mu.size(matrix ? 1 : 0);
    tasks = matrix ? tiles_of(O) : 1;
    sub = subkey(s[0], uint32_t(stream), matrix ? kTagWeight : kTagBias);
    first = s[1];
  }

  template <typename Row>
  void for_rows(int64_t task, uint64_t t, const Row& row) const {
    const uint64_t replica = uint64_t(first) + t;
    if (matrix) return for_band_rows(sub, replica, task, O, 0, tiles_of(I), row);
    std::vector<float> z(I);
    vector_normals(z.data(), sub, replica, I);
    row(0, z.data());
  }
};

Tensor mixture_kl_cpu(
    Tensor mu, Tensor rho, Tensor seed, int64_t stream, int64_t num_samples, double pi, double std1,
    double std2) {
  Tensor out;
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = mu.const_data_ptr<acc_t>(), *r = rho.const_data_ptr<acc_t>();
    const Mixture<acc_t> p = mixture_of<acc_t>(pi, std1, std2);
    const Places places(mu, seed, stream);
    STD_TORCH_CHECK(
        num_samples <= INT64_MAX / std::max<int64_t>(places.tasks, 1),
        "mixture_kl: num_samples must fit into 63 bits with the weights");
    const double sum = sum_slices(num_samples * places.tasks, 1, [&](int64_t j, int64_t) {
      double part = 0;
      places.for_rows(j % places.tasks, j / places.tasks, [&](int64_t o, const float* z) {
        const int64_t I = places.I;
        for (int64_t i = 0; i < I; i += kSlice)
          part += mixture_row(m + o * I + i, r + o * I + i, z + i, p, std::min(kSlice, I - i));
      });
      return part;
    });
    out = scalar_like(mu, sum / double(num_samples));
  });
  return out;
}

std::tuple<Tensor, Tensor> mixture_kl_backward_cpu(
    Tensor grad, Tensor mu, Tensor rho, Tensor seed, int64_t stream, int64_t num_samples, double pi,
    double std1, double std2) {
  Tensor grad_mu = st::new_zeros(mu, mu.sizes()), grad_rho = st::new_zeros(rho, rho.sizes());
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = mu.const_data_ptr<acc_t>(), *r = rho.const_data_ptr<acc_t>();
    const acc_t g = acc_t(value_of(grad)) / acc_t(num_samples);
    acc_t *gm = grad_mu.mutable_data_ptr<acc_t>(), *gr = grad_rho.mutable_data_ptr<acc_t>();
    const Mixture<acc_t> p = mixture_of<acc_t>(pi, std1, std2);
    const Places places(mu, seed, stream);
    st::parallel_for(0, places.tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        for (int64_t t = 0; t < num_samples; ++t)
          places.for_rows(task, t, [&](int64_t o, const float* z) {
            const int64_t at = o * places.I;
            mixture_grad_row(gm + at, gr + at, m + at, r + at, z, p, g, places.I);
          });
    });
  });
  return {grad_mu, grad_rho};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("gaussian_kl", TORCH_BOX(&gaussian_kl_cpu));
  m.impl("gaussian_kl_backward", TORCH_BOX(&gaussian_kl_backward_cpu));
  m.impl("gaussian_kl_sum", TORCH_BOX(&gaussian_kl_sum_cpu));
  m.impl("gaussian_kl_sum_backward", TORCH_BOX(&gaussian_kl_sum_backward_cpu));
  m.impl("mixture_kl", TORCH_BOX(&mixture_kl_cpu));
  m.impl("mixture_kl_backward", TORCH_BOX(&mixture_kl_backward_cpu));
}

}  // namespace

double gaussian_kl_of(const Tensor& mu, const Tensor& rho, double prior_std) {
  double sum = 0;
  dispatch_kl(mu, rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = mu.const_data_ptr<acc_t>(), *r = rho.const_data_ptr<acc_t>();
    const GaussianScale<acc_t> prior = gaussian_scale<acc_t>(prior_std);
    sum = sum_slices(mu.numel(), kSlice, [&](int64_t begin, int64_t end) {
      return gaussian_sum(m + begin, r + begin, prior.log_std, prior.precision, end - begin);
    });
  });
  return sum;
}

void add_gaussian_grads(
    const Tensor& grad_mu, const Tensor& grad_rho, double grad, const Tensor& mu, const Tensor& rho,
    double prior_std) {
  write_gaussian_grads<true>(grad_mu, grad_rho, grad, mu, rho, prior_std);
}

}  // namespace bnuq
