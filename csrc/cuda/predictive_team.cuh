// The threads that share the classes of one position (n, s) of logits (T, N, K, S).
//
// A thread keeps up to kSlots classes (8; of float64, 4) in registers and takes the replicas one
// after another. A team is, with the bounds for eight slots,
//   kLanes    2^i neighbouring lanes: K <= 256 at S = 1, K <= 8 at any S
//   kColumns  a column of a block whose rows are 32 or 16 positions: S > 1, K <= 256
//   kBlock    a block: K <= 4096
// and beyond that a block with the state in memory ("wide"). Sums run in a fixed order.
#pragma once
#include "../predictive.h"
#include "device.cuh"

namespace bnuq {

template <typename acc_t>
constexpr int kSlots = 32 / int(sizeof(acc_t));  // 32 bytes of registers for each array
constexpr int kMaxGroup = 512;                   // threads
constexpr int kLaneThreads = 128;

enum class Group { kLanes, kColumns, kBlock };

constexpr int block_limit(Group group) {
  return group == Group::kLanes ? kLaneThreads : kMaxGroup;
}

struct PredictivePlan {
  dim3 grid, block;
  Group group;
  bool wide;
};

inline PredictivePlan plan_predictive(Classes d, int slots) {
  PredictivePlan p;
  const int64_t positions = d.N * d.S, per_thread = ceil_div<int64_t>(d.K, slots);
  p.wide = per_thread > kMaxGroup;
  if (per_thread == 1 || (d.S == 1 && per_thread <= kWarp)) {
    int lanes = 1;
    while (lanes < per_thread) lanes *= 2;
    p.group = Group::kLanes;
    p.block = dim3(lanes, kLaneThreads / lanes);
    p.grid = dim3(unsigned(ceil_div<int64_t>(positions, p.block.y)));
  } else if (d.S > 1 && per_thread <= kWarp) {
    p.group = Group::kColumns;
    p.block = dim3(per_thread * kWarp <= kMaxGroup ? kWarp : kWarp / 2, unsigned(per_thread));
    p.grid = dim3(unsigned(ceil_div<int64_t>(positions, p.block.x)));
  } else {
    p.group = Group::kBlock;
    p.block = dim3(p.wide ? kMaxGroup : unsigned(ceil_div<int64_t>(per_thread, kWarp) * kWarp));
    p.grid = dim3(unsigned(positions));
  }
  return p;
}

// The threads of one position: who this one is, and what they compute together. Every thread of the
// block takes part in max and sum.
template <typename acc_t, Group kGroup>
struct Team {
  int rank, size;
  int64_t position;

  BNUQ_DEVICE Team() {
    if constexpr (kGroup == Group::kLanes) {
      rank = threadIdx.x;
      size = blockDim.x;
      position = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    } else if constexpr (kGroup == Group::kColumns) {
      rank = threadIdx.y;
      size = blockDim.y;
      position = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    } else {
      rank = threadIdx.x;
      size = blockDim.x;
      position = blockIdx.x;
    }
  }

  // One of several of a block along y, for other replicas of the position.
  BNUQ_DEVICE explicit Team(int64_t position_)
      : rank(threadIdx.x), size(blockDim.x), position(position_) {}

  // A buffer for each kind of reduction, and a sum between two maxima: one barrier each is enough.
  BNUQ_DEVICE acc_t max(acc_t v) const {
    if constexpr (kGroup == Group::kLanes) {
      return lanes_max(v, size);
    } else {
      BNUQ_SHARED(acc_t, parts, [kMaxGroup]);
      return across(v, parts, [](acc_t a, acc_t b) { return max_or_nan(a, b); });
    }
  }

  BNUQ_DEVICE acc_t sum(acc_t v) const {
    if constexpr (kGroup == Group::kLanes) {
      return lanes_sum(v, size);
    } else {
      BNUQ_SHARED(acc_t, parts, [kMaxGroup]);
      return across(v, parts, [](acc_t a, acc_t b) { return a + b; });
    }
  }

  BNUQ_DEVICE acc_t second_sum(acc_t v) const {
    if constexpr (kGroup == Group::kLanes) {
      return lanes_sum(v, size);
    } else {
      BNUQ_SHARED(acc_t, parts, [kMaxGroup]);
      return across(v, parts, [](acc_t a, acc_t b) { return a + b; });
    }
  }

 private:
  template <typename Combine>
  BNUQ_DEVICE acc_t across(acc_t v, acc_t* parts, Combine combine) const {
    if constexpr (kGroup == Group::kColumns) {
      const int row = blockDim.x;
      parts[rank * row + threadIdx.x] = v;
      __syncthreads();
      acc_t all = parts[threadIdx.x];
      for (int i = 1; i < size; ++i) all = combine(all, parts[i * row + threadIdx.x]);
      return all;
    } else {
      for (int d = kWarp / 2; d > 0; d /= 2) v = combine(__shfl_xor_sync(kAllLanes, v, d), v);
      acc_t* own = parts + threadIdx.y * (size / kWarp);
      if (rank % kWarp == 0) own[rank / kWarp] = v;
      __syncthreads();
      acc_t all = own[0];
      for (int i = 1; i < size / kWarp; ++i) all = combine(all, own[i]);
      return all;
    }
  }
};

// Where the classes of a thread lie: class rank + r * size at first + r * stride, for r < count.
struct Slots {
  int64_t first, stride;
  int count;

  template <typename TeamT>
  BNUQ_DEVICE Slots(const TeamT& team, Classes d) {
    const bool inside = team.position < d.N * d.S;
    first = (team.position / d.S * d.K + team.rank) * d.S + team.position % d.S;
    stride = team.size * d.S;
    count = inside && team.rank < d.K ? int((d.K - team.rank - 1) / team.size) + 1 : 0;
  }
};

template <typename scalar_t, typename acc_t>
BNUQ_DEVICE void load_slots(acc_t (&v)[kSlots<acc_t>], const scalar_t* from, const Slots& at) {
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r)
    v[r] = r < at.count ? to_acc(from[at.first + r * at.stride]) : -acc_t(INFINITY);
}

// Of the softmax of one replica: p_k = exp(l_k - max) / sum, log p_k = l_k - max - log sum.
template <typename acc_t>
struct Softmax {
  acc_t inverse_sum, log_sum;
};

// Turns logits into shifted = l - max and e = exp(shifted).
template <typename acc_t, typename TeamT>
BNUQ_DEVICE Softmax<acc_t> softmax(
    const TeamT& team, const Slots& at, acc_t (&shifted)[kSlots<acc_t>],
    acc_t (&e)[kSlots<acc_t>]) {
  acc_t largest = -acc_t(INFINITY), total = 0;
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r) largest = max_or_nan(shifted[r], largest);
  largest = team.max(largest);
#pragma unroll
  for (int r = 0; r < kSlots<acc_t>; ++r) {
    // A bound where the logit is -inf: the probability 0 times it must be 0.
    shifted[r] = max_or_nan(shifted[r] - largest, acc_t(-1e30));
    e[r] = r < at.count ? exp_fast(shifted[r]) : acc_t(0);
    total += e[r];
  }
  total = team.sum(total);
  return {acc_t(1) / total, log(total)};
}

}  // namespace bnuq
