// Matrix products of torch's. No autocast rounds their operands: all but one go past the dispatcher,
// and bmm with a dtype has no rule.
#pragma once
#include "../layout.h"
#include "launch.h"

#ifdef BNUQ_HOSTRUN
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#define BNUQ_PRODUCT(name) aoti_torch_cpu_##name
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#define BNUQ_PRODUCT(name) aoti_torch_cuda_##name
#endif

namespace bnuq {

// Of a contiguous t; several matrices from element `offset` on.
inline Tensor matrix(const Tensor& t, int64_t rows, int64_t columns) {
  return view_of(t, 0, {rows, columns}, {columns, 1});
}

inline Tensor transposed(const Tensor& t, int64_t rows, int64_t columns) {
  return view_of(t, 0, {columns, rows}, {1, columns});
}

inline Tensor matrices(
    const Tensor& t, int64_t count, int64_t rows, int64_t columns, int64_t offset = 0) {
  return view_of(t, offset, {count, rows, columns}, {rows * columns, columns, 1});
}

inline Tensor transposed_matrices(const Tensor& t, int64_t count, int64_t rows, int64_t columns) {
  return view_of(t, 0, {count, columns, rows}, {rows * columns, 1, columns});
}

// Of t (T or 1, rows, columns), `count` matrices from the first on; one for all, or each its own.
inline Tensor matrices_from(const Tensor& t, int64_t first, int64_t count) {
  const int64_t rows = t.size(1), columns = t.size(2), each = t.size(0) == 1 ? 0 : rows * columns;
  return view_of(t, first * each, {count, rows, columns}, {each, columns, 1});
}

inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(BNUQ_PRODUCT(mm_out)(out.get(), a.get(), b.get()));
}

inline void multiply_add(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(BNUQ_PRODUCT(addmm_out)(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

inline void multiply_each(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(BNUQ_PRODUCT(bmm_out)(out.get(), a.get(), b.get()));
}

inline void multiply_add_each(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(
      BNUQ_PRODUCT(baddbmm_out)(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

// bmm of 16-bit matrices with float32 sums and results; nothing where torch refuses it: on a CPU, and
// where float16 products may have float16 sums.
inline std::optional<Tensor> float_results(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack = {from(a), from(b), from(ScalarType::Float)};
  if (torch_call_dispatcher("aten::bmm", "dtype", stack.data(), TORCH_ABI_VERSION)) return {};
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor float_products(const Tensor& a, const Tensor& b) {
  if (const auto made = float_results(a, b)) return *made;
  const Tensor product = empty(a, {a.size(0), a.size(1), b.size(2)}, ScalarType::Float);
  multiply_each(
      product, torch::stable::to(a, ScalarType::Float), torch::stable::to(b, ScalarType::Float));
  return product;
}

}  // namespace bnuq
