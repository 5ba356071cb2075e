// The noise of bayes_linear and nothing else: what its fused product is measured against.
#include "../csrc/cuda/weight_fragments.cuh"

namespace bnuq {
namespace {

constexpr int kThreads = 256, kReplicas = 4;

// A warp makes the fragments of four replicas in a row of tiles, or a part of it, and keeps a
// checksum.
__global__ void __launch_bounds__(kThreads)
    noise_kernel(uint32_t* out, const int64_t* seed, int64_t tiles_o, int tiles_i) {
  const int lane = threadIdx.x % kWarp;
  const int64_t tile_o = int64_t(blockIdx.y) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (tile_o >= tiles_o) return;
  const RoundKeys keys(subkey(seed[0], 0, kTagWeight));
  const uint64_t replica = uint64_t(seed[1]) + uint64_t(blockIdx.x) * kReplicas;
  uint32_t sum = 0;
#pragma unroll 1
  for (int tile_i = blockIdx.z; tile_i < tiles_i; tile_i += gridDim.z)
#pragma unroll
    for (int r = 0; r < kReplicas; ++r) {
      uint32_t a[4];
      noise_fragment<__half>(
          a, keys, uint32_t(tile_o), uint32_t(tile_i * kWarp + lane), replica + r);
      sum ^= a[0] ^ a[1] ^ a[2] ^ a[3];
    }
  atomicXor(out, sum);
}

}  // namespace
}  // namespace bnuq

// The noise of (T, O, I) weights. Returns an error of the runtime, 0 for none.
extern "C" int noise_floor(
    uint32_t* out, const int64_t* seed, int64_t T, int64_t O, int64_t I, void* stream) {
  using namespace bnuq;
  const int64_t tiles_o = ceil_div<int64_t>(O, kEdge), tiles_i = ceil_div<int64_t>(I, kEdge);
  const dim3 grid(
      unsigned(ceil_div<int64_t>(T, kReplicas)),
      unsigned(ceil_div<int64_t>(tiles_o, kThreads / kWarp)),
      unsigned(smaller<int64_t>(4, tiles_i)));
  noise_kernel<<<grid, kThreads, 0, cudaStream_t(stream)>>>(out, seed, tiles_o, int(tiles_i));
  return int(cudaGetLastError());
}
