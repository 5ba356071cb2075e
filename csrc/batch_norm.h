// Batch norm with given statistics: the formula of one element, its gradient, and where the
// statistics of replica t come from. No torch and no CUDA toolkit here.
//
//   y = act((x - mean) * scale + bias + residual),   scale = weight / sqrt(var + eps)
//   act(z) = z for z >= 0, slope * z below: slope 1 is the identity, 0 is ReLU.
#pragma once
#include "philox.h"

namespace bnuq {

template <typename acc_t>
BNUQ_HD acc_t activate(acc_t z, acc_t slope) {
  // slope 0 must send -inf to 0 and let NaN through.
  return z < acc_t(0) ? (slope == acc_t(0) ? acc_t(0) : slope * z) : z;
}

// The derivative by the sign of the output, which is the sign of z for every slope > 0; at 0 it is
// the slope, as in torch's relu and leaky_relu. Slope 0 selects, as relu does: an infinite gradient
// stops there, and NaN lets its gradient through.
template <typename acc_t>
BNUQ_HD acc_t activate_grad(acc_t grad, acc_t y, acc_t slope) {
  return y <= acc_t(0) ? (slope == acc_t(0) ? acc_t(0) : slope * grad) : grad;
}

template <typename acc_t>
struct Affine {
  acc_t mean, scale, bias;
};

template <typename acc_t>
BNUQ_HD acc_t normalise(acc_t x, const Affine<acc_t>& a) {
  return (x - a.mean) * a.scale + a.bias;
}

template <typename acc_t>
struct Moments {
  acc_t mean, var;
};

BNUQ_HD float rsqrt_of(float v) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(v);
#else
  return 1.0f / std::sqrt(v);
#endif
}

BNUQ_HD double rsqrt_of(double v) {
#if defined(__CUDA_ARCH__)
  return rsqrt(v);
#else
  return 1.0 / std::sqrt(v);
#endif
}

// Statistics of replica t as a row of a table: the row given, or drawn from the seed.
template <typename acc_t>
struct BankSource {
  static constexpr bool kDrawn = false;

  const acc_t* mean;        // (B, C)
  const acc_t* var;         // (B, C)
  const int64_t* snapshot;  // (T,) or null
  const int64_t* seed;      // (2,) = key, first replica; or null
  int64_t B, C;

  // A row outside the bank is -1, and at(-1, c) is NaN: nothing out of bounds is ever read.
  BNUQ_HD int64_t row(int64_t t) const {
    const int64_t s = snapshot ? snapshot[t] : snapshot_at(seed[0], uint64_t(seed[1] + t), B);
    return s >= 0 && s < B ? s : -1;
  }
  BNUQ_HD Moments<acc_t> at(int64_t row, int64_t c) const {
    if (row < 0) return {acc_t(NAN), acc_t(NAN)};
    return {mean[row * C + c], var[row * C + c]};
  }
};

enum Family : int { kNormal = 0, kLogNormal = 1 };

// Statistics of replica t drawn from fitted distributions, params (4, C): mean and std of the batch
// mean, then of the spread (normal) or of its logarithm (lognormal).
template <typename acc_t>
struct FittedSource {
  static constexpr bool kDrawn = true;

  const acc_t* params;  // (4, C)
  const int64_t* seed;  // (2,)
  uint32_t stream;
  int family;
  int64_t C;

  BNUQ_HD int64_t row(int64_t t) const { return seed[1] + t; }
  BNUQ_HD Moments<acc_t> at(int64_t replica, int64_t c) const {
    const acc_t z_mean =
        acc_t(vector_normal(subkey(seed[0], stream, kTagMean), c, uint64_t(replica)));
    const acc_t z_spread =
        acc_t(vector_normal(subkey(seed[0], stream, kTagSpread), c, uint64_t(replica)));
    return draw(c, z_mean, z_spread);
  }
  BNUQ_HD Moments<acc_t> draw(int64_t c, acc_t z_mean, acc_t z_spread) const {
    const acc_t mean = params[c] + params[C + c] * z_mean;
    const acc_t centre = params[2 * C + c], std = params[3 * C + c];
    acc_t spread;
    if (family == kLogNormal) {
      spread = std::exp(centre + std * z_spread);
    } else {
      // A Gaussian spread can fall below zero: hold it above an eighth of its mean.
      const acc_t low = centre * acc_t(0.125), drawn = centre + std * z_spread;
      spread = drawn <= low ? low : drawn;  // NaN stays
    }
    return {mean, spread * spread};
  }
};

template <typename acc_t>
BNUQ_HD Affine<acc_t> affine(
    const Moments<acc_t>& m, const acc_t* weight, const acc_t* bias, int64_t c, acc_t eps) {
  const acc_t rstd = rsqrt_of(m.var + eps);
  return {m.mean, weight ? weight[c] * rstd : rstd, bias ? bias[c] : acc_t(0)};
}

}  // namespace bnuq
