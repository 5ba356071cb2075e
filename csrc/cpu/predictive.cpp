#include "../predictive.h"

#include <torch/csrc/stable/library.h>

#include "affine_table.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

// N rows, K classes, S positions; one (n, s) at a time.
struct Classes {
  int64_t T, N, K, S;
};

Classes classes_of(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() >= 3, "predictive: logits must have at least 3 dimensions");
  int64_t positions = 1;
  for (int64_t d = 3; d < logits.dim(); ++d) positions *= logits.size(d);
  return {logits.size(0), logits.size(1), logits.size(2), positions};
}

// p = softmax(logits) and log p of one replica and position; p's entropy.
template <typename scalar_t, typename acc_t>
acc_t softmax(acc_t* p, acc_t* log_p, const scalar_t* logits, int64_t K, int64_t stride) {
  acc_t largest = -INFINITY, sum = 0, entropy = 0;
  for (int64_t k = 0; k < K; ++k) {
    const acc_t v = load(logits[k * stride]);
    largest = v > largest || v != v ? v : largest;
  }
  for (int64_t k = 0; k < K; ++k) {
    log_p[k] = load(logits[k * stride]) - largest;
    sum += std::exp(log_p[k]);
  }
  const acc_t log_sum = std::log(sum);
  for (int64_t k = 0; k < K; ++k) {
    p[k] = std::exp(log_p[k]) / sum;
    log_p[k] -= log_sum;
    entropy += entropy_term(p[k], log_p[k]);
  }
  return entropy;
}

template <typename scalar_t, typename acc_t>
void accumulate(
    acc_t* mean, acc_t* m2, acc_t* expected_entropy, const scalar_t* logits, Classes d,
    int64_t count) {
  st::parallel_for(0, d.N * d.S, 1 + 1024 / (d.K * d.T + 1), [&](int64_t begin, int64_t end) {
    std::vector<acc_t> p(d.K), log_p(d.K);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / d.S * d.K * d.S + i % d.S;
      for (int64_t t = 0; t < d.T; ++t) {
        const scalar_t* row = logits + t * d.N * d.K * d.S + first;
        expected_entropy[i] += softmax<scalar_t, acc_t>(p.data(), log_p.data(), row, d.K, d.S);
        const acc_t weight = acc_t(1) / acc_t(count + t + 1);
        for (int64_t k = 0; k < d.K; ++k)
          welford(p[k], weight, mean[first + k * d.S], m2[first + k * d.S]);
      }
    }
  });
}

template <typename acc_t>
void finish(
    acc_t* variance, acc_t* entropy, acc_t* expected_entropy, const acc_t* mean, Classes d) {
  for (int64_t i = 0; i < d.N * d.S; ++i) {
    const int64_t first = i / d.S * d.K * d.S + i % d.S;
    acc_t sum = 0;
    for (int64_t k = 0; k < d.K; ++k) {
      const acc_t p = mean[first + k * d.S];
      sum += entropy_term(p, acc_t(std::log(p)));
      variance[first + k * d.S] /= acc_t(d.T);
    }
    entropy[i] = sum;
    expected_entropy[i] /= acc_t(d.T);
  }
}

void accumulate_into(
    const Tensor& mean, const Tensor& m2, const Tensor& expected_entropy, const Tensor& logits_,
    int64_t count) {
  const Classes d = classes_of(logits_);
  const ScalarType acc = acc_of(logits_.scalar_type());
  for (const Tensor* t : {&mean, &m2, &expected_entropy})
    STD_TORCH_CHECK(
        t->is_contiguous() && t->scalar_type() == acc &&
            t->numel() == d.N * d.S * (t == &expected_entropy ? 1 : d.K),
        "predictive_accumulate_: the state must be contiguous and fit the logits");
  if (logits_.numel() == 0) return;
  const Tensor logits = st::contiguous(logits_);
  dispatch(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = typename AccType<scalar_t>::type;
    accumulate<scalar_t, acc_t>(
        static_cast<acc_t*>(mean.mutable_data_ptr()), static_cast<acc_t*>(m2.mutable_data_ptr()),
        static_cast<acc_t*>(expected_entropy.mutable_data_ptr()),
        static_cast<const scalar_t*>(logits.const_data_ptr()), d, count);
  });
}

