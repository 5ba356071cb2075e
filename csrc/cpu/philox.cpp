#include "../philox.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "../seed.h"
#include "noise.h"
#include "simd.h"
#include "weight_noise.h"

namespace bnuq {
namespace {

using torch::stable::Tensor;
namespace st = torch::stable;

// The normals of `calls` indices from `first` on, eight an index.
void normal_block(float* out, Key sub, uint64_t first, uint64_t replica, int64_t calls) {
  alignas(64) uint32_t lo[2 * kCalls], hi[2 * kCalls], words[4 * kCalls];
  philox_words(lo, hi, sub, first, 4, replica, calls);
  for (int64_t j = 0; j < calls; ++j) {
    const int64_t at = 2 * j - j % 4;
    words[4 * j] = lo[at], words[4 * j + 1] = hi[at];
    words[4 * j + 2] = lo[at + 4], words[4 * j + 3] = hi[at + 4];
  }
  normal_pairs(out, words, 4 * calls);
}

// The weights of one band of 16 rows, of which the matrix may hold fewer.
void weight_band(float* out, Key sub, uint64_t replica, int64_t tile_o, int64_t O, int64_t I) {
  const auto copy = [&](int64_t o, const float* z) { std::copy_n(z, I, out + o * I); };
  for_band_rows(sub, replica, tile_o, O, 0, tiles_of(I), copy);
}

constexpr int kReplicas = 16;

// `snapshot_at` for kReplicas replicas at once.
BNUQ_CLONES void snapshot_block(uint32_t* x, Key sub, uint64_t first, uint32_t B) {
  uint64_t epoch[kReplicas];
  for (int i = 0; i < kReplicas; ++i) {
    epoch[i] = (first + uint64_t(i)) / B;
    x[i] = uint32_t((first + uint64_t(i)) % B);
  }
  uint32_t pivots[4][kReplicas];
  for (int round = 0; round < kShuffleRounds; ++round) {
    if (round % 4 == 0) {
#pragma omp simd
      for (int i = 0; i < kReplicas; ++i) {
        const Words4 words = shuffle_pivots(sub, round, epoch[i]);
        for (int j = 0; j < 4; ++j) pivots[j][i] = words.v[j];
      }
    }
#pragma omp simd
    for (int i = 0; i < kReplicas; ++i)
      x[i] = shuffle_round(sub, round, pivots[round % 4][i], epoch[i], x[i], B);
  }
}

Tensor philox_normal_cpu(
    const Tensor& seed, int64_t stream, int64_t tag, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(
      shape.size() == 2 || shape.size() == 3, "philox_normal: shape must have 2 or 3 entries");
  Tensor out = st::new_empty(seed, shape, torch::headeronly::ScalarType::Float);
  const int64_t* s = seed_of(seed);
  const Key sub = subkey(s[0], uint32_t(stream), uint32_t(tag));
  const bool weights = shape.size() == 3;
  const int64_t T = shape[0], O = shape[1], I = shape.back();
  const int64_t bands = weights ? tiles_of(O) : 1;
  float* data = out.mutable_data_ptr<float>();
  const int64_t grain = 1 + 16384 / ((weights ? kEdge : 1) * I + 1);
  st::parallel_for(0, T * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t t = r / bands;
      const uint64_t replica = uint64_t(s[1] + t);
      if (weights)
        weight_band(data + t * O * I, sub, replica, r % bands, O, I);
      else
        vector_normals(data + t * I, sub, replica, I);
    }
  });
  return out;
}

Tensor snapshot_indices_cpu(const Tensor& seed, int64_t num_snapshots, int64_t num_samples) {
  STD_TORCH_CHECK(num_snapshots >= 1, "snapshot_indices: num_snapshots must be positive");
  Tensor out = st::new_empty(seed, {num_samples}, torch::headeronly::ScalarType::Long);
  snapshots(out.mutable_data_ptr<int64_t>(), seed_of(seed), num_snapshots, num_samples);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("philox_normal", TORCH_BOX(&philox_normal_cpu));
  m.impl("snapshot_indices", TORCH_BOX(&snapshot_indices_cpu));
}

}  // namespace

void vector_normals(float* out, Key sub, uint64_t replica, int64_t C) {
  alignas(64) float z[8 * kCalls];
  for (int64_t c = 0; c < C; c += 8 * kCalls) {
    const int64_t count = std::min<int64_t>(8 * kCalls, C - c);
    normal_block(z, sub, uint64_t(c) >> 3, replica, (count + 63) / 64 * 8);
    std::copy_n(z, count, out + c);
  }
}

void snapshots(int64_t* out, const int64_t* seed, int64_t B, int64_t T) {
  const Key sub = subkey(seed[0], 0, kTagPermutation);
  for (int64_t t = 0; t < T; t += kReplicas) {
    uint32_t x[kReplicas];
    snapshot_block(x, sub, uint64_t(seed[1] + t), uint32_t(B));
    std::copy(x, x + std::min<int64_t>(kReplicas, T - t), out + t);
  }
}

}  // namespace bnuq
