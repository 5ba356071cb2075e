#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "linear_call.h"
#include "noise.h"
#include "posterior_kl_rows.h"

namespace bnuq {
namespace {

// What the divergence from a Gaussian prior adds to the gradients: `grad` times its own.
struct PriorGrad {
  double grad, prior_std;
};

// Which gradients are asked for.
struct Asked {
  bool x, weight, bias;
  std::optional<PriorGrad> prior;
};

struct Grads {
  std::optional<Tensor> x, mu, rho, bias_mu, bias_rho;
};

// Adds what other replicas give; by x only where they share it.
void add_grads(Grads& sum, const Grads& more, bool shared) {
  const auto add = [](std::optional<Tensor>& to, const std::optional<Tensor>& from) {
    if (to && from)
      add_into(*to, *from);
    else
      to = from;
  };
  add(sum.mu, more.mu), add(sum.rho, more.rho);
  add(sum.bias_mu, more.bias_mu), add(sum.bias_rho, more.bias_rho);
  if (shared) add(sum.x, more.x);
}

// A gradient by sigma becomes one by rho.
void sigma_backward(const Tensor& grad, const Tensor& rho) {
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
  const int64_t tiles = tiles_of(I), parts = ceil_div(tiles, kColumns);
  const int64_t R = call.shared ? std::min(T, kSums) : T;
  const Tensor sigma = sigma_of(call.rho);
  Tensor grad_x = torch::stable::new_zeros(call.mu, {R, N, I});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    const acc_t* g = grad_y.const_data_ptr<acc_t>();
    acc_t* gx = grad_x.mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, R * parts, 1 + 128 / (O + 1), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> w(kColumns * kEdge);
      for (int64_t j = begin; j < end; ++j) {
        const int64_t r = j / parts, tile = j % parts * kColumns;
        const int64_t stop = std::min(tiles, tile + kColumns), first = tile * kEdge;
        const int64_t width = std::min(I, stop * kEdge) - first;
        for (int64_t t = r; t < T; t += R) {
          const auto row = [&](int64_t o, auto z) {
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
    acc_t *gm = grads.mu->mutable_data_ptr<acc_t>(), *gs = grads.rho->mutable_data_ptr<acc_t>();
    torch::stable::parallel_for(0, tiles_of(O), 1, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> grad(I);
      for (int64_t band = begin; band < end; ++band)
        for (int64_t t = 0; t < T; ++t) {
          const auto row = [&](int64_t o, auto z) {
            std::fill(grad.begin(), grad.end(), acc_t(0));
            for (int64_t n = 0; n < N; ++n)
              add_scaled(grad.data(), g[(t * N + n) * O + o], px + t * call.x_stride() + n * I, I);
            add_noisy<false, false>(gm + o * I, gs + o * I, grad.data(), z, I);
          };
          for_band_rows(call.noise.sub, call.noise.first + t, band, O, 0, tiles_of(I), row);
        }
    });
  });
  sigma_backward(*grads.rho, call.rho);
}

void few_rows(const LinearCall& call, const Tensor& grad_y, const Asked& asked, Grads& grads) {
  if (asked.weight) few_rows_weight(call, grad_y, grads);
  if (!asked.x) return;
  const Tensor grad_x = few_rows_x(call, grad_y);
  const int64_t N = call.N, I = call.I;
  if (!call.shared)
    grads.x = grad_x;
  else if (grad_x.size(0) == 1)
    grads.x = view_of(grad_x, 0, {N, I}, {I, 1});
  else
    grads.x = torch::stable::sum(grad_x, std::vector<int64_t>{0});
}

// ---- many rows a replica: weights into memory for torch's matrix product ------------------------

// Gradients by mu and rho, the first of which hold that by the weights; and the weights, made again
// where the gradient by x needs them: the noise is drawn once for both.
void one_replica_weight(
    const LinearCall& call, const Asked& asked, const Grads& grads, const Tensor& weight) {
  const int64_t I = call.I;
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *r = call.rho.const_data_ptr<acc_t>();
    acc_t *w = weight.mutable_data_ptr<acc_t>(), *gm = grads.mu->mutable_data_ptr<acc_t>(),
          *gr = grads.rho->mutable_data_ptr<acc_t>();
    const auto [grad, prior_std] = asked.prior.value_or(PriorGrad{0, 1});
    const acc_t kl_grad = acc_t(grad), precision = gaussian_scale<acc_t>(prior_std).precision;
    const auto both =
        asked.x ? posterior_grads_row<true, acc_t> : posterior_grads_row<false, acc_t>;
    for_rows(call.noise, 0, call.O, I, [&](int64_t o, const float* z) {
      const int64_t at = o * I;
      acc_t* row = asked.x ? w + at : nullptr;
      if (asked.prior) return both(row, gm + at, gr + at, m + at, r + at, z, kl_grad, precision, I);
      posterior_grad_row(gr + at, gm + at, r + at, z, I);
      if (asked.x) posterior_row(row, m + at, r + at, z, I);
    });
  });
}

