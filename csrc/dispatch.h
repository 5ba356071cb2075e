// The types of an op's elements and of what it computes in, and what its tensors must be, for both
// backends.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>

namespace bnuq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What shards a model frees the storage of its parameters: a kernel would read address 0.
inline void check_storage(const Tensor& t) {
  STD_TORCH_CHECK(
      t.numel() == 0 || t.const_data_ptr(),
      "bnuq: a tensor must have its storage, got one that has been freed");
}

// The gradient of a divergence.
inline void check_single(const Tensor& grad) {
  STD_TORCH_CHECK(grad.numel() == 1, "kl_backward: grad must be a single number");
}

// Two parameters of the same weights.
inline void check_alike(const Tensor& mu, const Tensor& rho) {
  STD_TORCH_CHECK(
      mu.is_contiguous() && rho.is_contiguous() && mu.numel() == rho.numel() &&
          mu.scalar_type() == rho.scalar_type(),
      "kl: mu and rho must be contiguous and alike");
  check_storage(mu), check_storage(rho);
}

constexpr ScalarType acc_of(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Uninitialised and contiguous, on the device of `like`. A third of the time of
// torch::stable::new_empty, which goes through the dispatcher.
inline Tensor empty(
    const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  std::array<int64_t, 64> strides;  // as many as torch takes
  STD_TORCH_CHECK(sizes.size() <= strides.size(), "bnuq: a tensor must have at most 64 dimensions");
  int64_t stride = 1;
  double numbers = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    numbers *= double(sizes[d]);
    // Of a result that is too large it wraps, and torch has no memory for it.
    (void)__builtin_mul_overflow(stride, std::max<int64_t>(sizes[d], 1), &stride);
  }
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle made = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
      like.get_device_index(), &made);
  STD_TORCH_CHECK(
      error == AOTI_TORCH_SUCCESS, "bnuq: not enough memory for a result of ", numbers, " numbers");
  return Tensor(made);
}

inline Tensor empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty(like, sizes, like.scalar_type());
}

template <typename T>
const T* pointer(const Tensor& t) {
  check_storage(t);  // an address of 0 would stand for no tensor
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
const T* pointer(const std::optional<Tensor>& t) {
  return t ? pointer<T>(*t) : nullptr;
}

// The body for the type of a tensor's elements; those of 16 bits are the backend's own.
template <typename half_t, typename bfloat16_t, typename F>
void dispatch(ScalarType type, const F& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float());
    case ScalarType::Double:
      return body(double());
    case ScalarType::Half:
      return body(half_t());
    case ScalarType::BFloat16:
      return body(bfloat16_t());
    default:
      STD_TORCH_CHECK(false, "bnuq: dtype must be float32, float64, float16 or bfloat16");
  }
}

template <typename F>
void dispatch_acc(const Tensor& t, const F& body) {
  if (t.scalar_type() == ScalarType::Double) return body(double());
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "bnuq: dtype must be float32 or float64");
  body(float());
}

}  // namespace bnuq
