// Which of the two types a Bayesian op computes in, for both backends.
#pragma once
#include <torch/csrc/stable/tensor.h>

namespace bnuq {

template <typename F>
void dispatch_acc(const torch::stable::Tensor& t, const F& body) {
  using torch::headeronly::ScalarType;
  if (t.scalar_type() == ScalarType::Double) return body(double());
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "bnuq: dtype must be float32 or float64");
  body(float());
}

}  // namespace bnuq