// One replica needs no sigma in memory.
void one_replica(const LinearCall& call, const Tensor& grad_y, const Asked& asked, Grads& grads) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Matrix grad(grad_y, 0, N, O);
  Tensor weight;
  if (asked.weight) {
    grads.mu = product(grad.t(), call.x_of(0)), grads.rho = call.empty({O, I});
    weight = call.empty({asked.x ? O : 0, I});
    one_replica_weight(call, asked, grads, weight);
  } else {
    weight = sample_posterior(call);
  }
  if (!asked.x) return;
  const Tensor grad_x = product(grad, Matrix(weight, 0, O, I));
  grads.x = call.shared ? grad_x : view_of(grad_x, 0, {1, N, I}, {N * I, I, 1});
}

// Adds replica t's gradient by its weights to those by mu and sigma; of the first one that by mu
// lies in place already, and that by sigma is set. If need_x, writes its weights to `weight`, which
// may be that gradient itself: a row is read before it is written.
void add_replica(
    const LinearCall& call, int64_t t, const Matrix& grad_weight, bool first, const Tensor& sigma,
    const Matrix& weight, bool need_x, const Grads& grads) {
  const int64_t I = call.I;
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t *m = call.mu.const_data_ptr<acc_t>(), *s = sigma.const_data_ptr<acc_t>();
    const acc_t* g = grad_weight.in.const_data_ptr<acc_t>() + grad_weight.offset;
    acc_t *w = weight.in.mutable_data_ptr<acc_t>() + weight.offset,
          *gm = grads.mu->mutable_data_ptr<acc_t>(), *gs = grads.rho->mutable_data_ptr<acc_t>();
    for_rows(call.noise, t, call.O, I, [&](int64_t o, auto z) {
      using Z = decltype(z);
      const auto set = need_x ? add_noisy<true, true, acc_t, Z> : add_noisy<true, false, acc_t, Z>;
      const auto add =
          need_x ? add_noisy<false, true, acc_t, Z> : add_noisy<false, false, acc_t, Z>;
      const int64_t at = o * I;
      const acc_t* row = need_x ? s + at : nullptr;  // there is no sigma for nothing
      (first ? set : add)(gm + at, gs + at, g + at, z, I, w + at, m + at, row);
    });
  });
}

// Gradients of the replicas [begin, end) by mu, by sigma in the place of rho's, and by x: a shared
// one in memory of its own.
void some_replicas(
    const LinearCall& call, int64_t begin, int64_t end, const Tensor& grad_y, const Asked& asked,
    const Tensor& sigma, Grads& grads) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Tensor weight = call.empty({O, I});
  if (asked.x && call.shared) grads.x = call.empty({N, I});
  if (asked.weight) grads.rho = call.empty({O, I});
  for (int64_t t = begin; t < end; ++t) {
    const Matrix grad(grad_y, t * N * O, N, O), w(weight, 0, O, I);
    const bool first = t == begin;
    if (asked.weight) {
      const std::optional<Tensor> none;  // the first one's memory is kept
      const Tensor by_weight = product(grad.t(), call.x_of(t), none, first ? none : weight);
      if (first) grads.mu = by_weight;
      add_replica(call, t, Matrix(by_weight, 0, O, I), first, sigma, w, asked.x, grads);
    } else {
      sample_weights(w, call, sigma, t);
    }
    if (!asked.x) continue;
    const Matrix out(*grads.x, t * call.x_stride(), N, I);
    call.shared && !first ? add_product(out, grad, w) : multiply(out, grad, w);
  }
}

