// What a launcher needs of torch: the current stream, the check after a launch, dtypes. Included
// before the kernels, whose BNUQ_LAUNCH then checks every launch.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#define BNUQ_LAUNCH_CHECK() STD_CUDA_KERNEL_LAUNCH_CHECK()
#include "../dispatch.h"
#include "../seed.h"
#include "device.cuh"

namespace bnuq {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// The kernels read through raw pointers: a tensor on the CPU or on another GPU must not get there.
inline void check_on_device_of(
    const Tensor& x, std::initializer_list<std::optional<Tensor>> others) {
  STD_TORCH_CHECK(x.is_cuda(), "bnuq: a CUDA tensor is needed");
  check_storage(x);
  for (const std::optional<Tensor>& t : others) {
    if (!t) continue;
    STD_TORCH_CHECK(
        t->is_cuda() && t->get_device_index() == x.get_device_index(),
        "bnuq: all tensors must be on one device");
    check_storage(*t);
  }
}

template <typename scalar_t>
scalar_t* output(const Tensor& t) {
  return t.numel() == 0 ? nullptr : static_cast<scalar_t*>(t.mutable_data_ptr());
}

}  // namespace bnuq
