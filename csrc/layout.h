// Memory formats and result shapes of the ops, for both backends.
//
// A tensor is (N, C, S) with S the product of the trailing dimensions; channels_last is
// (N*S, C, 1). A result is channels_last where x is that and not contiguous; else contiguous.
#pragma once
#include <optional>
#include <vector>

#include "dispatch.h"

namespace bnuq {

using torch::headeronly::MemoryFormat;

using Sizes = std::initializer_list<int64_t>;

// A tensor in the memory of another, from its entry `offset` on.
inline Tensor view_of(const Tensor& t, int64_t offset, Sizes sizes, Sizes strides) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.begin(), strides.begin(), offset, &made));
  return Tensor(made);
}

inline Tensor contiguous_as(ScalarType type, const Tensor& t) {
  check_storage(t);
  const Tensor same = t.scalar_type() == type ? t : torch::stable::to(t, type);
  return same.is_contiguous() ? same : torch::stable::contiguous(same);
}

inline bool is_channels_last(const Tensor& x) {
  const int64_t dim = x.dim();
  if (dim != 4 && dim != 5) return false;
  int64_t expected = x.size(1);
  if (x.size(1) != 1 && x.stride(1) != 1) return false;
  for (int64_t k = 0; k < dim - 1; ++k) {
    const int64_t d = k < dim - 2 ? dim - 1 - k : 0;
    if (x.size(d) == 1) continue;
    if (x.stride(d) != expected) return false;
    expected *= x.size(d);
  }
  return true;
}

inline MemoryFormat format_of(const Tensor& x) {
  if (x.is_contiguous() || !is_channels_last(x)) return MemoryFormat::Contiguous;
  return x.dim() == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
}

inline bool has_format(const Tensor& x, MemoryFormat format) {
  return format == MemoryFormat::Contiguous ? x.is_contiguous() : is_channels_last(x);
}

inline Tensor with_format(const Tensor& x, MemoryFormat format) {
  return has_format(x, format) ? x : torch::stable::contiguous(x, format);
}

inline std::optional<Tensor> with_format(const std::optional<Tensor>& x, MemoryFormat format) {
  if (!x) return x;
  return with_format(*x, format);
}

// N rows of one replica, C channels, S positions.
struct Extent {
  int64_t N, C, S;

  int64_t numel() const { return N * C * S; }
};

inline Extent extent_of(const Tensor& x, MemoryFormat format, int64_t T, bool shared) {
  STD_TORCH_CHECK(x.dim() >= 2 && T >= 1, "batch_norm: x must have 2 dimensions, T be positive");
  STD_TORCH_CHECK(shared || x.size(0) % T == 0, "batch_norm: x must have T * N rows");
  int64_t positions = 1;
  for (int64_t d = 2; d < x.dim(); ++d) positions *= x.size(d);
  const int64_t N = shared ? x.size(0) : x.size(0) / T, C = x.size(1);
  if (format == MemoryFormat::Contiguous) return {N, C, positions};
  return {N * positions, C, 1};
}

// An uninitialised tensor like x with `rows` as its first size.
inline Tensor empty_rows(const Tensor& x, int64_t rows, MemoryFormat format) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes[0] = rows;
  if (format == MemoryFormat::Contiguous) return empty(x, sizes);
  return torch::stable::empty(
      sizes, x.scalar_type(), std::nullopt, x.device(), std::nullopt, format);
}

inline void check_same_sizes(const Tensor& a, const Tensor& b, const char* message) {
  bool same = a.dim() == b.dim() && a.scalar_type() == b.scalar_type();
  for (int64_t d = 0; same && d < a.dim(); ++d) same = a.size(d) == b.size(d);
  STD_TORCH_CHECK(same, message);
}

}  // namespace bnuq
