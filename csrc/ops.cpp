// The table of every op. Each backend registers its kernels in its own files.
//
// T replicas, N rows, C channels, B snapshots, K classes. `seed` is int64[2]: the key and the
// global number of the first replica. Parameters and statistics come in the accumulation type.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(bnuq, m) {
  m.def("philox_normal(Tensor seed, int stream, int tag, SymInt[] shape) -> Tensor");
  m.def("snapshot_indices(Tensor seed, int num_snapshots, int num_samples) -> Tensor");

  m.def(
      "batch_norm_bank(Tensor x, Tensor mean, Tensor var, Tensor? seed, Tensor? snapshot,"
      " int num_samples, Tensor? weight, Tensor? bias, Tensor? residual, float eps, float slope,"
      " bool shared) -> Tensor");
  m.def(
      "batch_norm_bank_out(Tensor(a!) out, Tensor x, Tensor mean, Tensor var, Tensor? seed,"
      " Tensor? snapshot, int num_samples, Tensor? weight, Tensor? bias, Tensor? residual,"
      " float eps, float slope, bool shared) -> ()");
  m.def(
      "batch_norm_bank_backward(Tensor grad_y, Tensor? x, Tensor? y, Tensor mean, Tensor var,"
      " Tensor? seed, Tensor? snapshot, int num_samples, Tensor? weight, float eps, float slope,"
      " bool shared, bool need_x, bool need_residual, bool need_sums)"
      " -> (Tensor grad_x, Tensor grad_residual, Tensor sums)");

  m.def(
      "batch_norm_fitted(Tensor x, Tensor params, Tensor seed, int stream, int family,"
      " int num_samples, Tensor? weight, Tensor? bias, Tensor? residual, float eps, float slope,"
      " bool shared) -> Tensor");
  m.def(
      "batch_norm_fitted_out(Tensor(a!) out, Tensor x, Tensor params, Tensor seed, int stream,"
      " int family, int num_samples, Tensor? weight, Tensor? bias, Tensor? residual, float eps,"
      " float slope, bool shared) -> ()");
  m.def(
      "batch_norm_fitted_backward(Tensor grad_y, Tensor? x, Tensor? y, Tensor params, Tensor seed,"
      " int stream, int family, int num_samples, Tensor? weight, float eps, float slope,"
      " bool shared, bool need_x, bool need_residual, bool need_sums)"
      " -> (Tensor grad_x, Tensor grad_residual, Tensor sums)");

  // On the CPU: mean and biased variance (C,) of x (N, C, *).
  m.def("channel_moments(Tensor x) -> (Tensor mean, Tensor var)");

  m.def(
      "predictive_statistics(Tensor logits)"
      " -> (Tensor mean, Tensor variance, Tensor entropy, Tensor expected_entropy)");
  m.def(
      "predictive_statistics_backward(Tensor logits, Tensor mean, Tensor? grad_mean,"
      " Tensor? grad_variance, Tensor? grad_entropy, Tensor? grad_expected_entropy) -> Tensor");
  m.def(
      "predictive_accumulate_(Tensor(a!) mean, Tensor(b!) m2, Tensor(c!) expected_entropy,"
      " Tensor logits, int count) -> ()");

  m.def(
      "bayes_linear(Tensor x, Tensor mu, Tensor rho, Tensor? bias_mu, Tensor? bias_rho,"
      " Tensor seed, int stream, int num_samples) -> Tensor");
  m.def(
      "bayes_linear_backward(Tensor grad_y, Tensor x, Tensor mu, Tensor rho, Tensor? bias_rho,"
      " Tensor seed, int stream, int num_samples, bool need_x, bool need_weight, bool need_bias)"
      " -> (Tensor grad_x, Tensor grad_mu, Tensor grad_rho, Tensor grad_bias_mu,"
      " Tensor grad_bias_rho)");

  // On the CPU: x (N, I) weight^T, plus a bias.
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");

  // On the CPU, with y (T*N, O), and gaussian_kl of all it takes: mu and rho of the weights, then
  // of the bias if there is one.
  m.def(
      "bayes_linear_kl(Tensor x, Tensor[] mu, Tensor[] rho, Tensor seed, int stream,"
      " int num_samples, float prior_std) -> (Tensor y, Tensor kl)");
  m.def(
      "bayes_linear_kl_backward(Tensor grad_y, Tensor grad_kl, Tensor x, Tensor[] mu, Tensor[] rho,"
      " Tensor seed, int stream, int num_samples, float prior_std, bool need_x, bool need_weight,"
      " bool need_bias) -> (Tensor grad_x, Tensor grad_mu, Tensor grad_rho, Tensor grad_bias_mu,"
      " Tensor grad_bias_rho)");

  // For benchmarks and tests: the fused product by itself, the way that a call takes
  // (csrc/cuda/linear_ways.cu).
  m.def(
      "bayes_operands(Tensor x, Tensor rho) -> (Tensor x, Tensor x_scale, Tensor sigma,"
      " Tensor sigma_scale)");
  m.def(
      "bayes_forward(Tensor x, Tensor x_scale, Tensor sigma, Tensor sigma_scale, Tensor base,"
      " Tensor seed, int stream, int num_samples) -> Tensor");
  m.def("ask_bayes_linear_way(int way, int chunk_bytes) -> ()");
  m.def("bayes_linear_way(Tensor x, Tensor mu) -> int");

  m.def("gaussian_kl(Tensor mu, Tensor rho, float prior_std) -> Tensor");
  m.def(
      "gaussian_kl_backward(Tensor grad, Tensor mu, Tensor rho, float prior_std)"
      " -> (Tensor, Tensor)");
  m.def("gaussian_kl_sum(Tensor[] mu, Tensor[] rho, float[] prior_std) -> Tensor");
  m.def(
      "gaussian_kl_sum_backward(Tensor grad, Tensor[] mu, Tensor[] rho, float[] prior_std)"
      " -> Tensor[]");
  m.def(
      "mixture_kl(Tensor mu, Tensor rho, Tensor seed, int stream, int num_samples, float pi,"
      " float std1, float std2) -> Tensor");
  m.def(
      "mixture_kl_backward(Tensor grad, Tensor mu, Tensor rho, Tensor seed, int stream,"
      " int num_samples, float pi, float std1, float std2) -> (Tensor, Tensor)");
}
