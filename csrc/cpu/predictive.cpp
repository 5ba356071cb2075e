#include "../predictive_call.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>

#include "../arithmetic.h"
#include "../real.h"
#include "convert.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

// p = softmax(logits) and log p of one replica and position.
template <typename scalar_t, typename acc_t>
void softmax(acc_t* p, acc_t* log_p, const scalar_t* logits, int64_t K, int64_t stride) {
  acc_t largest = -INFINITY;
  double sum = 0;
  for (int64_t k = 0; k < K; ++k) {
    const acc_t v = load(logits[k * stride]);
    largest = v > largest || v != v ? v : largest;
  }
  for (int64_t k = 0; k < K; ++k) {
    log_p[k] = load(logits[k * stride]) - largest;
    sum += std::exp(log_p[k]);
  }
  const acc_t inverse = acc_t(1 / sum), log_sum = acc_t(std::log(sum));
  for (int64_t k = 0; k < K; ++k) {
    p[k] = std::exp(log_p[k]) * inverse;
    log_p[k] -= log_sum;
  }
}

// What a tile takes side by side: kLanes (n, s) positions, where value k of lane l is at
// k * kLanes + l, or kLanes classes of one position, with which many classes are not put in another
// order and -inf behind the last. Sums are taken one after another in every lane, so a result does
// not depend on its neighbours; those of kSummed rows of lanes are added in double, for a float that
// takes in 10^5 of them is off by 10^-4.
constexpr int64_t kLanes = 16, kSummed = 64, kManyClasses = 256;

struct Tile {
  int64_t first, lanes, K, S;
  bool one_position;

  static bool takes_one(Classes d) { return d.S == 1 && d.K >= kManyClasses; }

  static Tile of(Classes d, int64_t i) {
    if (takes_one(d)) return {i, 1, d.K, 1, true};
    return {i * kLanes, std::min(kLanes, d.N * d.S - i * kLanes), d.K, d.S, false};
  }

  static int64_t count(Classes d) { return takes_one(d) ? d.N : ceil_div(d.N * d.S, kLanes); }

  static int64_t rows(Classes d) { return takes_one(d) ? ceil_div(d.K, kLanes) : d.K; }

  // Where class 0 of a lane is in an (N, K, S) tensor.
  int64_t base(int64_t lane) const { return (first + lane) / S * K * S + (first + lane) % S; }
  bool in_one_row() const { return first % S + kLanes <= S; }
};

template <typename scalar_t, typename acc_t>
BNUQ_CLONES void load_tile(acc_t* tile, const scalar_t* from, Tile at) {
  if (at.one_position) {
    from += at.base(0);
    for (int64_t k = 0; k < at.K; ++k) tile[k] = load(from[k]);
    std::fill(tile + at.K, tile + ceil_div(at.K, kLanes) * kLanes, acc_t(-INFINITY));
    return;
  }
  if (at.in_one_row()) {
    from += at.base(0);
    for (int64_t k = 0; k < at.K; ++k)
      for (int64_t l = 0; l < kLanes; ++l) tile[k * kLanes + l] = load(from[k * at.S + l]);
    return;
  }
  for (int64_t l = 0; l < kLanes; ++l) {
    const scalar_t* lane = from + at.base(std::min(l, at.lanes - 1));
    for (int64_t k = 0; k < at.K; ++k) tile[k * kLanes + l] = load(lane[k * at.S]);
  }
}

// The processor does not foresee a few hundred numbers of the next replica.
template <typename scalar_t>
void prefetch(const scalar_t* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(scalar_t)) __builtin_prefetch(from + i);
}

template <typename acc_t>
void store_tile(acc_t* to, const acc_t* tile, Tile at) {
  if (at.one_position) {
    std::copy_n(tile, at.K, to + at.base(0));
    return;
  }
  for (int64_t l = 0; l < at.lanes; ++l)
    for (int64_t k = 0; k < at.K; ++k) to[at.base(l) + k * at.S] = tile[k * kLanes + l];
}

// The sum of all lanes, in each of them.
inline void add_lanes(double* lanes) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t l = 0; l < kLanes; ++l) sum += lanes[l];
  std::fill_n(lanes, kLanes, sum);
}

