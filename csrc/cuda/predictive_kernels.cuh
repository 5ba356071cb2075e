// predictive_statistics and predictive_accumulate_ over logits (T, N, K, S), by teams of threads.
//
// Floor: bytes. Each logit is read once, b bytes, with about 25 operations of which one is an
// exponential; the state (mean, m2) is read and written once a call, so T dilutes it.
#pragma once
#include <optional>

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

// Classes of the recursion a thread, the entropy as one more: the threads are 16 or more teams of lanes,
// or four of a block.
constexpr int own_classes(Group group) {
  return group == Group::kLanes ? 1 : 3;
}

// One block per position: the softmaxes of blockDim.y replicas at a time, each by a team, then the
// recursion over them, each class by a thread. The bits are those of one replica after another.
template <typename scalar_t, Group kGroup>
__global__ void __launch_bounds__(kMaxGroup, 1)
    staged_statistics_kernel(StatisticsArgs<scalar_t> args) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kOwn = own_classes(kGroup);
  BNUQ_DYNAMIC_SHARED(acc_t, shared);  // twice (blockDim.y, K + 1)
  const Classes d = args.d;
  const Team<acc_t, kGroup> team(blockIdx.x);
  const Slots at(team, d);
  const int K = int(d.K), pitch = K + 1, threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t start = team.position / d.S * d.K * d.S + team.position % d.S;
  acc_t mean[kOwn] = {}, m2[kOwn] = {};  // of thread, thread + threads, ...; of K the entropy's
  if (args.count > 0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int k = thread + i * threads;
      if (k < K) mean[i] = args.mean[start + k * d.S], m2[i] = args.m2[start + k * d.S];
      if (k == K) mean[i] = args.expected_entropy[team.position];
    }
  }

  const int64_t replica = d.N * d.K * d.S;
  acc_t next[kSlots<acc_t>] = {};
  if (threadIdx.y < d.T) load_slots(next, args.logits + threadIdx.y * replica, at);
  acc_t* stage = shared;
  for (int64_t t0 = 0; t0 < d.T; t0 += blockDim.y) {
    acc_t shifted[kSlots<acc_t>], e[kSlots<acc_t>], weighted = 0;
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) shifted[r] = next[r];
    const int64_t t = t0 + blockDim.y + threadIdx.y;
    if (t < d.T) load_slots(next, args.logits + t * replica, at);
    const Softmax<acc_t> s = softmax(team, at, shifted, e);
    acc_t* to = stage + threadIdx.y * pitch;
#pragma unroll
    for (int r = 0; r < kSlots<acc_t>; ++r) {
      if (r >= at.count) break;
      const acc_t p = rounded_product(e[r], s.inverse_sum);
      weighted -= p * shifted[r];
      to[team.rank + r * team.size] = p;
    }
    const acc_t entropy = team.second_sum(weighted) + s.log_sum;
    if (team.rank == 0) to[K] = entropy;
    __syncthreads();  // of two stages one is read, the other written
    const int count = int(smaller<int64_t>(blockDim.y, d.T - t0));
    for (int j = 0; j < count; ++j) {
      const acc_t weight = acc_t(1) / acc_t(args.count + t0 + j + 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (thread + i * threads <= K)
          welford(stage[j * pitch + thread + i * threads], weight, mean[i], m2[i]);
    }
    stage = stage == shared ? shared + blockDim.y * pitch : shared;
  }

  const acc_t replicas = args.entropy ? acc_t(args.count + d.T) : acc_t(1);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int k = thread + i * threads;
    if (k < K) {
      args.mean[start + k * d.S] = stage[k] = mean[i];
      args.m2[start + k * d.S] = m2[i] / replicas;
    }
    if (k == K) args.expected_entropy[team.position] = mean[i];
  }
  if (!args.entropy) return;
  __syncthreads();
  acc_t entropy = 0;
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r) {
    if (r >= at.count) break;
    const acc_t of = stage[team.rank + r * team.size];
    entropy += entropy_term(of, acc_t(log(of)));
  }
  entropy = team.sum(entropy);
  if (thread == 0) args.entropy[team.position] = entropy;
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

// Below so many threads, eight warps a multiprocessor, a GPU waits for the softmaxes of a few.
constexpr int64_t kStagedThreads = 132 * 8 * kWarp;
constexpr int kStage = 16, kBlockStage = 4;
constexpr size_t kStageBytes = 36 << 10;  // the rest of 48 KB are the reductions'

struct StagedPlan {
  dim3 grid, block;
  size_t shared;
};

// For replicas side by side, where one after another they would take longer.
inline std::optional<StagedPlan> plan_staged(const PredictivePlan& p, Classes d, size_t acc_size) {
  const unsigned team = p.block.x;
  const int64_t positions = d.N * d.S;
  const bool few = positions * team < kStagedThreads && d.T >= kStage / 2;
  if (p.group == Group::kColumns || p.wide || !few) return {};
  const unsigned stage =
      p.group == Group::kLanes ? larger(unsigned(kStage), kWarp / team) : kBlockStage;
  const size_t shared = 2 * stage * size_t(d.K + 1) * acc_size;
  if (team * stage > kMaxGroup || shared > kStageBytes) return {};
  return StagedPlan{dim3(unsigned(positions)), dim3(team, stage), shared};
}

// No size may be 0.
template <typename scalar_t>
void run_statistics(const StatisticsArgs<scalar_t>& args, cudaStream_t stream) {
  using acc_t = acc_type<scalar_t>;
  const PredictivePlan p = plan_predictive(args.d, kSlots<acc_t>);
  if (const auto staged = plan_staged(p, args.d, sizeof(acc_t))) {
    const auto kernel = p.group == Group::kLanes
                            ? staged_statistics_kernel<scalar_t, Group::kLanes>
                            : staged_statistics_kernel<scalar_t, Group::kBlock>;
    BNUQ_LAUNCH(kernel, staged->grid, staged->block, staged->shared, stream, args);
    return;
  }
  const auto kernel = p.wide                       ? wide_statistics_kernel<scalar_t>
                      : p.group == Group::kLanes   ? statistics_kernel<scalar_t, Group::kLanes>
                      : p.group == Group::kColumns ? statistics_kernel<scalar_t, Group::kColumns>
                                                   : statistics_kernel<scalar_t, Group::kBlock>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, 0, stream, args);
}

}  // namespace bnuq
