// Small kernels that try the machinery itself: sound ones, and each broken in one way that it must
// notice.
#include <stdexcept>

#include "bindings.h"
#include "mma.h"

namespace {

// y[block] = the sum of the block's x: shuffles within a warp, shared memory between warps.
template <bool kBarrier>
__global__ void sum_kernel(const float* x, float* y, int64_t n) {
  BNUQ_SHARED(float, partial, [32]);
  float sum = 0;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) sum += x[i];
  for (int bits = 16; bits; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  if (kBarrier) __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += partial[w];
  y[blockIdx.x] = sum;
}

// y = x in reverse, through dynamic shared memory.
template <bool kBarrier>
__global__ void reverse_kernel(const float* x, float* y, int64_t n) {
  BNUQ_DYNAMIC_SHARED(float, table);
  const int64_t i = threadIdx.x;
  if (i < n) table[i] = x[i];
  if (kBarrier) __syncthreads();
  if (i < n) y[i] = table[n - 1 - i];
}

__global__ void unwritten_shared_kernel(const float*, float* y, int64_t n) {
  BNUQ_SHARED(float, table, [64]);
  if (threadIdx.x < n) y[threadIdx.x] = table[threadIdx.x];
}

__global__ void divergent_barrier_kernel(const float*, float*, int64_t) {
  if (threadIdx.x < 16) __syncthreads();
}

__global__ void two_barriers_kernel(const float*, float*, int64_t) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void divergent_shuffle_kernel(const float* x, float* y, int64_t) {
  float value = x[0];
  if (threadIdx.x != 3) value = __shfl_xor_sync(~0u, value, 1);
  y[threadIdx.x] = value;
}

__global__ void divergent_warp_kernel(const float* x, float* y, int64_t) {
  float value = x[0];
  if (threadIdx.x < 8) {
    value = __shfl_sync(~0u, value, 0);
  } else {
    value = __shfl_down_sync(~0u, value, 1);
  }
  y[threadIdx.x] = value;
}

__global__ void absent_source_kernel(const float* x, float* y, int64_t) {
  if (threadIdx.x < 8) y[threadIdx.x] = __shfl_sync(0xffu, x[0], 9);
}

__global__ void overflow_global_kernel(const float*, float* y, int64_t n) {
  y[threadIdx.x + 1] = float(n);
}

__global__ void overflow_shared_kernel(const float* x, float* y, int64_t n) {
  BNUQ_SHARED(float, table, [32]);
  table[threadIdx.x + n] = x[0];
  __syncthreads();
  y[threadIdx.x] = table[threadIdx.x];
}

__global__ void overflow_dynamic_kernel(const float* x, float* y, int64_t) {
  BNUQ_DYNAMIC_SHARED(float, table);
  table[threadIdx.x + 1] = x[0];
  __syncthreads();
  y[threadIdx.x] = table[threadIdx.x];
}

__global__ void misaligned_hint_kernel(const float* x, float* y, int64_t) {
  y[0] = __ldcs(reinterpret_cast<const float4*>(x + 1)).x;
}

__global__ void misaligned_plain_kernel(const float* x, float* y, int64_t) {
  y[0] = reinterpret_cast<const float2*>(x + 1)->x;
}

__global__ void large_static_kernel(const float*, float* y, int64_t) {
  BNUQ_SHARED(float, table, [13000]);
  y[0] = table[0];
}

// What each lane gets from a shuffle or a vote on its own number and mask.
__global__ void lanes_kernel(const float* x, float* y, int64_t) {
  const int lane = int(threadIdx.x);
  float* row = y + lane * 8;
  row[0] = __shfl_sync(~0u, x[lane], 5);
  row[1] = __shfl_sync(~0u, x[lane], 5, 8);
  row[2] = __shfl_xor_sync(~0u, x[lane], 3);
  row[3] = __shfl_down_sync(~0u, x[lane], 4);
  row[4] = __shfl_up_sync(~0u, x[lane], 4);
  row[5] = float(__popc(__ballot_sync(~0u, x[lane] > 0)));
  row[6] = float(__any_sync(~0u, x[lane] > 0) + 2 * __all_sync(~0u, x[lane] > 0));
  // Two halves of a warp shuffle on their own.
  row[7] = lane < 16 ? __shfl_sync(0xffffu, x[lane], 1) : __shfl_sync(0xffff0000u, x[lane], 17);
}

// y = thread's place in a block of three dimensions, one block of it per grid place.
__global__ void place_kernel(const float*, float* y, int64_t) {
  const unsigned grid = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  y[grid * (blockDim.x * blockDim.y * blockDim.z) + thread] += float(100 * grid + thread);
}

using Kernel = void (*)(const float*, float*, int64_t);

// Numbers 0 to 255 in four 8 x 8 matrices, as a lane gets them: as they are, or transposed.
template <bool kTransposed>
__global__ void matrices_kernel(const float*, float* y, int64_t) {
  BNUQ_SHARED(__half, rows, [32][8]);
  const int lane = int(threadIdx.x);
  for (int c = 0; c < 8; ++c) rows[lane][c] = __half(float(lane * 8 + c));
  __syncwarp();
  uint32_t matrix[4];
  hostrun::load_matrices<kTransposed>(matrix, rows[lane]);
  for (int e = 0; e < 8; ++e) y[lane * 8 + e] = hostrun::packed_value<__half>(matrix[e / 2], e % 2);
}

// A copy that is begun comes when it is waited for; a thread must wait before it returns.
__global__ void copy_kernel(const float* x, float* y, int64_t n) {
  hostrun::begin_copy(y, x, true, {__FILE__, __LINE__});
  hostrun::begin_copy(y + 4, x, false, {__FILE__, __LINE__});
  y[8] = y[0];
  if (n == 0) return;
  hostrun::finish_copies();
  y[9] = y[0];
}

// Twice: 16 bytes into shared memory, and another thread's out of it.
template <bool kWaits, bool kBarrier>
__global__ void staged_kernel(const float* x, float* y, int64_t) {
  BNUQ_SHARED(float4, rows, [64]);
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    hostrun::begin_copy(&rows[threadIdx.x], x + threadIdx.x % 16 * 4, true, {__FILE__, __LINE__});
    if (kWaits) hostrun::finish_copies();
    __syncthreads();
    if (!kWaits) hostrun::finish_copies();
    sum += rows[63 - threadIdx.x].x;
    if (kBarrier) __syncthreads();
  }
  y[threadIdx.x] = sum;
}