template <typename acc_t>
inline void largest_of_lanes(acc_t* lanes) {
  acc_t largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (int64_t l = 0; l < kLanes; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
  std::fill_n(lanes, kLanes, largest);
}

// Takes one replica's logits, which become probabilities, into the running statistics.
template <typename acc_t>
BNUQ_CLONES void add_replica(
    acc_t* __restrict__ p, acc_t* __restrict__ mean, acc_t* __restrict__ m2,
    acc_t* __restrict__ expected_entropy, int64_t rows, bool one_position, acc_t weight) {
  acc_t largest[kLanes], inverse[kLanes];
  double sum[kLanes] = {}, dot[kLanes] = {};
  for (int64_t l = 0; l < kLanes; ++l) largest[l] = -INFINITY;
  for (int64_t k = 0; k < rows; ++k)
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) {
      const acc_t v = p[k * kLanes + l];
      largest[l] = v > largest[l] ? v : largest[l];
    }
  if (one_position) largest_of_lanes(largest);
  for (int64_t first = 0; first < rows; first += kSummed) {
    acc_t some[kLanes] = {}, some_dot[kLanes] = {};
    for (int64_t k = first; k < std::min(first + kSummed, rows); ++k)
#pragma omp simd
      for (int64_t l = 0; l < kLanes; ++l) {
        const acc_t x = p[k * kLanes + l] - largest[l], e = exp_nonpositive(x);
        p[k * kLanes + l] = e;
        some[l] += e;
        some_dot[l] += e * (x < acc_t(-1000) ? acc_t(0) : x);
      }
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) {
      sum[l] += some[l];
      dot[l] += some_dot[l];
    }
  }
  if (one_position) {
    add_lanes(sum);
    add_lanes(dot);
  }
#pragma omp simd
  for (int64_t l = 0; l < kLanes; ++l) {
    // H[p] = log sum_k e_k - sum_k e_k x_k / sum_k e_k
    inverse[l] = acc_t(1) / acc_t(sum[l]);
    const acc_t entropy = log_positive(acc_t(sum[l])) - acc_t(dot[l]) * inverse[l];
    expected_entropy[l] += (entropy - expected_entropy[l]) * weight;
  }
  for (int64_t k = 0; k < rows; ++k)
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) p[k * kLanes + l] *= inverse[l];
#pragma omp simd
  for (int64_t i = 0; i < rows * kLanes; ++i) welford(p[i], weight, mean[i], m2[i]);
}

// With kFresh what the statistics hold is not read: they start from zero.
template <bool kFresh, typename scalar_t, typename acc_t>
void accumulate(
    acc_t* mean, acc_t* m2, acc_t* expected_entropy, const scalar_t* logits, Classes d,
    int64_t count) {
  const int64_t replica_size = d.N * d.K * d.S, rows = Tile::rows(d);
  const int64_t grain = 1 + 4096 / (rows * kLanes * d.T + 1);
  st::parallel_for(0, Tile::count(d), grain, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> p(rows * kLanes), tile_mean(rows * kLanes), tile_m2(rows * kLanes);
    for (int64_t i = begin; i < end; ++i) {
      const Tile at = Tile::of(d, i);
      acc_t entropy[kLanes] = {};
      if (kFresh) {
        std::fill(tile_mean.begin(), tile_mean.end(), acc_t(0));
        std::fill(tile_m2.begin(), tile_m2.end(), acc_t(0));
      } else {
        load_tile<acc_t, acc_t>(tile_mean.data(), mean, at);
        load_tile<acc_t, acc_t>(tile_m2.data(), m2, at);
        std::copy_n(expected_entropy + at.first, at.lanes, entropy);
      }
      for (int64_t t = 0; t < d.T; ++t) {
        const scalar_t* replica = logits + t * replica_size;
        load_tile<scalar_t, acc_t>(p.data(), replica, at);
        if (at.one_position) prefetch(replica + replica_size + at.base(0), d.K);
        const acc_t weight = acc_t(1) / acc_t(count + t + 1);
        add_replica<acc_t>(
            p.data(), tile_mean.data(), tile_m2.data(), entropy, rows, at.one_position, weight);
      }
      store_tile(mean, tile_mean.data(), at);
      store_tile(m2, tile_m2.data(), at);
      std::copy_n(entropy, at.lanes, expected_entropy + at.first);
    }
  });
}

