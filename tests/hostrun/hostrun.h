// CUDA on a CPU: what a kernel's source needs to compile and run under g++ as it stands.
#pragma once
#include "intrinsics.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

using cudaStream_t = void*;

#define BNUQ_SHARED(type, name, extent) \
  using name##_shared_t = type extent;  \
  auto& name = ::hostrun::shared_array<name##_shared_t>([] {})
#define BNUQ_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::hostrun::dynamic_shared())
#define BNUQ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::hostrun::launch_kernel(kernel, stream, grid, block, shared_bytes, __VA_ARGS__)
