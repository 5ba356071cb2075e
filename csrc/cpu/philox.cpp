#include "../philox.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "simd.h"
#include "weight_noise.h"

namespace bnuq {
namespace {

using torch::stable::Tensor;
namespace st = torch::stable;

BNUQ_CLONES void vector_row(float* out, Key sub, uint64_t replica, int64_t C) {
  for (int64_t c = 0; c < C; c += 8) {
    float z[8];
    normals8(philox_at(sub, uint64_t(c) >> 3, replica), z);
    std::copy_n(z, std::min<int64_t>(8, C - c), out + c);
  }
}

// The weights of one band of 16 rows, of which the matrix may hold fewer.
void weight_band(float* out, Key sub, uint64_t replica, int64_t tile_o, int64_t O, int64_t I) {
  const int64_t tiles = (I + kTile - 1) / kTile, width = tiles * kTile;
  std::vector<float> rows(2 * width);
  for (int o = 0; o < 8 && tile_o * kTile + o < O; ++o) {
    weight_row_pair(rows.data(), rows.data() + width, sub, replica, tile_o, o, tiles);
    const int64_t low = tile_o * kTile + o, high = low + 8;
    std::copy_n(rows.data(), I, out + low * I);
    if (high < O) std::copy_n(rows.data() + width, I, out + high * I);
  }
}

Tensor philox_normal_cpu(
    const Tensor& seed, int64_t stream, int64_t tag, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(
      shape.size() == 2 || shape.size() == 3, "philox_normal: shape must have 2 or 3 entries");
  STD_TORCH_CHECK(seed.numel() == 2, "philox_normal: seed must have 2 entries");
  Tensor out = st::new_empty(seed, shape, torch::headeronly::ScalarType::Float);
  const int64_t* s = seed.const_data_ptr<int64_t>();
  const Key sub = subkey(s[0], uint32_t(stream), uint32_t(tag));
  const bool weights = shape.size() == 3;
  const int64_t T = shape[0], O = shape[1], I = shape.back();
  const int64_t bands = weights ? (O + kTile - 1) / kTile : 1;
  float* data = out.mutable_data_ptr<float>();
  const int64_t grain = 1 + 4096 / (I + 1);
  st::parallel_for(0, T * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t t = r / bands;
      const uint64_t replica = uint64_t(s[1] + t);
      if (weights)
        weight_band(data + t * O * I, sub, replica, r % bands, O, I);
      else
        vector_row(data + t * I, sub, replica, I);
    }
  });
  return out;
}

Tensor snapshot_indices_cpu(const Tensor& seed, int64_t num_snapshots, int64_t num_samples) {
  STD_TORCH_CHECK(seed.numel() == 2, "snapshot_indices: seed must have 2 entries");
  STD_TORCH_CHECK(num_snapshots >= 1, "snapshot_indices: num_snapshots must be positive");
  Tensor out = st::new_empty(seed, {num_samples}, torch::headeronly::ScalarType::Long);
  const int64_t* s = seed.const_data_ptr<int64_t>();
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_samples; ++t)
    data[t] = snapshot_at(s[0], uint64_t(s[1] + t), num_snapshots);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("philox_normal", TORCH_BOX(&philox_normal_cpu));
  m.impl("snapshot_indices", TORCH_BOX(&snapshot_indices_cpu));
}

}  // namespace
}  // namespace bnuq