void predictive_accumulate_cpu(
    Tensor mean, Tensor m2, Tensor expected_entropy, Tensor logits, int64_t count) {
  accumulate_into(mean, m2, expected_entropy, logits, count);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> predictive_statistics_cpu(Tensor logits) {
  const Classes d = classes_of(logits);
  STD_TORCH_CHECK(d.T >= 1, "predictive_statistics: logits must have at least one replica");
  const ScalarType acc = acc_of(logits.scalar_type());
  std::vector<int64_t> shape(logits.sizes().begin() + 1, logits.sizes().end());
  const Tensor mean = st::new_zeros(logits, shape, acc),
               variance = st::new_zeros(logits, shape, acc);
  shape.erase(shape.begin() + 1);
  const Tensor entropy = st::new_zeros(logits, shape, acc);
  const Tensor expected_entropy = st::new_zeros(logits, shape, acc);
  accumulate_into(mean, variance, expected_entropy, logits, 0);
  dispatch(acc, [&](auto zero) {
    using acc_t = typename AccType<decltype(zero)>::type;
    finish<acc_t>(
        static_cast<acc_t*>(variance.mutable_data_ptr()),
        static_cast<acc_t*>(entropy.mutable_data_ptr()),
        static_cast<acc_t*>(expected_entropy.mutable_data_ptr()),
        static_cast<const acc_t*>(mean.const_data_ptr()), d);
  });
  return {mean, variance, entropy, expected_entropy};
}

// The upstream gradients of one call; a null one is zero.
template <typename acc_t>
struct Upstream {
  const acc_t* mean;
  const acc_t* variance;
  const acc_t* entropy;
  const acc_t* expected_entropy;
};

template <typename scalar_t, typename acc_t>
void backward(
    scalar_t* grad_logits, const scalar_t* logits, const acc_t* mean, Upstream<acc_t> up,
    Classes d) {
  st::parallel_for(0, d.N * d.S, 1 + 1024 / (d.K * d.T + 1), [&](int64_t begin, int64_t end) {
    std::vector<acc_t> p(d.K), log_p(d.K), grad(d.K);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / d.S * d.K * d.S + i % d.S;
      const acc_t grad_entropy = up.entropy ? up.entropy[i] : acc_t(0);
      const acc_t grad_expected = up.expected_entropy ? up.expected_entropy[i] : acc_t(0);
      for (int64_t t = 0; t < d.T; ++t) {
        const int64_t offset = t * d.N * d.K * d.S + first;
        softmax<scalar_t, acc_t>(p.data(), log_p.data(), logits + offset, d.K, d.S);
        acc_t expected = 0;
        for (int64_t k = 0; k < d.K; ++k) {
          const int64_t at = first + k * d.S;
          const acc_t m = mean[at];
          grad[k] = probability_grad(
              p[k], p[k] == 0 ? acc_t(0) : log_p[k], m, m == 0 ? acc_t(0) : acc_t(std::log(m)),
              up.mean ? up.mean[at] : acc_t(0), up.variance ? up.variance[at] : acc_t(0),
              grad_entropy, grad_expected, acc_t(d.T));
          expected += p[k] * grad[k];
        }
        for (int64_t k = 0; k < d.K; ++k)
          grad_logits[offset + k * d.S] = store<scalar_t>(logit_grad(p[k], grad[k], expected));
      }
    }
  });
}

Tensor predictive_statistics_backward_cpu(
    Tensor logits_, Tensor mean_, std::optional<Tensor> grad_mean,
    std::optional<Tensor> grad_variance, std::optional<Tensor> grad_entropy,
    std::optional<Tensor> grad_expected_entropy) {
  const Classes d = classes_of(logits_);
  const ScalarType acc = acc_of(logits_.scalar_type());
  const Tensor logits = st::contiguous(logits_), mean = st::contiguous(mean_);
  const auto prepare = [&](std::optional<Tensor>& t, int64_t numel) {
    if (!t) return;
    STD_TORCH_CHECK(
        t->numel() == numel && t->scalar_type() == acc,
        "predictive_statistics_backward: a gradient must be like its result");
    t = st::contiguous(*t);
  };
  std::optional<Tensor> mean_checked = mean;
  prepare(mean_checked, d.N * d.K * d.S);
  prepare(grad_mean, d.N * d.K * d.S);
  prepare(grad_variance, d.N * d.K * d.S);
  prepare(grad_entropy, d.N * d.S);
  prepare(grad_expected_entropy, d.N * d.S);
  const Tensor grad_logits =
      st::new_empty(logits, std::vector<int64_t>(logits.sizes().begin(), logits.sizes().end()));
  if (logits.numel() == 0) return grad_logits;
  dispatch(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = typename AccType<scalar_t>::type;
    const Upstream<acc_t> up = {
        pointer<acc_t>(grad_mean), pointer<acc_t>(grad_variance), pointer<acc_t>(grad_entropy),
        pointer<acc_t>(grad_expected_entropy)};
    backward<scalar_t, acc_t>(
        static_cast<scalar_t*>(grad_logits.mutable_data_ptr()),
        static_cast<const scalar_t*>(logits.const_data_ptr()),
        static_cast<const acc_t*>(mean.const_data_ptr()), up, d);
  });
  return grad_logits;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("predictive_statistics", TORCH_BOX(&predictive_statistics_cpu));
  m.impl("predictive_statistics_backward", TORCH_BOX(&predictive_statistics_backward_cpu));
  m.impl("predictive_accumulate_", TORCH_BOX(&predictive_accumulate_cpu));
}

}  // namespace
}  // namespace bnuq
