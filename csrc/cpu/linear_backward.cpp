#include <torch/csrc/stable/library.h>

#include <tuple>

#include "linear_call.h"
#include "noise.h"

namespace bnuq {
namespace {

// Of what the call needs; the others stay empty.
struct Grads {
  Tensor x, mu, rho;
};

// A gradient by sigma becomes one by rho.
void spread_backward(const Tensor& grad, const Tensor& rho) {
  dispatch_acc(rho, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* r = rho.const_data_ptr<acc_t>();
    acc_t* g = grad.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, rho.numel(), 16384, [&](int64_t begin, int64_t end) {
      sigmoid_row(g + begin, r + begin, end - begin);
    });
  });
}

// ---- few rows a replica: a row of weights is used while it is in the first cache ----------------

constexpr int64_t kColumns = 16;  // tiles of columns that one task of few_rows_x owns
constexpr int64_t kSums = 16;     // sums that the replicas of a shared x add to, by turns

// The gradient by the x (T, N, I) of every replica; by a shared x, (R, N, I) to be summed over R.
Tensor few_rows_x(const LinearCall& call, const Tensor& grad_y) {
  const int64_t T = call.T, N = call.N, O = call.O, I = call.I;
  const int64_t tiles = tiles_of(I), parts = (tiles + kColumns - 1) / kColumns;
  const int64_t R = call.shared ? std::min(T, kSums) : T;
  const Tensor sigma = spread_of(call.rho);
  Tensor grad_x = torch::stable::new_zeros(call.mu, {R, N, I});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    const acc_t* g = grad_y.const_data_ptr<acc_t>();
    acc_t* gx = grad_x.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, R * parts, 1 + 128 / (O + 1), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> w(kColumns * kTile);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t r = j / parts, tile = j % parts * kColumns;
        const int64_t stop = std::min(tiles, tile + kColumns), first = tile * kTile;
        const int64_t width = std::min(I, stop * kTile) - first;
        for (int64_t t = r; t < T; t += R) {
          const auto row = [&](int64_t o, const float* z) {
            sample_row(w.data(), m + o * I + first, s + o * I + first, z, width);
            for (int64_t n = 0; n < N; ++n)
              add_scaled(gx + (r * N + n) * I + first, g[(t * N + n) * O + o], w.data(), width);
          };
          for (int64_t band = 0; band < tiles_of(O); ++band)
            for_band_rows(call.noise.sub, call.noise.first + t, band, O, tile, stop, row);
        }
      }
    });
  });
  return grad_x;
}

void few_rows_weight(const LinearCall& call, const Tensor& grad_y, Grads& grads) {
  const int64_t T = call.T, N = call.N, O = call.O, I = call.I;
  grads.mu = torch::stable::new_zeros(call.mu, {O, I});
  grads.rho = torch::stable::new_zeros(call.mu, {O, I});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *px = call.x.const_data_ptr<acc_t>(), *g = grad_y.const_data_ptr<acc_t>();
    acc_t *gm = grads.mu.mutable_data_ptr<acc_t>(), *gs = grads.rho.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, tiles_of(O), 1, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> grad(I);
      for (int64_t band = begin; band < end; ++band)
        for (int64_t t = 0; t < T; ++t) {
          const auto row = [&](int64_t o, const float* z) {
            std::fill(grad.begin(), grad.end(), acc_t(0));
            for (int64_t n = 0; n < N; ++n)
              add_scaled(grad.data(), g[(t * N + n) * O + o], px + t * call.x_stride() + n * I, I);
            add_noisy(gm + o * I, gs + o * I, grad.data(), z, I);
          };
          for_band_rows(call.noise.sub, call.noise.first + t, band, O, 0, tiles_of(I), row);
        }
    });
  });
  spread_backward(grads.rho, call.rho);
}

void few_rows(
    const LinearCall& call, const Tensor& grad_y, bool need_x, bool need_weight, Grads& grads) {
  if (need_weight) few_rows_weight(call, grad_y, grads);
  if (!need_x) return;
  grads.x = few_rows_x(call, grad_y);
  if (!call.shared) return;
  const int64_t N = call.N, I = call.I;
  grads.x = grads.x.size(0) == 1 ? view_of(grads.x, 0, {N, I}, {I, 1})
                                 : torch::stable::sum(grads.x, std::vector<int64_t>{0});
}

// ---- many rows a replica: weights into memory for torch's matrix product ------------------------

// One replica needs no sigma in memory. Its weights are made again where the gradient by x needs
// them: the noise is drawn once for both.
void one_replica(
    const LinearCall& call, const Tensor& grad_y, bool need_x, bool need_weight, Grads& grads) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Matrix grad(grad_y, 0, N, O);
  Tensor weight;
  if (need_weight) {
    grads.mu = product(grad.t(), call.x_of(0)), grads.rho = call.empty({O, I});
    weight = need_x ? call.empty({O, I}) : call.empty({0});
    dispatch_acc(call.mu, [&](auto zero) {
      using acc_t = decltype(zero);
      const acc_t *m = call.mu.const_data_ptr<acc_t>(), *r = call.rho.const_data_ptr<acc_t>();
      const acc_t* g = grads.mu.const_data_ptr<acc_t>();
      acc_t *w = weight.mutable_data_ptr<acc_t>(), *gr = grads.rho.mutable_data_ptr<acc_t>();
      for_rows(call.noise, 0, O, I, [&](int64_t o, const float* z) {
        posterior_grad_row(gr + o * I, g + o * I, r + o * I, z, I);
        if (need_x) posterior_row(w + o * I, m + o * I, r + o * I, z, I);
      });
    });
  } else {
    weight = sample_posterior(call);
  }
  if (!need_x) return;
  const Tensor grad_x = product(grad, Matrix(weight, 0, O, I));
  grads.x = call.shared ? grad_x : view_of(grad_x, 0, {1, N, I}, {N * I, I, 1});
}

