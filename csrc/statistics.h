// Where the statistics of T replicas come from, as tensors: checks for memory safety, and the views
// that the kernels of both backends read.
#pragma once
#include <optional>

#include "batch_norm.h"
#include "dispatch.h"
#include "layout.h"
#include "seed.h"

namespace bnuq {

inline void check_table(const Tensor& t, ScalarType type, int64_t rows, int64_t C) {
  STD_TORCH_CHECK(
      t.is_contiguous() && t.scalar_type() == type && t.numel() == rows * C,
      "batch_norm: parameters and statistics must be contiguous, in the accumulation type, and "
      "have C entries a row");
}

struct Bank {
  Tensor mean, var;  // (B, C)
  std::optional<Tensor> seed, snapshot;

  void check(int64_t T, int64_t C, ScalarType acc) const {
    const int64_t B = mean.size(0);
    STD_TORCH_CHECK(B >= 1, "batch_norm_bank: the bank must not be empty");
    check_table(mean, acc, B, C);
    check_table(var, acc, B, C);
    if (seed) seed_of(*seed);
    STD_TORCH_CHECK(
        seed.has_value() != snapshot.has_value(), "batch_norm_bank: give seed or snapshot");
    if (!snapshot) return;
    STD_TORCH_CHECK(
        snapshot->numel() == T && snapshot->scalar_type() == ScalarType::Long &&
            snapshot->is_contiguous(),
        "batch_norm_bank: snapshot must be int64, contiguous, and have num_samples entries");
  }
  template <typename acc_t>
  BankSource<acc_t> source(int64_t C) const {
    return {pointer<acc_t>(mean),   pointer<acc_t>(var), pointer<int64_t>(snapshot),
            pointer<int64_t>(seed), mean.size(0),        C};
  }
};

struct Fitted {
  Tensor params;  // (4, C)
  Tensor seed;
  int64_t stream, family;

  void check(int64_t, int64_t C, ScalarType acc) const {
    check_table(params, acc, 4, C);
    seed_of(seed);
  }
  template <typename acc_t>
  FittedSource<acc_t> source(int64_t C) const {
    return {pointer<acc_t>(params), seed_of(seed), uint32_t(stream), int(family), C};
  }
};

template <typename Statistics>
void check_arguments(
    const Statistics& statistics, const Tensor& x, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  const int64_t C = x.size(1);
  const ScalarType acc = acc_of(x.scalar_type());
  statistics.check(T, C, acc);
  if (weight) check_table(*weight, acc, 1, C);
  if (bias) check_table(*bias, acc, 1, C);
}

// What a forward reads, checked and in one memory format.
struct ForwardInputs {
  Extent extent;
  Tensor x;
  std::optional<Tensor> residual;
};

// T * N, of an x (N, *) that the replicas share, or of one (T * N, *).
inline int64_t result_rows(const Tensor& x, int64_t T, bool shared) {
  int64_t rows;
  STD_TORCH_CHECK(
      !__builtin_mul_overflow(x.size(0), shared ? T : 1, &rows),
      "batch_norm: num_samples times the rows of x must fit into 63 bits, got num_samples ", T);
  return rows;
}

// y (T * N, C, *) is where the result will be.
template <typename Statistics>
ForwardInputs forward_inputs(
    const Tensor& y, const Tensor& x, const std::optional<Tensor>& residual,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, bool shared) {
  const MemoryFormat format = format_of(x);
  const Extent extent = extent_of(x, format, T, shared);
  check_arguments(statistics, x, T, weight, bias);
  if (residual) check_same_sizes(*residual, x, "batch_norm: residual must be like x");
  STD_TORCH_CHECK(
      has_format(y, format) && y.numel() % T == 0 && y.numel() / T == extent.numel() &&
          y.scalar_type() == x.scalar_type(),
      "batch_norm: out must have the shape, dtype and memory format of the result");
  return {extent, with_format(x, format), with_format(residual, format)};
}

// What a backward reads, checked and in one memory format: x for the sums, y for an activation.
struct BackwardInputs {
  MemoryFormat format;
  Extent extent;
  Tensor grad_y;
  std::optional<Tensor> x, y;
  int64_t rows;  // of x
};

template <typename Statistics>
BackwardInputs backward_inputs(
    const Tensor& grad_y, const std::optional<Tensor>& x, const std::optional<Tensor>& y,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight, double slope,
    bool shared, bool need_sums) {
  STD_TORCH_CHECK(x || !need_sums, "batch_norm_backward: x must be given for the sums");
  STD_TORCH_CHECK(y || slope == 1, "batch_norm_backward: y must be given for an activation");
  const MemoryFormat format = format_of(y ? *y : grad_y);
  BackwardInputs in{format, extent_of(grad_y, format, T, false), grad_y, {}, {}, 0};
  check_arguments(statistics, grad_y, T, weight, std::nullopt);
  if (need_sums) {
    STD_TORCH_CHECK(
        x->numel() == (shared ? 1 : T) * in.extent.numel() &&
            x->scalar_type() == grad_y.scalar_type(),
        "batch_norm_backward: x must fit grad_y");
    in.x = with_format(*x, format);
  }
  if (slope != 1) {
    check_same_sizes(*y, grad_y, "batch_norm_backward: y must be like grad_y");
    in.y = with_format(*y, format);
  }
  in.grad_y = with_format(grad_y, format);
  in.rows = shared ? grad_y.size(0) / T : grad_y.size(0);
  return in;
}

}  // namespace bnuq
