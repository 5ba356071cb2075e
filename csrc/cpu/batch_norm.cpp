#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "affine_table.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

template <typename acc_t>
struct ReplicaAffine {
  const acc_t* mean;
  const acc_t* scale;
  const acc_t* bias;
};

// Elements [begin, end) of one replica's (N, C, S). x, residual and y point to element 0.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_planes(
    scalar_t* __restrict__ y, const scalar_t* x, const scalar_t* residual,
    ReplicaAffine<acc_t> table, Extent d, int64_t begin, int64_t end, acc_t slope) {
  for (int64_t plane = begin / d.S; begin < end; ++plane) {
    const int64_t c = plane % d.C, stop = std::min(end, (plane + 1) * d.S);
    const Affine<acc_t> a = {table.mean[c], table.scale[c], table.bias[c]};
#pragma omp simd
    for (int64_t i = begin; i < stop; ++i) {
      acc_t z = normalise(load(x[i]), a);
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, slope));
    }
    begin = stop;
  }
}

// The same for S = 1: a row holds one value of every channel.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_rows(
    scalar_t* __restrict__ y, const scalar_t* x, const scalar_t* residual,
    ReplicaAffine<acc_t> table, Extent d, int64_t begin, int64_t end, acc_t slope) {
  for (int64_t row = begin / d.C; begin < end; ++row) {
    const int64_t first = row * d.C, stop = std::min(end, first + d.C);
#pragma omp simd
    for (int64_t i = begin; i < stop; ++i) {
      const int64_t c = i - first;
      acc_t z = normalise(load(x[i]), Affine<acc_t>{table.mean[c], table.scale[c], table.bias[c]});
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, slope));
    }
    begin = stop;
  }
}

template <typename scalar_t, typename acc_t>
void forward(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const AffineTable<acc_t>& table,
    Extent d, int64_t T, acc_t slope, bool shared) {
  const auto planes =
      residual ? forward_planes<scalar_t, acc_t, true> : forward_planes<scalar_t, acc_t, false>;
  const auto rows =
      residual ? forward_rows<scalar_t, acc_t, true> : forward_rows<scalar_t, acc_t, false>;
  const auto body = d.S == 1 ? rows : planes;
  const int64_t numel = d.numel(), blocks = ceil_div(numel, kBlock);
  // With shared x a block meets all its replicas while it is in the cache.
  st::parallel_for(0, T * blocks, kGrain / kBlock, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = shared ? i % T : i / blocks, block = shared ? i / T : i % blocks;
      const int64_t source = shared ? 0 : t * numel;
      const ReplicaAffine<acc_t> replica = {
          &table.mean[t * d.C], &table.scale[t * d.C], table.bias.data()};
      body(
          y + t * numel, x + source, residual ? residual + source : nullptr, replica, d,
          block * kBlock, std::min(numel, (block + 1) * kBlock), slope);
    }
  });
}

template <typename Statistics>
void forward_into(
    const Tensor& y, const Tensor& x_, const std::optional<Tensor>& residual_,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps, double slope, bool shared) {
  const MemoryFormat format = format_of(x_);
  const Extent d = extent_of(x_, format, T, shared);
  check_arguments(statistics, x_, T, weight, bias);
  if (residual_) check_same_sizes(*residual_, x_, "batch_norm: residual must be like x");
  STD_TORCH_CHECK(
      has_format(y, format) && y.numel() == T * d.numel() && y.scalar_type() == x_.scalar_type(),
      "batch_norm: out must have the shape, dtype and memory format of the result");
  if (d.numel() == 0) return;
  const Tensor x = with_format(x_, format);
  std::optional<Tensor> residual;
  if (residual_) residual = with_format(*residual_, format);
  dispatch(x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = typename AccType<scalar_t>::type;
    forward<scalar_t, acc_t>(
        static_cast<scalar_t*>(y.mutable_data_ptr()),
        static_cast<const scalar_t*>(x.const_data_ptr()), pointer<scalar_t>(residual),
        affine_table<acc_t>(statistics, T, d.C, weight, bias, eps), d, T, acc_t(slope), shared);
  });
}

void batch_norm_bank_out_cpu(
    Tensor out, Tensor x, Tensor mean, Tensor var, std::optional<Tensor> seed,
    std::optional<Tensor> snapshot, int64_t num_samples, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> residual, double eps, double slope,
    bool shared) {
  const Bank bank = {mean, var, seed, snapshot};
  forward_into(out, x, residual, bank, num_samples, weight, bias, eps, slope, shared);
}

Tensor batch_norm_bank_cpu(
    Tensor x, Tensor mean, Tensor var, std::optional<Tensor> seed, std::optional<Tensor> snapshot,
    int64_t num_samples, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> residual, double eps, double slope, bool shared) {
  const Bank bank = {mean, var, seed, snapshot};
  const Tensor y = empty_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
  forward_into(y, x, residual, bank, num_samples, weight, bias, eps, slope, shared);
  return y;
}

void batch_norm_fitted_out_cpu(
    Tensor out, Tensor x, Tensor params, Tensor seed, int64_t stream, int64_t family,
    int64_t num_samples, std::optional<Tensor> weight, std::optional<Tensor> bias,
    std::optional<Tensor> residual, double eps, double slope, bool shared) {
  const Fitted fitted = {params, seed, stream, family};
  forward_into(out, x, residual, fitted, num_samples, weight, bias, eps, slope, shared);
}

Tensor batch_norm_fitted_cpu(
    Tensor x, Tensor params, Tensor seed, int64_t stream, int64_t family, int64_t num_samples,
    std::optional<Tensor> weight, std::optional<Tensor> bias, std::optional<Tensor> residual,
    double eps, double slope, bool shared) {
  const Fitted fitted = {params, seed, stream, family};
  const Tensor y = empty_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
  forward_into(y, x, residual, fitted, num_samples, weight, bias, eps, slope, shared);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("batch_norm_bank", TORCH_BOX(&batch_norm_bank_cpu));
  m.impl("batch_norm_bank_out", TORCH_BOX(&batch_norm_bank_out_cpu));
  m.impl("batch_norm_fitted", TORCH_BOX(&batch_norm_fitted_cpu));
  m.impl("batch_norm_fitted_out", TORCH_BOX(&batch_norm_fitted_out_cpu));
}

}  // namespace
}  // namespace bnuq
