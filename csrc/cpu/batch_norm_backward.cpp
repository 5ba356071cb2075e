#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "affine_table.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

template <typename scalar_t>
struct Inputs {
  const scalar_t* grad_y;
  const scalar_t* x;  // null when sums are not needed
  const scalar_t* y;  // null when the slope is 1

  Inputs replica(int64_t offset, int64_t x_offset) const {
    return {grad_y + offset, x ? x + x_offset : nullptr, y ? y + offset : nullptr};
  }
};

// Adds replica t's share of grad_x and grad_residual, elements [begin, end), to two buffers.
template <typename scalar_t, typename acc_t>
BNUQ_CLONES void add_gradients(
    acc_t* __restrict__ grad_x, acc_t* __restrict__ grad_residual, Inputs<scalar_t> in,
    const acc_t* scale, Extent d, int64_t begin, int64_t end, acc_t slope) {
  for (int64_t i = begin; i < end; ++i) {
    const acc_t grad = load(in.grad_y[i]);
    const acc_t g = in.y ? activate_grad(grad, acc_t(load(in.y[i])), slope) : grad;
    grad_x[i - begin] += g * scale[i / d.S % d.C];
    grad_residual[i - begin] += g;
  }
}

template <typename scalar_t, typename acc_t>
BNUQ_CLONES void store_all(scalar_t* out, const acc_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = store<scalar_t>(values[i]);
}

template <typename scalar_t, typename acc_t>
void gradients(
    scalar_t* grad_x, scalar_t* grad_residual, Inputs<scalar_t> in, const AffineTable<acc_t>& table,
    Extent d, int64_t T, acc_t slope, bool shared) {
  const int64_t numel = d.numel(), blocks = ceil_div(numel, kBlock), outputs = shared ? 1 : T;
  st::parallel_for(0, outputs * blocks, 1 + kGrain / (kBlock * T), [&](int64_t a, int64_t b) {
    std::vector<acc_t> sum_x(kBlock), sum_residual(kBlock);
    for (int64_t i = a; i < b; ++i) {
      const int64_t first = i / blocks, last = shared ? T : first + 1;
      const int64_t begin = i % blocks * kBlock, end = std::min(numel, begin + kBlock);
      std::fill(sum_x.begin(), sum_x.end(), acc_t(0));
      std::fill(sum_residual.begin(), sum_residual.end(), acc_t(0));
      for (int64_t t = first; t < last; ++t)
        add_gradients<scalar_t, acc_t>(
            sum_x.data(), sum_residual.data(), in.replica(t * numel, 0), &table.scale[t * d.C], d,
            begin, end, slope);
      const int64_t out = first * numel + begin;
      if (grad_x) store_all<scalar_t, acc_t>(grad_x + out, sum_x.data(), end - begin);
      if (grad_residual)
        store_all<scalar_t, acc_t>(grad_residual + out, sum_residual.data(), end - begin);
    }
  });
}

// sum_{n,s} g and sum_{n,s} g (x - mean) rstd of channels [begin, end) of one replica.
template <typename scalar_t, typename acc_t>
BNUQ_CLONES void add_sums(
    double* sum_g, double* sum_gx, Inputs<scalar_t> in, const acc_t* mean, const acc_t* rstd,
    Extent d, int64_t begin, int64_t end, acc_t slope) {
  for (int64_t n = 0; n < d.N; ++n)
    for (int64_t c = begin; c < end; ++c) {
      acc_t g_plane = 0, gx_plane = 0;
      const int64_t first = (n * d.C + c) * d.S;
#pragma omp simd reduction(+ : g_plane, gx_plane)
      for (int64_t i = first; i < first + d.S; ++i) {
        const acc_t grad = load(in.grad_y[i]);
        const acc_t g = in.y ? activate_grad(grad, acc_t(load(in.y[i])), slope) : grad;
        g_plane += g;
        gx_plane += g * ((load(in.x[i]) - mean[c]) * rstd[c]);
      }
      sum_g[c - begin] += double(g_plane);
      sum_gx[c - begin] += double(gx_plane);
    }
}

// One task owns one (t, group of channels), so the order of addition is fixed.
template <typename scalar_t, typename acc_t>
void sums(
    acc_t* out, Inputs<scalar_t> in, const AffineTable<acc_t>& table, Extent d, int64_t T,
    acc_t slope, bool shared) {
  constexpr int64_t kGroup = 64;
  const int64_t groups = ceil_div(d.C, kGroup), numel = d.numel();
  const int64_t grain = 1 + kGrain * d.C / (numel * kGroup + 1);
  st::parallel_for(0, T * groups, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i / groups, begin = i % groups * kGroup,
                    end = std::min(d.C, begin + kGroup);
      double sum_g[kGroup] = {}, sum_gx[kGroup] = {};
      const Inputs<scalar_t> replica = in.replica(t * numel, shared ? 0 : t * numel);
      const acc_t *mean = &table.mean[t * d.C], *rstd = &table.scale[t * d.C];
      add_sums<scalar_t, acc_t>(sum_g, sum_gx, replica, mean, rstd, d, begin, end, slope);
      for (int64_t c = begin; c < end; ++c) {
        out[t * d.C + c] = acc_t(sum_g[c - begin]);
        out[(T + t) * d.C + c] = acc_t(sum_gx[c - begin]);
      }
    }
  });
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

