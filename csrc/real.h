// exp and log that vectorise on the CPU in float; double and CUDA use the library's.
#pragma once
#include "philox.h"

namespace bnuq {

BNUQ_HD double exp_nonpositive(double x) {
  return std::exp(x);
}
BNUQ_HD double log_positive(double x) {
  return std::log(x);
}
BNUQ_HD double log1p_unit(double x) {
  return std::log1p(x);
}

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float exp_nonpositive(float x) {
  return expf(x);
}
__device__ __forceinline__ float log_positive(float x) {
  return logf(x);
}
__device__ __forceinline__ float log1p_unit(float x) {
  return log1pf(x);
}
#else
// exp(x) for x <= 0, relative error below 3e-7; 0 below the smallest normal number's logarithm. 2^n
// is multiplied in: added to the exponent's bits it would carry out of a NaN.
BNUQ_HD float exp_nonpositive(float x) {
  constexpr float kLowest = -87.3365f, kToInteger = 12582912.0f;  // 1.5 * 2^23
  const float held = x < kLowest ? kLowest : x;
  const float shifted = held * 1.44269504f + kToInteger;
  const float n = shifted - kToInteger;
  const float r = (held - n * 0.693359375f) + n * 2.12194440e-4f;
  const float p =
      1.0f +
      r * (1.0f +
           r * (0.5f + r * (1.66666667e-1f +
                            r * (4.16666400e-2f + r * (8.33336800e-3f + r * 1.39350800e-3f)))));
  const float power = as_float(0x3f800000u + (as_bits(shifted) << 23));
  return x < kLowest ? 0.0f : p * power;
}

// log(x) for normal x > 0, absolute error below 1.1e-7 * (1 + |log x|).
BNUQ_HD float log_positive(float x) {
  return lg2_unit(x) * 0.693147181f;
}

// log(1 + x) / x for 0 <= x <= 1, relative error below 2e-7.
BNUQ_HD float log1p_ratio(float x) {
  return 1.0f +
         x * (-0.49999648f +
              x * (0.33321324f +
                   x * (-0.24857163f +
                        x * (0.19153656f +
                             x * (-0.13753803f +
                                  x * (0.079204544f + x * (-0.0300658f + x * 0.005364826f)))))));
}

BNUQ_HD float log1p_unit(float x) {
  return x * log1p_ratio(x);
}
#endif

}  // namespace bnuq
