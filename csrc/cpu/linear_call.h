// The arguments of bayes_linear on the CPU, and what its forward and backward share.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "../dispatch.h"
#include "../layout.h"
#include "../seed.h"
#include "linear_rows.h"
#include "matrix.h"

namespace bnuq {

// Up to this many rows a replica, a dot product per row beats writing the weights out for a GEMM.
constexpr int64_t kFewRows = 4;

// Some of an op's replicas.
struct Replicas {
  int64_t first, count;

  Tensor of(Tensor x) const { return x.dim() == 2 ? x : torch::stable::narrow(x, 0, first, count); }
};

// What an op is given; seed, stream and T as in `ops.bayes_linear`.
struct LinearArguments {
  Tensor x, mu, rho, seed;
  int64_t stream, T;

  Noise noise(const Replicas& replicas, uint32_t tag = kTagWeight) const {
    const int64_t* s = seed_of(seed);
    return {subkey(s[0], uint32_t(stream), tag), uint64_t(s[1]) + uint64_t(replicas.first)};
  }

  // The replicas by groups: all at once, but of 16-bit activations, whose float32 copies must not
  // grow with T.
  template <typename Group>
  void for_groups(const Group& group) const {
    STD_TORCH_CHECK(T > 0, "bayes_linear: num_samples must be at least 1");
    constexpr int64_t kNumbers = int64_t(1) << 20;
    const int64_t widest = x.size(-2) * std::max(x.size(-1), mu.size(0));
    const bool copied =
        mu.scalar_type() == ScalarType::Float && x.scalar_type() != ScalarType::Float;
    const int64_t most = copied ? std::max<int64_t>(kNumbers / std::max<int64_t>(widest, 1), 1) : T;
    for (int64_t t = 0; t < T; t += most) group(Replicas{t, std::min(most, T - t)});
  }
};

// The tensors are contiguous, in the accumulation type.
struct LinearCall {
  Tensor x, mu, rho;  // (N, I) or (T, N, I); (O, I)
  Noise noise;
  int64_t T, N, O, I;
  bool shared;

  LinearCall(const LinearArguments& given, const Replicas& replicas)
      : x(contiguous_as(given.mu.scalar_type(), replicas.of(given.x))),
        mu(contiguous_as(given.mu.scalar_type(), given.mu)),
        rho(contiguous_as(given.mu.scalar_type(), given.rho)),
        noise(given.noise(replicas)),
        T(replicas.count),
        N(x.size(-2)),
        O(mu.size(0)),
        I(mu.size(1)),
        shared(x.dim() == 2) {
    STD_TORCH_CHECK(
        x.size(-1) == I && rho.numel() == O * I && (shared || given.x.size(0) == given.T),
        "bayes_linear: x, mu and rho must match in size");
  }

  int64_t x_stride() const { return shared ? 0 : N * I; }
  Matrix x_of(int64_t t) const { return {x, t * x_stride(), N, I}; }
  Tensor x_of(int64_t t, int64_t count) const {
    return view_of(x, t * x_stride(), {count, N, I}, {x_stride(), I, 1});
  }
  Tensor empty(const std::vector<int64_t>& sizes) const { return bnuq::empty(mu, sizes); }
};

// Into how many parts the replicas fall, each of which one thread makes and holds `numbers` for: a
// matrix product that threads share takes a quarter longer than whole ones beside each other. One
// where more than an eighth of the threads' time would be idle, or the parts would hold too much.
inline int64_t parts_of(const LinearCall& call, int64_t numbers) {
  constexpr int64_t kMostBytes = int64_t(1) << 26;
  const int64_t threads = torch::stable::get_num_threads(), rounds = ceil_div(call.T, threads);
  const int64_t parts = std::min(threads, call.T);
  const int64_t bytes = parts * numbers * int64_t(call.mu.element_size());
  return 8 * call.T >= 7 * rounds * threads && bytes <= kMostBytes ? parts : 1;
}

// Replicas that one call of torch's multiplies. A call takes as long as 2^17 or 2^18 multiply-adds;
// the weights of a call are 128 or 256 KiB at most, which stay in the second cache.
inline int64_t replicas_a_call(const LinearCall& call) {
  constexpr int64_t kSmallProduct = int64_t(1) << 18, kNumbers = int64_t(1) << 15;
  if (call.N * call.O * call.I >= kSmallProduct) return 1;
  return std::clamp<int64_t>(kNumbers / std::max<int64_t>(call.O * call.I, 1), 1, call.T);
}

// run(part, begin, end) for every part of T replicas, none of which is empty. What it writes by
// torch it has to view by `view_of`: torch's other threads know nothing of an inference mode.
template <typename Run>
void for_parts(int64_t T, int64_t parts, const Run& run) {
  if (parts == 1) return run(0, 0, T);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t first, int64_t stop) {
    for (int64_t part = first; part < stop; ++part)
      run(part, T * part / parts, T * (part + 1) / parts);
  });
}

// Half of a bias (O,), or none.
inline void check_bias(const LinearArguments& given, const std::optional<Tensor>& half) {
  STD_TORCH_CHECK(
      !half || half->numel() == given.mu.size(0),
      "bayes_linear: a bias must have an entry for each output");
}

// Of the weights (O, I), then of a bias (O,) if there is one.
inline void check_posterior(const std::vector<Tensor>& mu, const std::vector<Tensor>& rho) {
  const size_t n = mu.size();
  STD_TORCH_CHECK(
      (n == 1 || n == 2) && rho.size() == n && mu[0].dim() == 2 &&
          (n == 1 || (mu[1].numel() == mu[0].size(0) && rho[1].numel() == mu[0].size(0))),
      "bayes_linear_kl: mu and rho must be those of a matrix and of a bias that fits it");
}

// sigma of rho: torch's own softplus takes ten times as long.
Tensor sigma_of(const Tensor& rho);

// Weights (O, I) of a replica, with what sigma_of made.
void sample_weights(
    const Matrix& weight, const LinearCall& call, const Tensor& sigma, int64_t replica);

// Weights (O, I) of the first replica, with no sigma in memory.
Tensor sample_posterior(const LinearCall& call);

}  // namespace bnuq
