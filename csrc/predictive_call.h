// The tensors of the predictive ops: checks for memory safety, for both backends.
#pragma once
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "layout.h"
#include "predictive.h"

namespace bnuq {

inline Classes classes_of(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() >= 3, "predictive: logits must have at least 3 dimensions");
  int64_t positions = 1;
  for (int64_t d = 3; d < logits.dim(); ++d) positions *= logits.size(d);
  return {logits.size(0), logits.size(1), logits.size(2), positions};
}

inline void check_state(
    const Tensor& mean, const Tensor& m2, const Tensor& expected_entropy, const Tensor& logits) {
  const Classes d = classes_of(logits);
  const ScalarType acc = acc_of(logits.scalar_type());
  for (const Tensor* t : {&mean, &m2, &expected_entropy})
    STD_TORCH_CHECK(
        t->is_contiguous() && t->scalar_type() == acc &&
            t->numel() == d.N * d.S * (t == &expected_entropy ? 1 : d.K),
        "predictive_accumulate_: the state must be contiguous and fit the logits");
}

using FreshResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What predictive_statistics returns, not filled; zero where there are no logits.
inline FreshResults fresh_results(const Tensor& logits) {
  STD_TORCH_CHECK(
      classes_of(logits).T >= 1, "predictive_statistics: logits must have at least one replica");
  const ScalarType acc = acc_of(logits.scalar_type());
  std::vector<int64_t> shape(logits.sizes().begin() + 1, logits.sizes().end());
  const auto make = [&] {
    return logits.numel() == 0 ? torch::stable::new_zeros(logits, shape, acc)
                               : empty(logits, shape, acc);
  };
  const Tensor mean = make(), variance = make();
  shape.erase(shape.begin() + 1);
  const Tensor entropy = make(), expected_entropy = make();
  return {mean, variance, entropy, expected_entropy};
}

// What predictive_statistics returned, or the gradients of that; null ones stay null.
struct Results {
  std::optional<Tensor> mean, variance, entropy, expected_entropy;
};

// The same, contiguous.
inline Results results_like(const Tensor& logits, const Results& given) {
  const Classes d = classes_of(logits);
  const auto checked = [&](const std::optional<Tensor>& t, int64_t numel) -> std::optional<Tensor> {
    if (!t) return t;
    STD_TORCH_CHECK(
        t->numel() == numel && t->scalar_type() == acc_of(logits.scalar_type()),
        "predictive_statistics_backward: a gradient must be like its result");
    return torch::stable::contiguous(*t);
  };
  const int64_t positions = d.N * d.S, classes = positions * d.K;
  return {
      checked(given.mean, classes), checked(given.variance, classes),
      checked(given.entropy, positions), checked(given.expected_entropy, positions)};
}

}  // namespace bnuq