// Adds replica t's gradient by its weights to those by mu and sigma; of the first replica that by
// mu lies in place already, and that by sigma is set. Makes its weights again unless `weight` is
// empty.
void add_replica(
    const LinearCall& call, int64_t t, const Tensor& grad_weight, const Tensor& sigma,
    const Tensor& weight, const Grads& grads) {
  const int64_t I = call.I;
  const bool need_x = weight.numel() > 0;
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    const acc_t* g = grad_weight.const_data_ptr<acc_t>();
    acc_t *w = weight.mutable_data_ptr<acc_t>(), *gm = grads.mu.mutable_data_ptr<acc_t>(),
          *gs = grads.rho.mutable_data_ptr<acc_t>();
    for_rows(call.noise, t, call.O, I, [&](int64_t o, const float* z) {
      if (t > 0)
        add_noisy(gm + o * I, gs + o * I, g + o * I, z, I);
      else
        set_product(gs + o * I, g + o * I, z, I);
      if (need_x) sample_row(w + o * I, m + o * I, s + o * I, z, I);
    });
  });
}

void many_replicas(
    const LinearCall& call, const Tensor& grad_y, bool need_x, bool need_weight, Grads& grads) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Tensor none = call.empty({0}), sigma = need_x ? spread_of(call.rho) : none;
  const Tensor weight = need_x ? call.empty({O, I}) : none;
  if (need_x) grads.x = empty_rows(call.x, call.x.size(0), MemoryFormat::Contiguous);
  if (need_weight) grads.rho = call.empty({O, I});
  for (int64_t t = 0; t < call.T; ++t) {
    const Matrix grad(grad_y, t * N * O, N, O);
    if (need_weight) {
      const Tensor by_weight = product(grad.t(), call.x_of(t));
      if (t == 0) grads.mu = by_weight;
      add_replica(call, t, by_weight, sigma, weight, grads);
    } else {
      sample_weights(weight, call, sigma, t);
    }
    if (!need_x) continue;
    const Matrix out(grads.x, t * call.x_stride(), N, I), w(weight, 0, O, I);
    t > 0 && call.shared ? add_product(out, grad, w) : multiply(out, grad, w);
  }
  if (need_weight) spread_backward(grads.rho, call.rho);
}

// ---- the op -------------------------------------------------------------------------------------

// Gradients by bias_mu and bias_rho of grad_y (T, N, O).
std::tuple<Tensor, Tensor> bias_grads(
    const LinearCall& call, const Tensor& grad_y, const Tensor& bias_rho, const Noise& noise) {
  const int64_t T = call.T, O = call.O;
  const Tensor by_replica = torch::stable::sum(grad_y, std::vector<int64_t>{1});
  const Tensor rho = contiguous_as(call.mu.scalar_type(), bias_rho);
  const Tensor grad_mu = torch::stable::new_zeros(call.mu, {O});
  const Tensor grad_rho = torch::stable::new_zeros(call.mu, {O});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    std::vector<float> z(O);
    for (int64_t t = 0; t < T; ++t) {
      vector_normals(z.data(), noise.sub, noise.first + t, O);
      add_noisy(
          grad_mu.mutable_data_ptr<acc_t>(), grad_rho.mutable_data_ptr<acc_t>(),
          by_replica.const_data_ptr<acc_t>() + t * O, z.data(), O);
    }
    sigmoid_row(grad_rho.mutable_data_ptr<acc_t>(), rho.const_data_ptr<acc_t>(), O);
  });
  return {grad_mu, grad_rho};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bayes_linear_backward_cpu(
    Tensor grad_y, Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_rho, Tensor seed,
    int64_t stream, int64_t num_samples, bool need_x, bool need_weight, bool need_bias) {
  const LinearCall call(x, mu, rho, seed, stream, num_samples);
  const Tensor grad = contiguous_as(mu.scalar_type(), grad_y);
  STD_TORCH_CHECK(
      grad.numel() == call.T * call.N * call.O, "bayes_linear: grad_y must have shape (T, N, O)");
  // Each result its own memory: those of an op may not share any.
  Grads grads{empty_on(x, {0}, x.scalar_type()), call.empty({0}), call.empty({0})};
  if (need_x || need_weight) {
    if (call.N <= kFewRows)
      few_rows(call, grad, need_x, need_weight, grads);
    else if (call.T == 1)
      one_replica(call, grad, need_x, need_weight, grads);
    else
      many_replicas(call, grad, need_x, need_weight, grads);
  }
  Tensor bias_mu = call.empty({0}), by_bias_rho = call.empty({0});
  if (need_bias)
    std::tie(bias_mu, by_bias_rho) =
        bias_grads(call, grad, *bias_rho, noise_of(seed, stream, kTagBias));
  grads.x = contiguous_as(x.scalar_type(), grads.x);
  return {grads.x, grads.mu, grads.rho, bias_mu, by_bias_rho};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("bayes_linear_backward", TORCH_BOX(&bayes_linear_backward_cpu));
}

}  // namespace
}  // namespace bnuq