// The terms of the mean's entropy; m2 becomes the variance.
template <typename acc_t>
BNUQ_CLONES void finish_row(acc_t* terms, acc_t* m2, const acc_t* mean, int64_t count, acc_t T) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    terms[i] = entropy_term(mean[i], log_positive(mean[i]));
    m2[i] /= T;
  }
}

template <typename acc_t>
void finish(acc_t* variance, acc_t* entropy, const acc_t* mean, Classes d) {
  st::parallel_for(0, d.N, 1 + 16384 / (d.K * d.S), [&](int64_t begin, int64_t end) {
    std::vector<acc_t> terms(d.K * d.S);
    std::vector<double> sum(d.S);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = n * d.K * d.S;
      finish_row<acc_t>(terms.data(), variance + first, mean + first, d.K * d.S, acc_t(d.T));
      if (d.S == 1) {
        entropy[n] = acc_t(std::accumulate(terms.begin(), terms.end(), 0.0));
        continue;
      }
      std::fill(sum.begin(), sum.end(), 0.0);
      for (const acc_t* term = terms.data(); term < terms.data() + terms.size(); term += d.S)
        for (int64_t s = 0; s < d.S; ++s) sum[s] += term[s];
      std::copy(sum.begin(), sum.end(), entropy + n * d.S);
    }
  });
}

template <bool kFresh>
void accumulate_into(
    const Tensor& mean, const Tensor& m2, const Tensor& expected_entropy, const Tensor& logits_,
    int64_t count) {
  const Classes d = classes_of(logits_);
  check_state(mean, m2, expected_entropy, logits_);
  if (logits_.numel() == 0) return;
  const Tensor logits = st::contiguous(logits_);
  dispatch<Half, BFloat16>(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    accumulate<kFresh, scalar_t, acc_t>(
        mean.mutable_data_ptr<acc_t>(), m2.mutable_data_ptr<acc_t>(),
        expected_entropy.mutable_data_ptr<acc_t>(), pointer<scalar_t>(logits), d, count);
  });
}

void predictive_accumulate_cpu(
    Tensor mean, Tensor m2, Tensor expected_entropy, Tensor logits, int64_t count) {
  accumulate_into<false>(mean, m2, expected_entropy, logits, count);
}

FreshResults predictive_statistics_cpu(Tensor logits) {
  const FreshResults made = fresh_results(logits);
  if (logits.numel() == 0) return made;
  const Tensor &mean = std::get<0>(made), &variance = std::get<1>(made);
  const Tensor &entropy = std::get<2>(made), &expected_entropy = std::get<3>(made);
  accumulate_into<true>(mean, variance, expected_entropy, logits, 0);
  dispatch_acc(mean, [&](auto zero) {
    using acc_t = decltype(zero);
    finish<acc_t>(
        variance.mutable_data_ptr<acc_t>(), entropy.mutable_data_ptr<acc_t>(), pointer<acc_t>(mean),
        classes_of(logits));
  });
  return made;
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
        double expected = 0;
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
          grad_logits[offset + k * d.S] =
              store<scalar_t>(logit_grad(p[k], grad[k], acc_t(expected)));
      }
    }
  });
}

Tensor predictive_statistics_backward_cpu(
    Tensor logits_, Tensor mean_, std::optional<Tensor> grad_mean,
    std::optional<Tensor> grad_variance, std::optional<Tensor> grad_entropy,
    std::optional<Tensor> grad_expected_entropy) {
  const Classes d = classes_of(logits_);
  const Tensor logits = st::contiguous(logits_);
  const std::optional<Tensor> mean = results_like(logits, {mean_, {}, {}, {}}).mean;
  const Results grads =
      results_like(logits, {grad_mean, grad_variance, grad_entropy, grad_expected_entropy});
  const Tensor grad_logits =
      st::new_empty(logits, std::vector<int64_t>(logits.sizes().begin(), logits.sizes().end()));
  if (logits.numel() == 0) return grad_logits;
  dispatch<Half, BFloat16>(logits.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const Upstream<acc_t> up = {
        pointer<acc_t>(grads.mean), pointer<acc_t>(grads.variance), pointer<acc_t>(grads.entropy),
        pointer<acc_t>(grads.expected_entropy)};
    backward<scalar_t, acc_t>(
        static_cast<scalar_t*>(grad_logits.mutable_data_ptr()), pointer<scalar_t>(logits),
        pointer<acc_t>(mean), up, d);
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
