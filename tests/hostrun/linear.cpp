#include "../../csrc/cuda/linear_backward_kernels.cuh"
#include "../../csrc/cuda/linear_batched_kernels.cuh"
#include "../../csrc/cuda/linear_direct_kernels.cuh"

#include "../../csrc/cuda/kl_kernels.cuh"
#include "bindings.h"

namespace {

using namespace bnuq;

template <typename T>
const T* in(const void* p) {
  return static_cast<const T*>(p);
}

template <typename T>
T* to(void* p) {
  return static_cast<T*>(p);
}

// out, out2 and out3 of grad, x and rho, of those that are given; out4 (3,): their scales.
template <typename half_t>
void operands(const Bayes& c) {
  Operands p;
  const auto add = [&](const void* v, void* to_half, int k, int64_t rows, int64_t columns) {
    if (v) p.add({in<float>(v), to<uint4>(to_half), to<float>(c.out4) + k, rows, columns, k == 2});
  };
  add(c.grad, c.out, 0, c.T * c.N, c.O);
  add(c.x, c.out2, 1, (c.shared ? 1 : c.T) * c.N, c.I);
  add(c.rho, c.out3, 2, c.O, c.I);
  run_operands<half_t>(p, to<float>(c.partial), nullptr);
}

template <typename half_t>
void fused(const Bayes& c) {
  const auto f = [](const void* p) { return in<float>(p); };
  const auto h = [](const void* p) { return in<half_t>(p); };
  const uint4* sigma = in<uint4>(c.sigma);
  if (c.kernel == "operands") {
    operands<half_t>(c);
  } else if (c.kernel == "sample_noise") {
    run_sample_noise<half_t>(
        to<half_t>(c.out), sigma, c.seed, c.stream, c.first, c.T, c.O, c.I / kEdge, nullptr);
  } else if (c.kernel == "forward") {
    std::vector<float> bias(c.bias ? c.T * c.O : 0, NAN);
    if (c.bias)
      run_sample_bias(bias.data(), f(c.bias), f(c.bias_rho), c.seed, c.stream, c.T, c.O, nullptr);
    run_bayes_forward<half_t>(
        {h(c.x), sigma, f(c.base), c.bias ? bias.data() : nullptr, f(c.x_scale), f(c.sigma_scale),
         c.seed, to<float>(c.out), c.T, c.N, c.O, c.I, c.stream, c.shared},
        nullptr);
  } else if (c.kernel == "grad_x") {
    run_bayes_grad_x<half_t>(
        {h(c.grad), sigma, f(c.grad_scale), f(c.sigma_scale), c.seed, to<float>(c.out), c.T, c.N,
         c.O, c.I, c.stream, c.shared},
        nullptr);
  } else if (c.kernel == "grad_rho") {
    const int parts = grad_rho_parts(c.T, c.O, c.I);
    std::vector<float> sums(parts * c.O * c.I, NAN);
    run_bayes_grad_rho<half_t>(
        {h(c.grad), h(c.x), f(c.rho), f(c.grad_scale), f(c.x_scale), c.seed, to<float>(c.out), c.T,
         c.N, c.O, c.I, c.stream, c.shared, parts, sums.data()},
        nullptr);
  } else {
    throw std::invalid_argument("hostrun: no such kernel: " + c.kernel);
  }
}

template <typename acc_t>
bool direct(const Bayes& c) {
  DirectArgs<acc_t> p = {};
  p.mu = in<acc_t>(c.mu), p.rho = in<acc_t>(c.rho), p.bias_mu = in<acc_t>(c.bias);
  p.bias_rho = in<acc_t>(c.bias_rho), p.x = in<acc_t>(c.x), p.grad_y = in<acc_t>(c.grad);
  p.seed = c.seed, p.stream = c.stream, p.shared = c.shared;
  p.T = c.T, p.N = c.N, p.O = c.O, p.I = c.I;
  if (c.kernel == "direct_forward") {
    p.y = to<acc_t>(c.out);
    run_direct_forward(p, nullptr);
  } else if (c.kernel == "direct_grad_weight") {
    p.grad_mu = to<acc_t>(c.out), p.grad_rho = to<acc_t>(c.out2);
    p.grad_bias_mu = to<acc_t>(c.out3), p.grad_bias_rho = to<acc_t>(c.out4);
    run_direct_grad_weight(p, nullptr);
  } else if (c.kernel == "direct_grad_x") {
    p.grad_x = to<acc_t>(c.out);
    run_direct_grad_x(p, nullptr);
  } else {
    return false;
  }
  return true;
}

template <typename acc_t>
void in_memory(const Bayes& c) {
  if (direct<acc_t>(c)) return;
  const acc_t *mu = in<acc_t>(c.mu), *rho = in<acc_t>(c.rho), *grad = in<acc_t>(c.grad);
  acc_t *out = to<acc_t>(c.out), *out2 = to<acc_t>(c.out2);
  const MixtureArgs<acc_t> mixture = {
      mu, rho, c.seed, c.stream, c.T, c.O, c.I, c.matrix, mixture_of<acc_t>(c.pi, c.std1, c.std2)};
  Gaussians<acc_t> gaussians;
  gaussians.add(gaussian_of(mu, rho, out, out2, c.prior_std, c.O * c.I));
  if (c.kernel == "gaussian_kl") {
    const int made = run_gaussian_kl(to<double>(c.partial), gaussians, nullptr);
    run_add_partials(out, to<double>(c.partial), made, 1.0, nullptr);
  } else if (c.kernel == "gaussian_kl_backward") {
    run_gaussian_kl_backward(grad, gaussians, nullptr);
  } else if (c.kernel == "mixture_kl") {
    run_mixture_kl<acc_t>(out, to<double>(c.partial), mixture, nullptr);
  } else if (c.kernel == "mixture_kl_backward") {
    run_mixture_kl_backward<acc_t>(out, out2, grad, mixture, nullptr);
  } else {
    throw std::invalid_argument("hostrun: no such kernel: " + c.kernel);
  }
}

}  // namespace

void bayes(const Bayes& c) {
  if (c.dtype == "float16") return fused<__half>(c);
  if (c.dtype == "bfloat16") return fused<__nv_bfloat16>(c);
  if (c.dtype == "float64") return in_memory<double>(c);
  in_memory<float>(c);
}
