#include "../philox.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "simd.h"

namespace bnuq {
namespace {

using torch::stable::Tensor;
namespace st = torch::stable;

BNUQ_CLONES void vector_row(float* out, Key sub, uint64_t replica, int64_t C) {
  for (int64_t c = 0; c < C; ++c) out[c] = vector_normal(sub, c, replica);
}

BNUQ_CLONES void weight_row(float* out, Key sub, uint64_t replica, int64_t o, int64_t I) {
  for (int64_t i = 0; i < I; ++i) out[i] = weight_normal(sub, o, i, replica);
}

Tensor philox_normal_cpu(
    const Tensor& seed, int64_t stream, int64_t tag, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(
      shape.size() == 2 || shape.size() == 3, "philox_normal: shape must have 2 or 3 entries");
  STD_TORCH_CHECK(seed.numel() == 2, "philox_normal: seed must have 2 entries");
  Tensor out = st::new_empty(seed, shape, torch::headeronly::ScalarType::Float);
  const int64_t* s = seed.const_data_ptr<int64_t>();
  const Key sub = subkey(s[0], uint32_t(stream), uint32_t(tag));
  const bool weights = shape.size() == 3;
  const int64_t T = shape[0], rows = weights ? shape[1] : 1, width = shape.back();
  float* data = out.mutable_data_ptr<float>();
  st::parallel_for(0, T * rows, 1 + 4096 / (width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint64_t replica = uint64_t(s[1] + r / rows);
      if (weights)
        weight_row(data + r * width, sub, replica, r % rows, width);
      else
        vector_row(data + r * width, sub, replica, width);
    }
  });
  return out;
}

Tensor snapshot_indices_cpu(const Tensor& seed, int64_t num_snapshots, int64_t num_samples) {
  STD_TORCH_CHECK(seed.numel() == 2, "snapshot_indices: seed must have 2 entries");
  STD_TORCH_CHECK(num_snapshots >= 1, "snapshot_indices: num_snapshots must be positive");
  Tensor out = st::new_empty(seed, {num_samples}, torch::headeronly::ScalarType::Long);
  const int64_t* s = seed.const_data_ptr<int64_t>();
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_samples; ++t)
    data[t] = snapshot_at(s[0], uint64_t(s[1] + t), num_snapshots);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("philox_normal", TORCH_BOX(&philox_normal_cpu));
  m.impl("snapshot_indices", TORCH_BOX(&snapshot_indices_cpu));
}

}  // namespace
}  // namespace bnuq