// The same of small products, `group` replicas at a time, where no gradient by a shared x is asked
// for; those by mu and sigma start from 0.
void small_replicas(
    const LinearCall& call, int64_t begin, int64_t end, int64_t group, const Tensor& grad_y,
    const Asked& asked, const Tensor& sigma, Grads& grads) {
  const int64_t N = call.N, O = call.O, I = call.I;
  const Tensor weight = call.empty({group, O, I});
  if (asked.weight) {
    grads.mu = torch::stable::new_zeros(call.mu, {O, I});
    grads.rho = torch::stable::new_zeros(call.mu, {O, I});
  }
  for (int64_t t = begin; t < end; t += group) {
    const int64_t count = std::min(group, end - t);
    const Tensor weights = view_of(weight, 0, {count, O, I}, {O * I, I, 1});
    if (asked.weight) {
      const Tensor grad = view_of(grad_y, t * N * O, {count, O, N}, {N * O, 1, O});
      multiply_each(weights, grad, call.x_of(t, count));
    }
    for (int64_t k = 0; k < count; ++k) {
      const Matrix w(weight, k * O * I, O, I);
      if (asked.weight)
        add_replica(call, t + k, w, false, sigma, w, asked.x, grads);
      else
        sample_weights(w, call, sigma, t + k);
    }
    if (!asked.x) continue;
    const Tensor out = view_of(*grads.x, t * N * I, {count, N, I}, {N * I, I, 1});
    multiply_each(out, view_of(grad_y, t * N * O, {count, N, O}, {N * O, O, 1}), weights);
  }
}

void many_replicas(const LinearCall& call, const Tensor& grad_y, const Asked& asked, Grads& grads) {
  const Tensor sigma = asked.x ? sigma_of(call.rho) : call.empty({0});
  if (asked.x && !call.shared)
    grads.x = empty_rows(call.x, call.x.size(0), MemoryFormat::Contiguous);
  const bool sums_x = asked.x && call.shared;
  const int64_t group = sums_x ? 1 : replicas_a_call(call);
  const int64_t numbers = (group + 2) * call.O * call.I + (sums_x ? call.N * call.I : 0);
  std::vector<Grads> parts(parts_of(call, numbers), grads);
  for_parts(call.T, parts.size(), [&](int64_t part, int64_t begin, int64_t end) {
    if (group > 1)
      small_replicas(call, begin, end, group, grad_y, asked, sigma, parts[part]);
    else
      some_replicas(call, begin, end, grad_y, asked, sigma, parts[part]);
  });
  for (const Grads& part : parts) add_grads(grads, part, call.shared);
  if (asked.weight) sigma_backward(*grads.rho, call.rho);
}

// ---- the op -------------------------------------------------------------------------------------

// Gradients by bias_mu and bias_rho.
void bias_grads(
    const LinearCall& call, const Tensor& grad_y, const Tensor& bias_rho, const Noise& noise,
    Grads& grads) {
  const int64_t T = call.T, N = call.N, O = call.O;
  const Tensor rows = view_of(grad_y, 0, {T, N, O}, {N * O, O, 1});
  const Tensor by_replica = torch::stable::sum(rows, std::vector<int64_t>{1});
  const Tensor rho = contiguous_as(call.mu.scalar_type(), bias_rho);
  grads.bias_mu = call.empty({O}), grads.bias_rho = call.empty({O});
  dispatch_acc(call.mu, [&](auto zero) {
    using acc_t = decltype(zero);
    const acc_t* g = by_replica.const_data_ptr<acc_t>();
    acc_t *gm = grads.bias_mu->mutable_data_ptr<acc_t>(),
          *gr = grads.bias_rho->mutable_data_ptr<acc_t>();
    std::fill_n(gm, O, acc_t(0)), std::fill_n(gr, O, acc_t(0));
    std::vector<float> z(O);
    for (int64_t t = 0; t < T; ++t) {
      vector_normals(z.data(), noise.sub, noise.first + t, O);
      add_noisy<false, false>(gm, gr, g + t * O, z.data(), O);
    }
    sigmoid_row(gr, rho.const_data_ptr<acc_t>(), O);
  });
}

// Gradients from grad_y (T, N, O); the prior's are added only by one_replica.
Grads backward(
    const LinearCall& call, const Tensor& grad_y, const Asked& asked,
    const std::optional<Tensor>& bias_rho, const Noise& bias_noise) {
  const Tensor grad = contiguous_as(call.mu.scalar_type(), grad_y);
  Grads grads;
  if (asked.x || asked.weight) {
    const auto run = call.N <= kFewRows ? few_rows : call.T == 1 ? one_replica : many_replicas;
    run(call, grad, asked, grads);
  }
  if (asked.bias) bias_grads(call, grad, *bias_rho, bias_noise, grads);
  return grads;
}

