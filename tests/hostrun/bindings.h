// What module.cpp hands to Python: plain functions over pointers, one group for each stem of
// csrc/cuda.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "hostrun.h"

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
};

void run_probe(const std::string& name, const Launch& l, const float* x, float* y, int64_t n);
void run_mma(bool bfloat16, const uint16_t* a, const uint16_t* b, const float* c, float* d);
void to_half(const float* x, uint16_t* y, int64_t n, bool bfloat16);
void from_half(const uint16_t* x, float* y, int64_t n, bool bfloat16);

void vector_normal(
    float* out, const int64_t* seed, uint32_t stream, uint32_t tag, int64_t T, int64_t C);
void weight_normal(
    float* out, const int64_t* seed, uint32_t stream, uint32_t tag, int64_t T, int64_t O,
    int64_t I);
void snapshot_indices(int64_t* out, const int64_t* seed, int64_t B, int64_t T);

// Arguments as in csrc/ops.cpp; a bank where params is null, fitted distributions else.
struct BatchNorm {
  std::string dtype;  // of x
  int64_t T, N, C, S, B;
  bool shared;
  double eps, slope;
  const void *x, *residual, *weight, *bias, *mean, *var, *params;
  const int64_t *snapshot, *seed;
  uint32_t stream;
  int family;
  void* y;
  const void* grad_y;
  void *grad_x, *grad_residual, *sums;
};
void batch_norm(const BatchNorm& call);
void batch_norm_backward(const BatchNorm& call);

struct Predictive {
  std::string dtype;  // of the logits
  int64_t T, N, K, S, count;
  const void* logits;
  void *mean, *m2, *expected_entropy, *entropy;
  const void *grad_mean, *grad_variance, *grad_entropy, *grad_expected_entropy;
  void* grad_logits;
};
void predictive(const Predictive& call);
void predictive_backward(const Predictive& call);

// Arguments as in the kernels of linear and kl; of a kernel's own, the others null.
struct Bayes {
  std::string kernel, dtype;  // dtype of the 16-bit operands, or of the weights
  int64_t T, N, O, I, first;
  bool shared, matrix;
  double prior_std, pi, std1, std2;
  uint32_t stream;
  const int64_t* seed;
  const void *x, *sigma, *base, *bias, *x_scale, *sigma_scale, *grad_scale, *mu, *rho, *bias_rho,
      *grad;
  void *out, *out2, *out3, *out4, *partial;
};
void bayes(const Bayes& call);

// Calls run(scalar_t()) for the type of that name.
template <typename Run>
void by_dtype(const std::string& name, Run run) {
  if (name == "float32") return run(float());
  if (name == "float64") return run(double());
  if (name == "float16") return run(__half());
  if (name == "bfloat16") return run(__nv_bfloat16());
  throw std::invalid_argument("hostrun: no such dtype: " + name);
}
