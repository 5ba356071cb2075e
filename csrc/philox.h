// Counter-based random numbers: one definition for the CPU kernels, the CUDA kernels and the tests.
//
//   word(key, stream, tag, replica, index) = philox4x32_10(subkey, {index, replica})
//   subkey = first two words of philox4x32_10(key, {stream, tag, 0, 0})
//
// One word gives a pair of normals, one call eight of them. No torch and no CUDA toolkit here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define BNUQ_HD __host__ __device__ __forceinline__
#define BNUQ_UNROLL _Pragma("unroll")
#else
#define BNUQ_HD [[gnu::always_inline]] inline
#define BNUQ_UNROLL
#endif

namespace bnuq {

// What the noise is for. The values are part of the frozen random-number contract.
enum Tag : uint32_t {
  kTagWeight = 0,
  kTagBias = 1,
  kTagMean = 2,
  kTagSpread = 3,
  kTagPermutation = 4,
  kTagJoint = 5,
  kTagLocal = 6,
};

struct Words4 {
  uint32_t v[4];
};

struct Key {
  uint32_t k0, k1;
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53, kPhiloxFactor1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9, kPhiloxStep1 = 0xBB67AE85;  // of the key, a round

BNUQ_HD void philox_round(uint32_t (&c)[4], uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t(kPhiloxFactor0) * c[0], p1 = uint64_t(kPhiloxFactor1) * c[2];
  c[0] = uint32_t(p1 >> 32) ^ c[1] ^ k0;
  c[2] = uint32_t(p0 >> 32) ^ c[3] ^ k1;
  c[1] = uint32_t(p1);
  c[3] = uint32_t(p0);
}

// Philox4x32-10 of Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3".
BNUQ_HD Words4 philox(Key key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t c[4] = {c0, c1, c2, c3};
  BNUQ_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(c, key.k0, key.k1);
    key.k0 += kPhiloxStep0;
    key.k1 += kPhiloxStep1;
  }
  return {{c[0], c[1], c[2], c[3]}};
}

BNUQ_HD Key subkey(int64_t key, uint32_t stream, uint32_t tag) {
  const Key root = {uint32_t(uint64_t(key)), uint32_t(uint64_t(key) >> 32)};
  const Words4 w = philox(root, stream, tag, 0, 0);
  return {w.v[0], w.v[1]};
}

BNUQ_HD Words4 philox_at(Key sub, uint64_t index, uint64_t replica) {
  return philox(
      sub, uint32_t(index), uint32_t(index >> 32), uint32_t(replica), uint32_t(replica >> 32));
}

BNUQ_HD float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

BNUQ_HD uint32_t as_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
#endif
}

// The normals below are r * (cos theta, sin theta) before this factor; a GEMM folds it into sigma.
constexpr float kNormalScale = 1.1774100225154747f;  // sqrt(2 ln 2)

// One word to a pair, before kNormalScale:
//   r = sqrt(|lg2(float(w | 1) * 2^-32)|),  theta = an odd multiple of 2 pi / 8192 from bits 1..12.
// Angles that start at 0 would put an atom at zero.
#if defined(__CUDA_ARCH__)
__device__ __forceinline__ void unit_pair(uint32_t w, float& z0, float& z1) {
  float lg, r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(lg) : "f"(float(w | 1u) * 2.3283064365386963e-10f));
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fabsf(lg)));
  // 0x4b000000 is 2^23: the angle's bits become a float without a conversion instruction.
  uint32_t bits;
  asm("lop3.b32 %0, %1, 0x1ffe, %2, 0xea;" : "=r"(bits) : "r"(w), "r"(0x4b000001u));
  const float theta = fmaf(__uint_as_float(bits), 7.669903939428206e-4f, -6433.98175455188f);
  z0 = r * __cosf(theta);
  z1 = r * __sinf(theta);
}
#else
// The CPU body computes the same formula with polynomials that vectorise (error below 6e-7 |z|).
BNUQ_HD float lg2_unit(float u) {
  const uint32_t bits = as_bits(u);
  const uint32_t exponent = (bits - 0x3f3504f3u) & 0xff800000u;  // n 2^23 of u = 2^n (1 + f)
  const float f = as_float(bits - exponent) - 1.0f;              // sqrt(1/2) <= 1 + f < sqrt(2)
  const float p =
      1.442695f +
      f * (-0.721347347f +
           f * (0.480910643f +
                f * (-0.360703682f +
                     f * (0.287916247f +
                          f * (-0.238944831f +
                               f * (0.215715623f + f * (-0.207269687f + f * 0.125836898f)))))));
  return float(int32_t(exponent)) * 1.1920929e-7f + f * p;
}

