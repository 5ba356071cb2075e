// sigma * eps of one lane as an A fragment of an mma. eps is before kNormalScale here: `sigma`
// carries that factor, and a power of two so that it fits float16.
#pragma once
#include "../linear.h"
#include "mma.cuh"

namespace bnuq {

// The keys of all rounds, held in registers: made anew they are two additions a round.
struct RoundKeys {
  uint32_t k[2 * kPhiloxRounds];

  BNUQ_DEVICE explicit RoundKeys(Key key) {
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      k[2 * round] = key.k0 + uint32_t(round) * kPhiloxStep0;
      k[2 * round + 1] = key.k1 + uint32_t(round) * kPhiloxStep1;
    }
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < 2 * kPhiloxRounds; ++i) asm volatile("" : "+r"(k[i]));
#endif
  }

  // The words of weight_index(tile_o, tile_i, lane), whose low word is `place`. What stays the same
  // in a loop over places the compiler makes before it.
  BNUQ_DEVICE Words4 words(uint32_t tile_o, uint32_t place, uint64_t replica) const {
    uint32_t c[4] = {place, tile_o, uint32_t(replica), uint32_t(replica >> 32)};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round)
      philox_round(c, k[2 * round], k[2 * round + 1]);
    return {{c[0], c[1], c[2], c[3]}};
  }
};

// eps of one lane as an A fragment.
template <typename half_t>
BNUQ_DEVICE void noise_fragment(
    uint32_t (&a)[4], const RoundKeys& keys, uint32_t tile_o, uint32_t place, uint64_t replica) {
  const Words4 words = keys.words(tile_o, place, replica);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float z0, z1;
    unit_pair(words.v[r], z0, z1);
    a[r] = pack2<half_t>(z0, z1);
  }
}

// sigma * eps of one lane as an A fragment.
template <typename half_t>
BNUQ_DEVICE void weight_fragment(
    uint32_t (&a)[4], const uint4& sigma, const RoundKeys& keys, uint32_t tile_o, uint32_t place,
    uint64_t replica) {
  noise_fragment<half_t>(a, keys, tile_o, place, replica);
  a[0] = mul2<half_t>(a[0], sigma.x);
  a[1] = mul2<half_t>(a[1], sigma.y);
  a[2] = mul2<half_t>(a[2], sigma.z);
  a[3] = mul2<half_t>(a[3], sigma.w);
}

}  // namespace bnuq
