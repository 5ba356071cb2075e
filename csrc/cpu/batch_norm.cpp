#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "affine_table.h"
#include "batch_norm_ranges.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

// Bytes moved from which on no cache keeps the result: a store past the caches does not read what
// it overwrites.
constexpr int64_t kCaches = int64_t(64) << 20;

template <typename scalar_t, typename acc_t>
void forward(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const AffineTable<acc_t>& table,
    Extent d, int64_t T, acc_t slope, bool shared) {
  const int64_t numel = d.numel(), blocks = ceil_div(numel, kBlock);
  const int64_t grain = ceil_div(kGrain, std::min(numel, kBlock));
  const int64_t inputs = (shared ? 1 : T) * (residual ? 2 : 1);
  const bool in_place = y == x || y == residual;
  const bool stream = !in_place && (T + inputs) * numel * int64_t(sizeof(scalar_t)) > kCaches;
  // With shared x a block meets all its replicas while it is in the cache.
  st::parallel_for(0, T * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = shared ? i % T : i / blocks;
      const int64_t begin = (shared ? i / T : i % blocks) * kBlock;
      const int64_t source = (shared ? 0 : t * numel) + begin, row = t * table.width;
      const Range<acc_t> range = {
          &table.mean[row],
          &table.scale[row],
          table.bias.data(),
          table.width,
          d.S,
          begin,
          std::min(numel, begin + kBlock),
          slope,
          stream,
          table.ordered};
      forward_range<scalar_t, acc_t>(
          y + t * numel + begin, x + source, residual ? residual + source : nullptr, range);
    }
  });
}

template <typename Statistics>
void forward_into(
    const Tensor& y, const Tensor& given_x, const std::optional<Tensor>& given_residual,
    const Statistics& statistics, int64_t T, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps, double slope, bool shared) {
  const ForwardInputs in =
      forward_inputs(y, given_x, given_residual, statistics, T, weight, bias, shared);
  const Extent d = in.extent;
  if (d.numel() == 0) return;
  dispatch<Half, BFloat16>(in.x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const int64_t width = table_width(d);
    const bool ordered = d.S == 1 && wants_order<scalar_t>(d.numel(), width);
    const AffineTable<acc_t> table =
        affine_table<acc_t>(statistics, T, d.C, width, weight, bias, eps, ordered);
    forward<scalar_t, acc_t>(
        static_cast<scalar_t*>(y.mutable_data_ptr()), pointer<scalar_t>(in.x),
        pointer<scalar_t>(in.residual), table, d, T, acc_t(slope), shared);
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
  const Tensor y = fresh_rows(x, result_rows(x, num_samples, shared), format_of(x));
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
  const Tensor y = fresh_rows(x, result_rows(x, num_samples, shared), format_of(x));
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