// Adds what a group of replicas gives; its gradient by an x of its own goes where it belongs.
void add_group(
    Grads& sum, const Grads& more, const LinearArguments& given, const Replicas& replicas) {
  const bool shared = given.x.dim() == 2;
  add_grads(sum, more, shared);
  if (shared || !more.x) return;
  if (!sum.x) sum.x = empty_rows(given.x, given.T, MemoryFormat::Contiguous);
  Tensor into = replicas.of(*sum.x);
  torch::stable::copy_(into, *more.x);
}

// bias_mu for the prior alone.
Grads backward(
    const LinearArguments& given, const Tensor& grad_y, const Asked& asked,
    const std::optional<Tensor>& bias_mu, const std::optional<Tensor>& bias_rho) {
  const int64_t T = given.T, N = given.x.size(-2), O = given.mu.size(0);
  STD_TORCH_CHECK(grad_y.numel() == T * N * O, "bayes_linear: grad_y must have shape (T, N, O)");
  const Tensor grad = contiguous_as(grad_y.scalar_type(), grad_y);
  Asked own = asked;
  if (T > 1) own.prior.reset();  // it is one for all groups
  Grads grads;
  given.for_groups([&](const Replicas& some) {
    const LinearCall call(given, some);
    const Tensor part = view_of(grad, some.first * N * O, {some.count, N, O}, {N * O, O, 1});
    const Grads more = backward(call, part, own, bias_rho, given.noise(some, kTagBias));
    if (some.count == T)
      grads = more;
    else
      add_group(grads, more, given, some);
  });
  const auto& prior = asked.prior;
  if (!prior) return grads;
  const bool has_prior = T == 1 && N > kFewRows;  // see one_replica
  if (asked.weight && !has_prior)
    add_gaussian_grads(*grads.mu, *grads.rho, prior->grad, given.mu, given.rho, prior->prior_std);
  if (asked.bias)
    add_gaussian_grads(
        *grads.bias_mu, *grads.bias_rho, prior->grad, *bias_mu, *bias_rho, prior->prior_std);
  return grads;
}

using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// As an op returns them: each in its own memory, what was not asked for empty.
Five results_of(const LinearArguments& given, const Grads& grads) {
  const auto made = [&](const std::optional<Tensor>& grad) {
    return grad ? *grad : empty(given.mu, {0});
  };
  return {
      contiguous_as(given.x.scalar_type(), made(grads.x)), made(grads.mu), made(grads.rho),
      made(grads.bias_mu), made(grads.bias_rho)};
}

Five bayes_linear_backward_cpu(
    Tensor grad_y, Tensor x, Tensor mu, Tensor rho, std::optional<Tensor> bias_rho, Tensor seed,
    int64_t stream, int64_t num_samples, bool need_x, bool need_weight, bool need_bias) {
  const LinearArguments given = {x, mu, rho, seed, stream, num_samples};
  STD_TORCH_CHECK(bias_rho || !need_bias, "bayes_linear: bias_rho is needed for its gradient");
  check_bias(given, bias_rho);
  const Asked asked{need_x, need_weight, need_bias, {}};
  return results_of(given, backward(given, grad_y, asked, {}, bias_rho));
}

Five bayes_linear_kl_backward_cpu(
    Tensor grad_y, Tensor grad_kl, Tensor x, std::vector<Tensor> mu, std::vector<Tensor> rho,
    Tensor seed, int64_t stream, int64_t num_samples, double prior_std, bool need_x,
    bool need_weight, bool need_bias) {
  check_posterior(mu, rho);
  STD_TORCH_CHECK(
      grad_kl.numel() == 1 && (mu.size() > 1 || !need_bias),
      "bayes_linear_kl: grad_kl must be a scalar, and a bias be there if its gradients are needed");
  const LinearArguments given = {x, mu[0], rho[0], seed, stream, num_samples};
  const Asked asked{need_x, need_weight, need_bias, PriorGrad{value_of(grad_kl), prior_std}};
  std::optional<Tensor> bias_mu, bias_rho;
  if (mu.size() > 1) bias_mu = mu[1], bias_rho = rho[1];
  return results_of(given, backward(given, grad_y, asked, bias_mu, bias_rho));
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("bayes_linear_backward", TORCH_BOX(&bayes_linear_backward_cpu));
  m.impl("bayes_linear_kl_backward", TORCH_BOX(&bayes_linear_kl_backward_cpu));
}

}  // namespace
}  // namespace bnuq
