// What every kernel here uses: accesses by width, conversions, reductions in a fixed order, launch.
// Compiles under nvcc, and under g++ with BNUQ_HOSTRUN against the host run's hostrun.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../arithmetic.h"

#ifdef BNUQ_HOSTRUN
#include "hostrun.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define BNUQ_SHARED(type, name, extent) __shared__ type name extent
#define BNUQ_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char bnuq_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(bnuq_dynamic_shared)
// launch.h says how a launch is checked; a translation unit without torch checks for itself.
#ifndef BNUQ_LAUNCH_CHECK
#define BNUQ_LAUNCH_CHECK()
#endif
#define BNUQ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)     \
  do {                                                                  \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__); \
    BNUQ_LAUNCH_CHECK();                                                \
  } while (0)
#endif

#define BNUQ_DEVICE __device__ __forceinline__

namespace bnuq {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename I>
constexpr I smaller(I a, I b) {
  return a < b ? a : b;
}

template <typename I>
constexpr I larger(I a, I b) {
  return a > b ? a : b;
}

inline bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// ---- numbers -----------------------------------------------------------------------------------

BNUQ_DEVICE float to_acc(float v) {
  return v;
}
BNUQ_DEVICE double to_acc(double v) {
  return v;
}
BNUQ_DEVICE float to_acc(__half v) {
  return __half2float(v);
}
BNUQ_DEVICE float to_acc(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

BNUQ_DEVICE void from_acc(float v, float& out) {
  out = v;
}
BNUQ_DEVICE void from_acc(double v, double& out) {
  out = v;
}
BNUQ_DEVICE void from_acc(float v, __half& out) {
  out = __float2half_rn(v);
}
BNUQ_DEVICE void from_acc(float v, __nv_bfloat16& out) {
  out = __float2bfloat16_rn(v);
}

// Two at a time, which for the 16-bit types is one instruction.
template <typename scalar_t, typename acc_t>
BNUQ_DEVICE void from_acc2(acc_t a, acc_t b, scalar_t* out) {
  from_acc(a, out[0]);
  from_acc(b, out[1]);
}
BNUQ_DEVICE void from_acc2(float a, float b, __half* out) {
  const __half2 pair = __floats2half2_rn(a, b);
  out[0] = pair.x;
  out[1] = pair.y;
}
BNUQ_DEVICE void from_acc2(float a, float b, __nv_bfloat16* out) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  out[0] = pair.x;
  out[1] = pair.y;
}

// The larger; NaN if either is. One instruction, where comparisons and selections are three.
BNUQ_DEVICE float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a > b || a != a ? a : b;
#endif
}
BNUQ_DEVICE double max_or_nan(double a, double b) {
  return a > b || a != a ? a : b;
}

// exp(v) by one multiplication and ex2: the relative error is |v| 2^-24 more than expf's, whose
// argument reduction would triple the instructions of a softmax.
BNUQ_DEVICE float exp_fast(float v) {
#ifdef __CUDA_ARCH__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v * 1.4426950408889634f));
  return out;
#else
  return std::exp(v);
#endif
}
BNUQ_DEVICE double exp_fast(double v) {
  return exp(v);
}

// ---- memory ------------------------------------------------------------------------------------

template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};

// V neighbours as they lie in memory, kept packed until they are used: a register for every 16-bit
// number would double what a thread needs.
template <typename scalar_t, int V>
struct Pack {
  using bits_t = typename Bits<V* int(sizeof(scalar_t))>::type;
  bits_t bits;
};

template <typename scalar_t>
constexpr int kVector = 16 / int(sizeof(scalar_t));

// Evict-first accesses: each byte of a stream is touched once. Addresses are aligned to V numbers.
template <int V, typename scalar_t>
BNUQ_DEVICE Pack<scalar_t, V> load_stream(const scalar_t* p) {
  using bits_t = typename Pack<scalar_t, V>::bits_t;
  return {__ldcs(reinterpret_cast<const bits_t*>(p))};
}

// Of what further blocks read too: streams do not drive it out of the L2.
template <int V, typename scalar_t>
BNUQ_DEVICE Pack<scalar_t, V> load_again(const scalar_t* p) {
  using bits_t = typename Pack<scalar_t, V>::bits_t;
  return {__ldg(reinterpret_cast<const bits_t*>(p))};
}

// A bfloat16 is the upper half of a float: one instruction each.
BNUQ_DEVICE void unpack(const Pack<__nv_bfloat16, 8>& pack, float (&z)[8]) {
  const unsigned words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    z[2 * i] = __uint_as_float(words[i] << 16);
    z[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <typename scalar_t, int V>
BNUQ_DEVICE void unpack(const Pack<scalar_t, V>& pack, acc_type<scalar_t> (&z)[V]) {
  scalar_t v[V];
  memcpy(v, &pack.bits, sizeof(v));
#pragma unroll
  for (int e = 0; e < V; ++e) z[e] = to_acc(v[e]);
}

// Keeps the compiler from unpacking a loop-invariant Pack before the loop, at twice the registers.
template <typename scalar_t, int V>
BNUQ_DEVICE void keep_packed(Pack<scalar_t, V>& pack) {
#ifdef __CUDA_ARCH__
  if constexpr (V * sizeof(scalar_t) == 16 && V > 2)
    asm volatile("" : "+r"(pack.bits.x), "+r"(pack.bits.y), "+r"(pack.bits.z), "+r"(pack.bits.w));
#endif
}

template <typename scalar_t, int V>
BNUQ_DEVICE void store_stream(scalar_t* p, const acc_type<scalar_t> (&z)[V]) {
  using bits_t = typename Pack<scalar_t, V>::bits_t;
  scalar_t v[V];
  if constexpr (V == 1) {
    from_acc(z[0], v[0]);
  } else {
#pragma unroll
    for (int e = 0; e < V; e += 2) from_acc2(z[e], z[e + 1], v + e);
  }
  bits_t bits;
  memcpy(&bits, v, sizeof(bits));
  __stcs(reinterpret_cast<bits_t*>(p), bits);
}

// ---- reductions --------------------------------------------------------------------------------

// Over the `width` neighbouring lanes (a power of two) of a full warp; each lane gets the same
// bits.
template <typename acc_t>
BNUQ_DEVICE acc_t lanes_sum(acc_t v, int width = kWarp) {
  for (int d = width / 2; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}

template <typename acc_t>
BNUQ_DEVICE acc_t lanes_max(acc_t v, int width = kWarp) {
  for (int d = width / 2; d > 0; d /= 2) v = max_or_nan(__shfl_xor_sync(kAllLanes, v, d), v);
  return v;
}

}  // namespace bnuq
