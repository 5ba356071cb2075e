// Matrix products by torch's libraries, past the dispatcher, whose look-up by name takes longer
// than a small product.
#pragma once
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../arithmetic.h"
#include "../layout.h"
#include "simd.h"

#if defined(BNUQ_AVX512)
// oneDNN's act(X W^T + B), in a tensor of its own; null in a torch without oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle* B, const char* attr,
    const double** scalars, int64_t scalars_len_, const char** algorithm, AtenTensorHandle* ret0);
#endif

namespace bnuq {

// A matrix in the memory of a tensor: contiguous from `offset` on, or the transpose of such.
struct Matrix {
  Tensor in;
  int64_t offset, rows, columns, row_stride, column_stride;

  Matrix(const Tensor& in, int64_t offset, int64_t rows, int64_t columns)
      : in(in),
        offset(offset),
        rows(rows),
        columns(columns),
        row_stride(std::max<int64_t>(columns, 1)),
        column_stride(1) {}

  Matrix t() const {
    Matrix other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row_stride, other.column_stride);
    return other;
  }

  Tensor view() const { return view_of(in, offset, {rows, columns}, {row_stride, column_stride}); }
};

// MKL leaves the AVX-512 of other makers' processors alone, which is half of their rate. oneDNN
// uses it, but takes 10 us to begin.
inline bool prefers_onednn([[maybe_unused]] const Matrix& a, [[maybe_unused]] const Matrix& b) {
#if defined(BNUQ_AVX512)
  static const bool at_hand =
      aoti_torch_cpu__linear_pointwise && has_avx512() && !__builtin_cpu_is("intel");
  return at_hand && a.in.scalar_type() == torch::headeronly::ScalarType::Float &&
         a.rows * a.columns * b.columns >= int64_t(1) << 20;
#else
  return false;
#endif
}

constexpr int64_t kSquare = 16;

// Rows [row, row + kSquare) of a transpose, one after another, through a block in the first cache.
inline void write_rows(float* to, const float* from, const Matrix& a, int64_t row) {
  const int64_t n = std::min(kSquare, a.rows - row);
  float block[kSquare][kSquare];
  for (int64_t column = 0; column < a.columns; column += kSquare) {
    const int64_t m = std::min(kSquare, a.columns - column);
    for (int64_t k = 0; k < m; ++k)
      std::copy_n(from + (column + k) * a.column_stride + row, n, block[k]);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < m; ++k) to[(row + i) * a.columns + column + k] = block[k][i];
  }
}

// The same matrix with its rows one after another, as oneDNN wants it. Of a transpose torch's own
// copy takes one thread.
inline Tensor in_rows(const Matrix& a) {
  if (a.column_stride == 1) return a.view();
  const Tensor out = empty(a.in, {a.rows, a.columns});
  const float* from = static_cast<const float*>(a.in.const_data_ptr()) + a.offset;
  float* to = out.mutable_data_ptr<float>();
  const int64_t bands = ceil_div(a.rows, kSquare);
  torch::stable::parallel_for(0, bands, 1 + 512 / (a.columns + 1), [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) write_rows(to, from, a, band * kSquare);
  });
  return out;
}

// a b, plus `bias` (columns,) in each row, by oneDNN.
inline Tensor onednn_product(
    [[maybe_unused]] const Matrix& a, [[maybe_unused]] const Matrix& b,
    [[maybe_unused]] const std::optional<Tensor>& bias) {
  AtenTensorHandle made = nullptr;
#if defined(BNUQ_AVX512)
  AtenTensorHandle row = bias ? bias->get() : nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__linear_pointwise(
      in_rows(a).get(), b.t().view().get(), bias ? &row : nullptr, "none", nullptr, 0, nullptr,
      &made));
#endif
  return Tensor(made);
}

// out = a b, plus `bias` in each row.
inline void multiply(
    const Matrix& out, const Matrix& a, const Matrix& b, const std::optional<Tensor>& bias = {}) {
  Tensor y = out.view();
  if (prefers_onednn(a, b)) {
    torch::stable::copy_(y, onednn_product(a, b, bias));
  } else if (bias) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_addmm_out(y.get(), bias->get(), a.view().get(), b.view().get(), 1, 1));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(y.get(), a.view().get(), b.view().get()));
  }
}

// The same in a tensor of its own, where oneDNN needs no copy; MKL writes to `memory`, contiguous
// and of its size, if that is given.
inline Tensor product(
    const Matrix& a, const Matrix& b, const std::optional<Tensor>& bias = {},
    const std::optional<Tensor>& memory = {}) {
  if (prefers_onednn(a, b)) return onednn_product(a, b, bias);
  const Tensor out = memory ? *memory : empty(a.in, {a.rows, b.columns});
  multiply(Matrix(out, 0, a.rows, b.columns), a, b, bias);
  return out;
}

// out = a b, plus `bias` (batch, 1, columns), of as many matrices as out has.
inline void multiply_each(
    const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias = {}) {
  if (bias) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_baddbmm_out(out.get(), bias->get(), a.get(), b.get(), 1, 1));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(out.get(), a.get(), b.get()));
  }
}

// sum += more, both contiguous.
inline void add_into(const Tensor& sum, const Tensor& more) {
  dispatch_acc(sum, [&](auto zero) {
    using acc_t = decltype(zero);
    acc_t* to = sum.mutable_data_ptr<acc_t>();
    const acc_t* from = more.const_data_ptr<acc_t>();
    torch::stable::parallel_for(0, more.numel(), 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] += from[i];
    });
  });
}

// out += a b.
inline void add_product(const Matrix& out, const Matrix& a, const Matrix& b) {
  const Tensor y = out.view();
  if (prefers_onednn(a, b)) {
    add_into(y, onednn_product(a, b, {}));
  } else {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu_addmm_out(y.get(), y.get(), a.view().get(), b.view().get(), 1, 1));
  }
}

}  // namespace bnuq
