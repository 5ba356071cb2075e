// Which of the two types a Bayesian op computes in, and what its tensors must be, for both backends.
#pragma once
#include <torch/csrc/stable/tensor.h>

namespace bnuq {

// What shards a model frees the storage of its parameters: a kernel would read address 0.
inline void check_storage(const torch::stable::Tensor& t) {
  STD_TORCH_CHECK(
      t.numel() == 0 || t.const_data_ptr(),
      "bnuq: a tensor must have its storage, got one that has been freed");
}

// Two parameters of the same weights.
inline void check_alike(const torch::stable::Tensor& mu, const torch::stable::Tensor& rho) {
  STD_TORCH_CHECK(
      mu.is_contiguous() && rho.is_contiguous() && mu.numel() == rho.numel() &&
          mu.scalar_type() == rho.scalar_type(),
      "kl: mu and rho must be contiguous and alike");
  check_storage(mu), check_storage(rho);
}

template <typename F>
void dispatch_acc(const torch::stable::Tensor& t, const F& body) {
  using torch::headeronly::ScalarType;
  if (t.scalar_type() == ScalarType::Double) return body(double());
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "bnuq: dtype must be float32 or float64");
  body(float());
}

}  // namespace bnuq