template <typename Statistics>
Gradients backward(
    const Tensor& grad_y_, const std::optional<Tensor>& x_, const std::optional<Tensor>& y_,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight, double eps,
    double slope, bool shared, bool need_x, bool need_residual, bool need_sums) {
  STD_TORCH_CHECK(x_ || !need_sums, "batch_norm_backward: x must be given for the sums");
  STD_TORCH_CHECK(y_ || slope == 1, "batch_norm_backward: y must be given for an activation");
  const MemoryFormat format = format_of(y_ ? *y_ : grad_y_);
  const Extent d = extent_of(grad_y_, format, T, false);
  check_arguments(statistics, grad_y_, T, weight, std::nullopt);
  const Tensor grad_y = with_format(grad_y_, format);
  std::optional<Tensor> x, y;
  if (x_ && need_sums) x = with_format(*x_, format);
  if (y_ && slope != 1) y = with_format(*y_, format);
  if (x) STD_TORCH_CHECK(x->numel() == (shared ? 1 : T) * d.numel(), "batch_norm_backward: bad x");
  if (y) check_same_sizes(*y, grad_y, "batch_norm_backward: y must be like grad_y");

  const int64_t rows = shared ? grad_y.size(0) / T : grad_y.size(0);
  const ScalarType acc = acc_of(grad_y.scalar_type());
  const Tensor none = st::new_empty(grad_y, {0});
  const Tensor grad_x = need_x ? empty_rows(grad_y, rows, format) : none;
  const Tensor grad_residual = need_residual ? empty_rows(grad_y, rows, format) : none;
  const Tensor totals =
      need_sums ? st::new_zeros(grad_y, {2, T, d.C}, acc) : st::new_empty(grad_y, {0}, acc);
  if (d.numel() == 0) return {grad_x, grad_residual, totals};

  dispatch(grad_y.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = typename AccType<scalar_t>::type;
    const Inputs<scalar_t> in = {
        static_cast<const scalar_t*>(grad_y.const_data_ptr()), pointer<scalar_t>(x),
        pointer<scalar_t>(y)};
    if (need_x || need_residual)
      gradients<scalar_t, acc_t>(
          need_x ? static_cast<scalar_t*>(grad_x.mutable_data_ptr()) : nullptr,
          need_residual ? static_cast<scalar_t*>(grad_residual.mutable_data_ptr()) : nullptr, in,
          affine_table<acc_t>(statistics, T, d.C, d.C, weight, std::nullopt, eps), d, T,
          acc_t(slope), shared);
    if (need_sums)
      sums<scalar_t, acc_t>(
          static_cast<acc_t*>(totals.mutable_data_ptr()), in,
          affine_table<acc_t>(statistics, T, d.C, d.C, std::nullopt, std::nullopt, eps), d, T,
          acc_t(slope), shared);
  });
  return {grad_x, grad_residual, totals};
}

Gradients batch_norm_bank_backward_cpu(
    Tensor grad_y, std::optional<Tensor> x, std::optional<Tensor> y, Tensor mean, Tensor var,
    std::optional<Tensor> seed, std::optional<Tensor> snapshot, int64_t num_samples,
    std::optional<Tensor> weight, double eps, double slope, bool shared, bool need_x,
    bool need_residual, bool need_sums) {
  const Bank bank = {mean, var, seed, snapshot};
  return backward(
      grad_y, x, y, bank, num_samples, weight, eps, slope, shared, need_x, need_residual,
      need_sums);
}

Gradients batch_norm_fitted_backward_cpu(
    Tensor grad_y, std::optional<Tensor> x, std::optional<Tensor> y, Tensor params, Tensor seed,
    int64_t stream, int64_t family, int64_t num_samples, std::optional<Tensor> weight, double eps,
    double slope, bool shared, bool need_x, bool need_residual, bool need_sums) {
  const Fitted fitted = {params, seed, stream, family};
  return backward(
      grad_y, x, y, fitted, num_samples, weight, eps, slope, shared, need_x, need_residual,
      need_sums);
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("batch_norm_bank_backward", TORCH_BOX(&batch_norm_bank_backward_cpu));
  m.impl("batch_norm_fitted_backward", TORCH_BOX(&batch_norm_fitted_backward_cpu));
}

}  // namespace
}  // namespace bnuq
