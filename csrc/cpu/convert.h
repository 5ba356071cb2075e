// float16 and bfloat16 to float and back, in integer arithmetic that vectorises on every CPU.
#pragma once
#include "../philox.h"

namespace bnuq {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

BNUQ_HD float load(float v) {
  return v;
}
BNUQ_HD double load(double v) {
  return v;
}
BNUQ_HD float load(BFloat16 v) {
  return as_float(uint32_t(v.bits) << 16);
}

BNUQ_HD float load(Half v) {
  // The exponent is 112 too small after the shift. A subnormal is what 2^-14 is exceeded by: as a float of its own
  // it would be one too, which torch.set_flush_denormal makes 0.
  const uint32_t magnitude = v.bits & 0x7fffu, sign = uint32_t(v.bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t subnormal = as_bits(as_float(normal + 0x800000u) - 0x1p-14f);
  const uint32_t bits = magnitude < 0x400u ? subnormal : normal;
  return as_float(bits | (magnitude >= 0x7c00u ? 0x7f800000u : 0u) | sign);
}

// Rounds to nearest, ties to even.
template <typename scalar_t>
struct Store;

template <>
struct Store<float> {
  BNUQ_HD static float from(float v) { return v; }
};

template <>
struct Store<double> {
  BNUQ_HD static double from(double v) { return v; }
};

template <>
struct Store<BFloat16> {
  BNUQ_HD static BFloat16 from(float v) {
    const uint32_t bits = as_bits(v);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {uint16_t(nan ? 0x7fc0u : rounded)};
  }
};

template <>
struct Store<Half> {
  BNUQ_HD static Half from(float v) {
    const uint32_t bits = as_bits(v), sign = (bits >> 16) & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    const uint32_t capped = size < 0x47800000u ? size : 0x47800000u;  // 65536 becomes infinity
    const uint32_t normal = (capped - 0x38000000u + 0xfffu + ((capped >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5 rounds to a multiple of 2^-24.
    const uint32_t subnormal = as_bits(as_float(capped) + 0.5f) - 0x3f000000u;
    const uint32_t finite = size < 0x38800000u ? subnormal : normal;
    return {uint16_t(sign | (size > 0x7f800000u ? 0x7e00u : finite))};
  }
};

template <typename scalar_t, typename acc_t>
BNUQ_HD scalar_t store(acc_t v) {
  return Store<scalar_t>::from(v);
}

}  // namespace bnuq
