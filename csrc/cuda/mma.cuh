// mma.m16n8k16 with 16-bit operands and float32 sums, and what packs its fragments. By PTX's
// layout, with g = lane / 4 and t = lane % 4, a register holding two neighbours:
//   A (16 x 16): register r is row g + 8 (r % 2), columns 2 t + 8 (r / 2)
//   B (16 x 8):  register r is rows 2 t + 8 r, column g
//   D (16 x 8):  element e is row g + 8 (e / 2), column 2 t + e % 2
#pragma once
#include "device.cuh"
#ifdef BNUQ_HOSTRUN
#include "mma.h"
#endif

namespace bnuq {

template <typename half_t>
BNUQ_DEVICE uint32_t pack2(float a, float b) {
  half_t v[2];
  from_acc2(a, b, v);
  uint32_t bits;
  memcpy(&bits, v, 4);
  return bits;
}

#ifdef BNUQ_HOSTRUN

template <typename half_t>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  hostrun::mma_m16n8k16<half_t>(d, a, b, d);
}

// Element-wise products, rounded to 16 bits.
template <typename half_t>
uint32_t mul2(uint32_t a, uint32_t b) {
  half_t u[2], v[2];
  memcpy(u, &a, 4);
  memcpy(v, &b, 4);
  return pack2<half_t>(to_acc(u[0]) * to_acc(v[0]), to_acc(u[1]) * to_acc(v[1]));
}

// The transpose of an 8 x 8 matrix of which a lane holds two neighbours of row g.
inline uint32_t transpose8(uint32_t a) {
  const int lane = threadIdx.x % kWarp, row = lane / 4, column = lane % 4 * 2;
  const uint32_t low = __shfl_sync(kAllLanes, a, column * 4 + row / 2);
  const uint32_t high = __shfl_sync(kAllLanes, a, column * 4 + 4 + row / 2);
  const int shift = row % 2 * 16;
  return (low >> shift & 0xffffu) | (high >> shift << 16);
}

#else

template <typename half_t>
BNUQ_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
BNUQ_DEVICE void mma<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
BNUQ_DEVICE void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename half_t>
BNUQ_DEVICE uint32_t mul2(uint32_t a, uint32_t b);

template <>
BNUQ_DEVICE uint32_t mul2<__half>(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

template <>
BNUQ_DEVICE uint32_t mul2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t d;  // mul.bf16x2 exists from sm_90 on; adding -0 changes nothing
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

BNUQ_DEVICE uint32_t transpose8(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

#endif

}  // namespace bnuq
