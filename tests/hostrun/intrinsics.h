// Barriers, warp collectives, cached accesses and fast arithmetic, with CUDA's names.
// Approximate instructions are computed exactly: only a GPU shows their rounding.
#pragma once
#include <math.h>

#include <cmath>

#include "block.h"
#include "types.h"

#define HOSTRUN_FROM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(HOSTRUN_FROM_HERE) {
  hostrun::block_barrier({file, line});
}

// Orders nothing for races.h: no kernel has it.
inline void __syncwarp(unsigned mask = ~0u, HOSTRUN_FROM_HERE) {
  char nothing;
  hostrun::warp_collective(mask, [](void* const*) {}, &nothing, {file, line});
}

namespace hostrun {

template <typename T>
struct Shuffle {
  T value, result;
  int source;
};

template <typename T>
T shuffle(unsigned mask, T value, int source, Site site) {
  Shuffle<T> operand = {value, value, source};
  const auto combine = [](void* const* operands) {
    for (int i = 0; i < 32; ++i) {
      auto* to = static_cast<Shuffle<T>*>(operands[i]);
      if (!to) continue;
      const auto* from = static_cast<const Shuffle<T>*>(operands[to->source]);
      if (!from) refuse_source(to->source);
      to->result = from->value;
    }
  };
  warp_collective(mask, combine, &operand, site);
  return operand.result;
}

struct Vote {
  bool mine;
  unsigned all;
};

inline unsigned ballot(unsigned mask, bool predicate, Site site) {
  Vote operand = {predicate, 0};
  const auto combine = [](void* const* operands) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i)
      if (operands[i] && static_cast<Vote*>(operands[i])->mine) all |= 1u << i;
    for (int i = 0; i < 32; ++i)
      if (operands[i]) static_cast<Vote*>(operands[i])->all = all;
  };
  warp_collective(mask, combine, &operand, site);
  return operand.all;
}

}  // namespace hostrun

// A source outside the segment of `width` lanes is the lane itself, as on the GPU.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, HOSTRUN_FROM_HERE) {
  const int first = hostrun::lane() & ~(width - 1);
  return hostrun::shuffle(mask, value, first + (source & (width - 1)), {file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, HOSTRUN_FROM_HERE) {
  const int lane = hostrun::lane(), end = (lane & ~(width - 1)) + width;
  return hostrun::shuffle(mask, value, (lane ^ bits) < end ? lane ^ bits : lane, {file, line});
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTRUN_FROM_HERE) {
  const int lane = hostrun::lane(), end = (lane & ~(width - 1)) + width, source = lane + int(delta);
  return hostrun::shuffle(mask, value, source < end ? source : lane, {file, line});
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTRUN_FROM_HERE) {
  const int lane = hostrun::lane(), first = lane & ~(width - 1), source = lane - int(delta);
  return hostrun::shuffle(mask, value, source >= first ? source : lane, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, HOSTRUN_FROM_HERE) {
  return hostrun::ballot(mask, predicate != 0, {file, line});
}

inline int __any_sync(unsigned mask, int predicate, HOSTRUN_FROM_HERE) {
  return hostrun::ballot(mask, predicate != 0, {file, line}) != 0;
}

inline int __all_sync(unsigned mask, int predicate, HOSTRUN_FROM_HERE) {
  return hostrun::ballot(mask, predicate != 0, {file, line}) == mask;
}

// Inlined, so that an access is one of its kernel's.
template <typename T>
[[gnu::always_inline]] inline T __ldg(const T* p, HOSTRUN_FROM_HERE) {
  hostrun::check_aligned(p, alignof(T), {file, line});
  return *p;
}
template <typename T>
[[gnu::always_inline]] inline T __ldcs(const T* p, HOSTRUN_FROM_HERE) {
  hostrun::check_aligned(p, alignof(T), {file, line});
  return *p;
}
template <typename T>
[[gnu::always_inline]] inline void __stcs(T* p, T value, HOSTRUN_FROM_HERE) {
  hostrun::check_aligned(p, alignof(T), {file, line});
  *p = value;
}
#undef HOSTRUN_FROM_HERE

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1.0 / std::sqrt(x);
}
inline float __cosf(float x) {
  return std::cos(x);
}
inline float __sinf(float x) {
  return std::sin(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
inline int __popc(unsigned u) {
  return __builtin_popcount(u);
}
