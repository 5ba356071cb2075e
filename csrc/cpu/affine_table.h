// What the batch-norm kernels of the CPU share: where statistics come from, and the affine map of
// every (replica, channel), made once a call.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../batch_norm.h"
#include "../layout.h"
#include "convert.h"

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
const T* pointer(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
const T* pointer(const std::optional<Tensor>& t) {
  return t ? pointer<T>(*t) : nullptr;
}

// The statistics of T replicas from snapshots; fills rows of C means and variances.
struct Bank {
  Tensor mean, var;  // (B, C)
  std::optional<Tensor> seed, snapshot;

  void check(int64_t T, int64_t C, ScalarType acc) const;
  template <typename acc_t>
  void fill(acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) const;
};

// The same, drawn from fitted distributions.
struct Fitted {
  Tensor params;  // (4, C)
  Tensor seed;
  int64_t stream, family;

  void check(int64_t T, int64_t C, ScalarType acc) const;
  template <typename acc_t>
  void fill(acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) const;
};

// Rows are `width` long: C, or for short rows of a tensor with S = 1 several copies of the C
// channels, so that the loop over a row is long enough.
template <typename acc_t>
struct AffineTable {
  int64_t width;
  std::vector<acc_t> mean, scale;  // (T, width)
  std::vector<acc_t> bias;         // (width,)
};

inline int64_t table_width(const Extent& d) {
  constexpr int64_t kRow = 512;
  if (d.S != 1 || d.C >= kRow) return d.C;
  return d.C * std::min(kRow / d.C, d.N);
}

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, int64_t width,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps);

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

// Ranges of elements that stay in the second cache while T replicas pass over them.
constexpr int64_t kBlock = 16384;
constexpr int64_t kGrain = 32768;  // elements below which a second thread costs more than it gives

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace bnuq
