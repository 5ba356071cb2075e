// CUDA's vector types and 16-bit floats, with CUDA's names, sizes and alignment.
#pragma once
#include <cstdint>
#include <cstring>

#define HOSTRUN_VECTOR2(name, T)       \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
  };                                   \
  inline name make_##name(T x, T y) {  \
    return {x, y};                     \
  }
#define HOSTRUN_VECTOR4(name, T)                \
  struct alignas(4 * sizeof(T)) name {          \
    T x, y, z, w;                               \
  };                                            \
  inline name make_##name(T x, T y, T z, T w) { \
    return {x, y, z, w};                        \
  }

HOSTRUN_VECTOR2(uint2, unsigned)
HOSTRUN_VECTOR2(float2, float)
HOSTRUN_VECTOR4(uint4, unsigned)
HOSTRUN_VECTOR4(float4, float)
#undef HOSTRUN_VECTOR2
#undef HOSTRUN_VECTOR4

inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

namespace hostrun {

// Round to nearest, ties to even; a NaN becomes 0x7fff, as CUDA's conversions have it.
inline uint16_t half_bits(float f) {
  const uint32_t sign = __float_as_uint(f) >> 16 & 0x8000, u = __float_as_uint(f) & 0x7fffffff;
  if (u > 0x7f800000) return 0x7fff;
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 up
  // Below 2^-14 the sum with 0.5 has the spacing of half's subnormals, so the addition rounds.
  if (u < 0x38800000)
    return uint16_t(sign | (__float_as_uint(__uint_as_float(u) + 0.5f) - 0x3f000000));
  return uint16_t(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13));
}

inline float half_value(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, u = uint32_t(h & 0x7fff) << 13;
  if ((h & 0x7c00) == 0x7c00) return __uint_as_float(sign | u | 0x7f800000);
  const float magnitude = __uint_as_float(u) * 0x1p112f;  // moves the exponent, subnormals too
  return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline uint16_t bfloat16_bits(float f) {
  const uint32_t u = __float_as_uint(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline float bfloat16_value(uint16_t b) {
  return __uint_as_float(uint32_t(b) << 16);
}

}  // namespace hostrun

struct __half {
  uint16_t bits;
  __half() = default;
  __half(float f) : bits(hostrun::half_bits(f)) {}
  operator float() const { return hostrun::half_value(bits); }
};

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : bits(hostrun::bfloat16_bits(f)) {}
  operator float() const { return hostrun::bfloat16_value(bits); }
};

struct alignas(4) __half2 {
  __half x, y;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __half2float(__half h) {
  return h;
}
inline __half __float2half_rn(float f) {
  return f;
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {x, y};
}
inline float __bfloat162float(__nv_bfloat16 b) {
  return b;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return f;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {x, y};
}
