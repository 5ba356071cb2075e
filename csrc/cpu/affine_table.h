// What the batch-norm kernels of the CPU share: where statistics come from, and the affine map of
// every (replica, channel), made once a call.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../batch_norm.h"
#include "../layout.h"
#include "convert.h"
#include "simd.h"

namespace bnuq {

constexpr ScalarType acc_of(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <typename F>
void dispatch(ScalarType type, const F& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float());
    case ScalarType::Double:
      return body(double());
    case ScalarType::Half:
      return body(Half());
    case ScalarType::BFloat16:
      return body(BFloat16());
    default:
      STD_TORCH_CHECK(false, "bnuq: dtype must be float32, float64, float16 or bfloat16");
  }
}

template <typename T>
const T* pointer(const std::optional<Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

inline void check_seed(const std::optional<Tensor>& seed) {
  if (!seed) return;
  STD_TORCH_CHECK(
      seed->numel() == 2 && seed->scalar_type() == ScalarType::Long && seed->is_contiguous(),
      "bnuq: seed must be int64, contiguous, and have 2 entries");
}

struct Bank {
  Tensor mean, var;  // (B, C)
  std::optional<Tensor> seed, snapshot;

  void check(int64_t T, int64_t C, ScalarType acc) const {
    const int64_t B = mean.size(0);
    STD_TORCH_CHECK(B >= 1, "batch_norm_bank: the bank must not be empty");
    check_table(mean, acc, B, C);
    check_table(var, acc, B, C);
    check_seed(seed);
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
    return {
        static_cast<const acc_t*>(mean.const_data_ptr()),
        static_cast<const acc_t*>(var.const_data_ptr()),
        pointer<int64_t>(snapshot),
        pointer<int64_t>(seed),
        mean.size(0),
        C};
  }
};

struct Fitted {
  Tensor params;  // (4, C)
  Tensor seed;
  int64_t stream, family;

  void check(int64_t, int64_t C, ScalarType acc) const {
    check_table(params, acc, 4, C);
    check_seed(seed);
  }
  template <typename acc_t>
  FittedSource<acc_t> source(int64_t C) const {
    return {
        static_cast<const acc_t*>(params.const_data_ptr()), seed.const_data_ptr<int64_t>(),
        uint32_t(stream), int(family), C};
  }
};

template <typename acc_t>
struct AffineTable {
  int64_t C;
  std::vector<acc_t> mean, scale;  // (T, C)
  std::vector<acc_t> bias;         // (C,)
};

// Variances to scales, in place.
template <typename acc_t>
BNUQ_CLONES void scale_of_variance(acc_t* scale, const acc_t* weight, int64_t C, acc_t eps) {
  if (weight) {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) scale[c] = weight[c] * rsqrt_of(scale[c] + eps);
  } else {
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) scale[c] = rsqrt_of(scale[c] + eps);
  }
}

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps) {
  const auto source = statistics.template source<acc_t>(C);
  const acc_t* b = pointer<acc_t>(bias);
  AffineTable<acc_t> table = {
      C, std::vector<acc_t>(T * C), std::vector<acc_t>(T * C), std::vector<acc_t>(C)};
  if (b) std::copy(b, b + C, table.bias.begin());
  for (int64_t t = 0; t < T; ++t) {
    const int64_t row = source.row(t);
    acc_t* mean = &table.mean[t * C];
    acc_t* scale = &table.scale[t * C];
    for (int64_t c = 0; c < C; ++c) {
      const Moments<acc_t> m = source.at(row, c);
      mean[c] = m.mean;
      scale[c] = m.var;
    }
    scale_of_variance(scale, pointer<acc_t>(weight), C, acc_t(eps));
  }
  return table;
}

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

// Ranges of elements that stay in the first cache while T replicas pass over them.
constexpr int64_t kBlock = 4096;
constexpr int64_t kGrain = 32768;  // elements below which a second thread costs more than it gives

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace bnuq
