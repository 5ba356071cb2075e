#include "../../csrc/cuda/philox_kernels.cuh"

#include "bindings.h"

void vector_normal(
    float* out, const int64_t* seed, uint32_t stream, uint32_t tag, int64_t T, int64_t C) {
  bnuq::run_vector_normal(out, seed, stream, tag, T, C, nullptr);
}

void weight_normal(
    float* out, const int64_t* seed, uint32_t stream, uint32_t tag, int64_t T, int64_t O,
    int64_t I) {
  bnuq::run_weight_normal(out, seed, stream, tag, T, O, I, nullptr);
}

void snapshot_indices(int64_t* out, const int64_t* seed, int64_t B, int64_t T) {
  bnuq::run_snapshot_indices(out, seed, B, T, nullptr);
}