// With x = theta / pi - 1, in 12 bits: x^2, 1 - x^2 and x^2 - 1/4 are exact, and what is left of
// sin theta and cos theta when their zeros are divided out has short series in x^2.
BNUQ_HD void unit_pair(uint32_t w, float& z0, float& z1) {
  const float r = std::sqrt(std::fabs(lg2_unit(float(w | 1u) * 2.3283064365386963e-10f)));
  // 0x4b000000 is 2^23: the angle's bits become a float without a conversion.
  const float x = as_float((w & 0x1ffeu) | 0x4b000001u) * 2.44140625e-4f - 2049.0f, q = x * x;
  const float s =
      -3.14159264f +
      q * (2.0261193f +
           q * (-0.524034854f + q * (0.0751837232f + q * (-0.00685621782f + q * 0.000384373231f))));
  const float c =
      3.99999993f +
      q * (-3.73920426f +
           q * (1.27796558f + q * (-0.228809086f + q * (0.0249852427f + q * -0.00160409656f))));
  z0 = r * ((q - 0.25f) * c);
  z1 = r * (x * (1.0f - q) * s);
}
#endif

BNUQ_HD void normal_pair(uint32_t w, float& z0, float& z1) {
  unit_pair(w, z0, z1);
  z0 *= kNormalScale;
  z1 *= kNormalScale;
}

BNUQ_HD void normals8(const Words4& words, float* z) {
  BNUQ_UNROLL
  for (int j = 0; j < 4; ++j) normal_pair(words.v[j], z[2 * j], z[2 * j + 1]);
}

// ---- where a number lives ----------------------------------------------------------------------

// One of four words. A run-time index into registers would go through memory on a GPU.
BNUQ_HD uint32_t word_of(const Words4& words, int j) {
#if defined(__CUDA_ARCH__)
  const uint32_t low = j & 1 ? words.v[1] : words.v[0], high = j & 1 ? words.v[3] : words.v[2];
  return j & 2 ? high : low;
#else
  return words.v[j];
#endif
}

// A vector's element c is slot c % 8 of index c / 8.
BNUQ_HD float vector_normal(Key sub, int64_t c, uint64_t replica) {
  const Words4 words = philox_at(sub, uint64_t(c) >> 3, replica);
  float z0, z1;
  normal_pair(word_of(words, int(c >> 1) & 3), z0, z1);
  return (c & 1) ? z1 : z0;
}

constexpr int kEdge = 16;  // of a tile of weights

// A weight (o, i) lives in the 16x16 tile (o / 16, i / 16), in the order of the A fragment of
// mma.m16n8k16:
//   lane = 4 * (o % 8) + (i % 8) / 2
//   slot = i % 2 + 2 * (o % 16 / 8) + 4 * (i % 16 / 8)
BNUQ_HD uint64_t weight_index(int64_t tile_o, int64_t tile_i, int lane) {
  return (uint64_t(tile_o) << 32) | uint64_t(tile_i * 32 + lane);
}

// ---- which snapshot a replica uses -------------------------------------------------------------

// perm_e(t mod B) with e = t / B: the swap-or-not shuffle of Hoang, Morris and Rogaway (2012), a
// keyed permutation of any B. A position keeps its place through all rounds with probability
// 2^-24, so no snapshot's frequency is off by more than that. (A Feistel network with cycle walking
// needs as many rounds at B = 3 and walks besides.)
constexpr int kShuffleRounds = 24;

// The words that give the pivots of rounds round .. round + 3; round is a multiple of 4.
BNUQ_HD Words4 shuffle_pivots(Key sub, int round, uint64_t epoch) {
  return philox_at(sub, (uint64_t(round) << 32) | 0xffffffffu, epoch);
}

BNUQ_HD uint32_t
shuffle_round(Key sub, int round, uint32_t pivot_word, uint64_t epoch, uint32_t x, uint32_t B) {
  const uint32_t pivot = uint32_t((uint64_t(pivot_word) * B) >> 32);
  const uint32_t partner = pivot >= x ? pivot - x : uint32_t(uint64_t(pivot) + B - x);
  const uint32_t larger = x > partner ? x : partner;
  const Words4 coin = philox_at(sub, (uint64_t(round) << 32) | larger, epoch);
  return (coin.v[0] & 1) ? partner : x;
}

BNUQ_HD int64_t snapshot_at(int64_t key, uint64_t replica, int64_t num_snapshots) {
  const uint32_t B = uint32_t(num_snapshots);
  const uint64_t epoch = replica / B;
  uint32_t x = uint32_t(replica % B);
  const Key sub = subkey(key, 0, kTagPermutation);
  Words4 pivots = {};
  for (int round = 0; round < kShuffleRounds; ++round) {
    if (round % 4 == 0) pivots = shuffle_pivots(sub, round, epoch);
    x = shuffle_round(sub, round, word_of(pivots, round % 4), epoch, x, B);
  }
  return int64_t(x);
}

}  // namespace bnuq
