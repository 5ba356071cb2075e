// The seed of a call, (key, first replica), for both backends; checked for memory safety.
#pragma once
#include <torch/csrc/stable/tensor.h>

namespace bnuq {

inline const int64_t* seed_of(const torch::stable::Tensor& seed) {
  STD_TORCH_CHECK(
      seed.numel() == 2 && seed.scalar_type() == torch::headeronly::ScalarType::Long &&
          seed.is_contiguous(),
      "bnuq: seed must be int64, contiguous, and have 2 entries");
  return seed.const_data_ptr<int64_t>();
}

}  // namespace bnuq
