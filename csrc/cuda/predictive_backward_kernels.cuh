// predictive_statistics, backward: d loss / d logits, with the softmax made again.
//
// Floor: bytes. Each logit is read and each gradient written once, 2 b bytes; what a class needs of
// the upstream gradients stays in registers. (Wide teams read it again for every replica.)
#pragma once
#include "predictive_team.cuh"

namespace bnuq {

template <typename scalar_t>
struct StatisticsGradArgs {
  using acc_t = acc_type<scalar_t>;
  const scalar_t* logits;              // (T, N, K, S)
  const acc_t* mean;                   // (N, K, S)
  const acc_t* grad_mean;              // (N, K, S) or null, like the next three
  const acc_t* grad_variance;          // (N, K, S)
  const acc_t* grad_entropy;           // (N, S)
  const acc_t* grad_expected_entropy;  // (N, S)
  scalar_t* grad_logits;               // (T, N, K, S)
  Classes d;
};

// What a class needs of the upstream gradients, the same for every replica.
template <typename acc_t>
struct Upstream {
  acc_t mean, log_mean, grad_mean, grad_variance;

  template <typename scalar_t>
  BNUQ_DEVICE static Upstream at(const StatisticsGradArgs<scalar_t>& args, int64_t i) {
    const acc_t mean = args.mean[i];
    return {
        mean, mean == acc_t(0) ? acc_t(0) : acc_t(log(mean)),
        args.grad_mean ? args.grad_mean[i] : acc_t(0),
        args.grad_variance ? args.grad_variance[i] : acc_t(0)};
  }
};

template <typename scalar_t, Group kGroup>
__global__ void __launch_bounds__(block_limit(kGroup), 1)
    statistics_grad_kernel(StatisticsGradArgs<scalar_t> args) {
  using acc_t = acc_type<scalar_t>;
  const Classes d = args.d;
  const Team<acc_t, kGroup> team;
  const Slots at(team, d);
  const bool inside = team.position < d.N * d.S;
  const acc_t grad_entropy =
      inside && args.grad_entropy ? args.grad_entropy[team.position] : acc_t(0);
  const acc_t grad_expected =
      inside && args.grad_expected_entropy ? args.grad_expected_entropy[team.position] : acc_t(0);
  Upstream<acc_t> up[kSlots<acc_t>] = {};
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r)
    if (r < at.count) up[r] = Upstream<acc_t>::at(args, at.first + r * at.stride);
  for (int64_t t = 0; t < d.T; ++t) {
    const int64_t replica = t * d.N * d.K * d.S;
    acc_t shifted[kSlots<acc_t>], e[kSlots<acc_t>], grad[kSlots<acc_t>], expected = 0;
    load_slots(shifted, args.logits + replica, at);
    const Softmax<acc_t> s = softmax(team, at, shifted, e);
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) {
      if (r >= at.count) break;
      e[r] *= s.inverse_sum;
      grad[r] = probability_grad(
          e[r], e[r] == acc_t(0) ? acc_t(0) : shifted[r] - s.log_sum, up[r].mean, up[r].log_mean,
          up[r].grad_mean, up[r].grad_variance, grad_entropy, grad_expected, acc_t(d.T));
      expected += e[r] * grad[r];
    }
    expected = team.second_sum(expected);
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) {
      if (r >= at.count) break;
      from_acc(
          logit_grad(e[r], grad[r], expected),
          args.grad_logits[replica + at.first + r * at.stride]);
    }
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kMaxGroup)
    wide_statistics_grad_kernel(StatisticsGradArgs<scalar_t> args) {
  using acc_t = acc_type<scalar_t>;
  const Classes d = args.d;
  const Team<acc_t, Group::kBlock> team;
  const int64_t first = team.position / d.S * d.K * d.S + team.position % d.S;
  const acc_t grad_entropy = args.grad_entropy ? args.grad_entropy[team.position] : acc_t(0);
  const acc_t grad_expected =
      args.grad_expected_entropy ? args.grad_expected_entropy[team.position] : acc_t(0);
  for (int64_t t = 0; t < d.T; ++t) {
    const scalar_t* from = args.logits + t * d.N * d.K * d.S + first;
    acc_t largest = -acc_t(INFINITY), total = 0, expected = 0;
    for (int64_t k = team.rank; k < d.K; k += team.size)
      largest = max_or_nan(to_acc(from[k * d.S]), largest);
    largest = team.max(largest);
    for (int64_t k = team.rank; k < d.K; k += team.size)
      total += exp_fast(to_acc(from[k * d.S]) - largest);
    total = team.sum(total);
    const acc_t inverse = acc_t(1) / total, log_sum = log(total);
    const auto gradient = [&](int64_t k, acc_t& p) {
      const acc_t shifted = to_acc(from[k * d.S]) - largest;
      const Upstream<acc_t> up = Upstream<acc_t>::at(args, first + k * d.S);
      p = exp_fast(shifted) * inverse;
      return probability_grad(
          p, p == acc_t(0) ? acc_t(0) : shifted - log_sum, up.mean, up.log_mean, up.grad_mean,
          up.grad_variance, grad_entropy, grad_expected, acc_t(d.T));
    };
    for (int64_t k = team.rank; k < d.K; k += team.size) {
      acc_t p;
      const acc_t grad = gradient(k, p);
      expected += p * grad;
    }
    expected = team.second_sum(expected);
    for (int64_t k = team.rank; k < d.K; k += team.size) {
      acc_t p;
      const acc_t grad = gradient(k, p);
      from_acc(logit_grad(p, grad, expected), args.grad_logits[from - args.logits + k * d.S]);
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------

// No size may be 0.
template <typename scalar_t>
void run_statistics_grad(const StatisticsGradArgs<scalar_t>& args, cudaStream_t stream) {
  const PredictivePlan p = plan_predictive(args.d, kSlots<acc_type<scalar_t>>);
  const auto kernel = p.wide                     ? wide_statistics_grad_kernel<scalar_t>
                      : p.group == Group::kLanes ? statistics_grad_kernel<scalar_t, Group::kLanes>
                      : p.group == Group::kColumns
                          ? statistics_grad_kernel<scalar_t, Group::kColumns>
                          : statistics_grad_kernel<scalar_t, Group::kBlock>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, 0, stream, args);
}

}  // namespace bnuq
