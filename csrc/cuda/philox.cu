#include "launch.h"

#include <vector>

#include "philox_kernels.cuh"

namespace bnuq {
namespace {

Tensor philox_normal_cuda(
    const Tensor& seed, int64_t stream, int64_t tag, std::vector<int64_t> shape) {
  const int64_t* s = seed_of(seed);
  STD_TORCH_CHECK(
      shape.size() == 2 || shape.size() == 3, "philox_normal: shape must have 2 or 3 entries");
  const DeviceGuard guard(seed.get_device_index());
  const Tensor out = empty(seed, shape, ScalarType::Float);
  if (out.numel() == 0) return out;
  float* data = out.mutable_data_ptr<float>();
  if (shape.size() == 2)
    run_vector_normal(
        data, s, uint32_t(stream), uint32_t(tag), shape[0], shape[1], current_stream(seed));
  else
    run_weight_normal(
        data, s, uint32_t(stream), uint32_t(tag), shape[0], shape[1], shape[2],
        current_stream(seed));
  return out;
}

Tensor snapshot_indices_cuda(const Tensor& seed, int64_t num_snapshots, int64_t num_samples) {
  const int64_t* s = seed_of(seed);
  STD_TORCH_CHECK(num_snapshots >= 1, "snapshot_indices: num_snapshots must be positive");
  const DeviceGuard guard(seed.get_device_index());
  const Tensor out = empty(seed, {num_samples}, ScalarType::Long);
  if (num_samples > 0)
    run_snapshot_indices(
        out.mutable_data_ptr<int64_t>(), s, num_snapshots, num_samples, current_stream(seed));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CUDA, m) {
  m.impl("philox_normal", TORCH_BOX(&philox_normal_cuda));
  m.impl("snapshot_indices", TORCH_BOX(&snapshot_indices_cuda));
}

}  // namespace
}  // namespace bnuq
