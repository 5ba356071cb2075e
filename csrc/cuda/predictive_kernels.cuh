// predictive_statistics and predictive_accumulate_ over logits (T, N, K, S), by teams of threads.
//
// Floor: bytes. Each logit is read once, b bytes, with about 25 operations of which one is an
// exponential; the state (mean, m2) is read and written once a call, so T dilutes it.
#pragma once
#include "predictive_team.cuh"

namespace bnuq {

template <typename scalar_t>
struct StatisticsArgs {
  using acc_t = acc_type<scalar_t>;
  const scalar_t* logits;   // (T, N, K, S)
  acc_t* mean;              // (N, K, S)
  acc_t* m2;                // (N, K, S); the variance at the end
  acc_t* expected_entropy;  // (N, S); the mean over the replicas so far
  acc_t* entropy;           // (N, S), or null: then more replicas will follow
  int64_t count;            // replicas in the state; 0: the state is not read
  Classes d;
};

template <typename scalar_t, Group kGroup>
__global__ void __launch_bounds__(block_limit(kGroup), 1)
    statistics_kernel(StatisticsArgs<scalar_t> args) {
  using acc_t = acc_type<scalar_t>;
  const Classes d = args.d;
  const Team<acc_t, kGroup> team;
  const Slots at(team, d);
  const bool leads = team.rank == 0 && team.position < d.N * d.S;
  acc_t mean[kSlots<acc_t>] = {}, m2[kSlots<acc_t>] = {}, expected_entropy = 0;
  if (args.count > 0) {
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r)
      if (r < at.count) {
        mean[r] = args.mean[at.first + r * at.stride];
        m2[r] = args.m2[at.first + r * at.stride];
      }
    if (leads) expected_entropy = args.expected_entropy[team.position];
  }

  const scalar_t* from = args.logits;
  acc_t next[kSlots<acc_t>];
  load_slots(next, from, at);
  for (int64_t t = 0; t < d.T; ++t) {
    acc_t shifted[kSlots<acc_t>], e[kSlots<acc_t>], weighted = 0;
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) shifted[r] = next[r];
    from += d.N * d.K * d.S;
    if (t + 1 < d.T) load_slots(next, from, at);
    const Softmax<acc_t> s = softmax(team, at, shifted, e);
    const acc_t weight = acc_t(1) / acc_t(args.count + t + 1);
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) {
      if (r >= at.count) break;
      const acc_t p = rounded_product(e[r], s.inverse_sum);
      weighted -= p * shifted[r];
      welford(p, weight, mean[r], m2[r]);
    }
    // -sum p log p = sum of -p (l - max), plus log sum.
    const acc_t own = team.second_sum(weighted) + s.log_sum;
    expected_entropy += (own - expected_entropy) * weight;
  }

  acc_t entropy = 0;
  const acc_t replicas = args.entropy ? acc_t(args.count + d.T) : acc_t(1);
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r) {
    if (r >= at.count) break;
    args.mean[at.first + r * at.stride] = mean[r];
    args.m2[at.first + r * at.stride] = m2[r] / replicas;
    if (args.entropy) entropy += entropy_term(mean[r], acc_t(log(mean[r])));
  }
  if (args.entropy) entropy = team.sum(entropy);
  if (!leads) return;
  args.expected_entropy[team.position] = expected_entropy;
  if (args.entropy) args.entropy[team.position] = entropy;
}

// One block per position; logits are read three times, the state once a replica.
template <typename scalar_t>
__global__ void __launch_bounds__(kMaxGroup) wide_statistics_kernel(StatisticsArgs<scalar_t> args) {
  using acc_t = acc_type<scalar_t>;
  const Classes d = args.d;
  const Team<acc_t, Group::kBlock> team;
  const int64_t first = team.position / d.S * d.K * d.S + team.position % d.S;
  acc_t expected_entropy = args.count > 0 ? args.expected_entropy[team.position] : acc_t(0);
  for (int64_t t = 0; t < d.T; ++t) {
    const scalar_t* from = args.logits + t * d.N * d.K * d.S + first;
    acc_t largest = -acc_t(INFINITY), total = 0, weighted = 0;
    for (int64_t k = team.rank; k < d.K; k += team.size)
      largest = max_or_nan(to_acc(from[k * d.S]), largest);
    largest = team.max(largest);
    for (int64_t k = team.rank; k < d.K; k += team.size)
      total += exp_fast(to_acc(from[k * d.S]) - largest);
    total = team.sum(total);
    const acc_t inverse = acc_t(1) / total, weight = acc_t(1) / acc_t(args.count + t + 1);
    const bool fresh = args.count + t == 0;
    for (int64_t k = team.rank; k < d.K; k += team.size) {
      const acc_t shifted = to_acc(from[k * d.S]) - largest,
                  p = rounded_product(exp_fast(shifted), inverse);
      weighted += entropy_term(p, shifted);
      acc_t mean = fresh ? acc_t(0) : args.mean[first + k * d.S];
      acc_t m2 = fresh ? acc_t(0) : args.m2[first + k * d.S];
      welford(p, weight, mean, m2);
      args.mean[first + k * d.S] = mean;
      args.m2[first + k * d.S] = m2;
    }
    const acc_t own = team.second_sum(weighted) + acc_t(log(total));
    expected_entropy += (own - expected_entropy) * weight;
  }
  acc_t entropy = 0;
  const acc_t replicas = args.entropy ? acc_t(args.count + d.T) : acc_t(1);
  if (args.entropy) {
    for (int64_t k = team.rank; k < d.K; k += team.size) {
      const acc_t mean = args.mean[first + k * d.S];
      args.m2[first + k * d.S] /= replicas;
      entropy += entropy_term(mean, acc_t(log(mean)));
    }
    entropy = team.sum(entropy);
  }
  if (team.rank != 0) return;
  args.expected_entropy[team.position] = expected_entropy;
  if (args.entropy) args.entropy[team.position] = entropy;
}

// ---- launches ----------------------------------------------------------------------------------

// No size may be 0.
template <typename scalar_t>
void run_statistics(const StatisticsArgs<scalar_t>& args, cudaStream_t stream) {
  const PredictivePlan p = plan_predictive(args.d, kSlots<acc_type<scalar_t>>);
  const auto kernel = p.wide                       ? wide_statistics_kernel<scalar_t>
                      : p.group == Group::kLanes   ? statistics_kernel<scalar_t, Group::kLanes>
                      : p.group == Group::kColumns ? statistics_kernel<scalar_t, Group::kColumns>
                                                   : statistics_kernel<scalar_t, Group::kBlock>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, 0, stream, args);
}

}  // namespace bnuq
