// exp and log that vectorise, for float; those of the standard library for double.
#pragma once
#include "../philox.h"

namespace bnuq {

// exp(x) for x <= 0, relative error below 2e-7; 0 below the smallest normal number's logarithm.
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
  const uint32_t keep = x < kLowest ? 0u : 0xffffffffu;
  return as_float((as_bits(p) + (as_bits(shifted) << 23)) & keep);
}

BNUQ_HD double exp_nonpositive(double x) {
  return std::exp(x);
}

// log(x) for normal x > 0, absolute error below 1e-7 * (1 + |log x|).
BNUQ_HD float log_positive(float x) {
  return lg2_unit(x) * 0.693147181f;
}

BNUQ_HD double log_positive(double x) {
  return std::log(x);
}

}  // namespace bnuq