// Through shared memory, n numbers from lane to lane.
__global__ void strided_kernel(const float* x, float* y, int64_t n) {
  BNUQ_DYNAMIC_SHARED(float, table);
  const int64_t i = threadIdx.x * n;
  table[i] = x[i];
  y[i] = table[i];
}

// The same with 16 bytes a lane.
__global__ void strided_vectors_kernel(const float* x, float* y, int64_t n) {
  BNUQ_DYNAMIC_SHARED(float4, table);
  const int64_t i = threadIdx.x * n;
  table[i] = __ldg(reinterpret_cast<const float4*>(x) + i);
  reinterpret_cast<float4*>(y)[i] = table[i];
}

// A shuffle makes no other thread's store visible.
__global__ void shuffle_for_barrier_kernel(const float* x, float* y, int64_t) {
  BNUQ_SHARED(float, table, [64]);
  table[threadIdx.x] = x[0];
  y[threadIdx.x] = __shfl_xor_sync(~0u, x[0], 1) + table[threadIdx.x ^ 1];
}

Kernel find_kernel(const std::string& name) {
  static const std::pair<const char*, Kernel> kernels[] = {
      {"sum", sum_kernel<true>},
      {"sum_without_barrier", sum_kernel<false>},
      {"reverse", reverse_kernel<true>},
      {"reverse_without_barrier", reverse_kernel<false>},
      {"unwritten_shared", unwritten_shared_kernel},
      {"divergent_barrier", divergent_barrier_kernel},
      {"two_barriers", two_barriers_kernel},
      {"divergent_shuffle", divergent_shuffle_kernel},
      {"divergent_warp", divergent_warp_kernel},
      {"absent_source", absent_source_kernel},
      {"overflow_global", overflow_global_kernel},
      {"overflow_shared", overflow_shared_kernel},
      {"overflow_dynamic", overflow_dynamic_kernel},
      {"misaligned_hint", misaligned_hint_kernel},
      {"misaligned_plain", misaligned_plain_kernel},
      {"large_static", large_static_kernel},
      {"lanes", lanes_kernel},
      {"place", place_kernel},
      {"matrices", matrices_kernel<false>},
      {"matrices_transposed", matrices_kernel<true>},
      {"copy", copy_kernel},
      {"staged", staged_kernel<true, true>},
      {"staged_waits_late", staged_kernel<false, true>},
      {"staged_without_barrier", staged_kernel<true, false>},
      {"strided", strided_kernel},
      {"strided_vectors", strided_vectors_kernel},
      {"shuffle_for_barrier", shuffle_for_barrier_kernel},
  };
  for (const auto& [known, kernel] : kernels)
    if (name == known) return kernel;
  throw std::invalid_argument("hostrun: no probe is called " + name);
}

template <typename scalar_t>
__global__ void mma_kernel(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  const int g = int(threadIdx.x) / 4, t = int(threadIdx.x) % 4;
  uint32_t a_fragment[4], b_fragment[2];
  for (int r = 0; r < 4; ++r) {
    const uint16_t* pair = a + (g + 8 * (r & 1)) * 16 + 2 * t + 8 * (r >> 1);
    a_fragment[r] = pair[0] | uint32_t(pair[1]) << 16;
  }
  for (int r = 0; r < 2; ++r) {
    const uint16_t* row = b + (2 * t + 8 * r) * 8 + g;
    b_fragment[r] = row[0] | uint32_t(row[8]) << 16;
  }
  float sum[4];
  for (int e = 0; e < 4; ++e) sum[e] = c[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)];
  hostrun::mma_m16n8k16<scalar_t>(sum, a_fragment, b_fragment, sum);
  for (int e = 0; e < 4; ++e) d[(g + 8 * (e >> 1)) * 8 + 2 * t + (e & 1)] = sum[e];
}

}  // namespace

void run_probe(const std::string& name, const Launch& l, const float* x, float* y, int64_t n) {
  BNUQ_LAUNCH(find_kernel(name), l.grid, l.block, l.shared_bytes, nullptr, x, y, n);
}

void run_mma(bool bfloat16, const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  if (bfloat16) {
    BNUQ_LAUNCH(mma_kernel<__nv_bfloat16>, 1, 32, 0, nullptr, a, b, c, d);
  } else {
    BNUQ_LAUNCH(mma_kernel<__half>, 1, 32, 0, nullptr, a, b, c, d);
  }
}

void to_half(const float* x, uint16_t* y, int64_t n, bool bfloat16) {
  for (int64_t i = 0; i < n; ++i)
    y[i] = bfloat16 ? hostrun::bfloat16_bits(x[i]) : hostrun::half_bits(x[i]);
}

void from_half(const uint16_t* x, float* y, int64_t n, bool bfloat16) {
  for (int64_t i = 0; i < n; ++i)
    y[i] = bfloat16 ? hostrun::bfloat16_value(x[i]) : hostrun::half_value(x[i]);
}
