#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "affine_table.h"
#include "half.h"
#include "runs.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

template <typename scalar_t>
struct Inputs {
  const scalar_t* grad_y;
  const scalar_t* y;  // grad_y itself when the slope is 1, for then its value does not matter
  const scalar_t* x;  // null when sums are not needed

  Inputs at(int64_t offset, int64_t x_offset) const {
    return {grad_y + offset, y + offset, x ? x + x_offset : nullptr};
  }
};

template <typename scalar_t, typename acc_t>
BNUQ_HD acc_t grad_at(const Inputs<scalar_t>& in, int64_t i, acc_t slope) {
  return activate_grad(acc_t(load(in.grad_y[i])), acc_t(load(in.y[i])), slope);
}

// ---- grad_x and grad_residual ------------------------------------------------------------------

constexpr int64_t kPiece = 2048;

// One replica's share of grad_x and grad_residual for elements [begin, end) of its (N, C, S).
template <typename acc_t>
struct Share {
  acc_t *grad_x, *grad_residual;  // sums
  const acc_t* scale;             // (C,)
  int64_t C, S, begin, end;
  acc_t slope;

  Runs runs() const { return Runs(begin, end, C, S); }
};

// kFresh: the sums hold nothing yet.
template <typename scalar_t, typename acc_t, bool kFresh>
BNUQ_CLONES void add_planes(Share<acc_t> share, Inputs<scalar_t> in) {
  for (Runs run = share.runs(); run.left > 0; run.next()) {
    const int64_t first = share.end - share.begin - run.left, stop = first + run.count;
    const acc_t scale = share.scale[run.c];
#pragma omp simd
    for (int64_t j = first; j < stop; ++j) {
      const acc_t g = grad_at(in, j, share.slope);
      share.grad_x[j] = (kFresh ? acc_t(0) : share.grad_x[j]) + g * scale;
      share.grad_residual[j] = (kFresh ? acc_t(0) : share.grad_residual[j]) + g;
    }
  }
}

template <typename scalar_t, typename acc_t, bool kFresh>
BNUQ_CLONES void add_rows(Share<acc_t> share, Inputs<scalar_t> in) {
  for (Runs run = share.runs(); run.left > 0; run.next()) {
    const int64_t c = run.c, count = run.count, first = share.end - share.begin - run.left;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const acc_t g = grad_at(in, first + j, share.slope);
      acc_t &grad_x = share.grad_x[first + j], &grad_residual = share.grad_residual[first + j];
      grad_x = (kFresh ? acc_t(0) : grad_x) + g * share.scale[c + j];
      grad_residual = (kFresh ? acc_t(0) : grad_residual) + g;
    }
  }
}

template <typename scalar_t, typename acc_t>
void add_share(const Share<acc_t>& share, const Inputs<scalar_t>& in, bool fresh) {
  const auto loop =
      share.S == 1
          ? (fresh ? add_rows<scalar_t, acc_t, true> : add_rows<scalar_t, acc_t, false>)
          : (fresh ? add_planes<scalar_t, acc_t, true> : add_planes<scalar_t, acc_t, false>);
  loop(share, in);
}

// `in`, or a copy of it in the wider type.
template <typename scalar_t, typename acc_t>
const acc_t* widened([[maybe_unused]] acc_t* copy, const scalar_t* in, [[maybe_unused]] int64_t n) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    return in;
  } else {
    load_all(copy, in, n);
    return copy;
  }
}

template <typename acc_t>
void store_all(acc_t* out, const acc_t* values, int64_t count) {
  std::copy_n(values, count, out);
}

// Either output may be null. With shared x a piece adds up its replicas in their order, straight
// from memory, for there the longer piece counts more than the conversion.
template <typename scalar_t, typename acc_t>
void gradients(
    scalar_t* grad_x, scalar_t* grad_residual, Inputs<scalar_t> in, const AffineTable<acc_t>& table,
    Extent d, int64_t T, acc_t slope, bool shared) {
  // Shorter where widened inputs take their share of the first cache.
  const int64_t length = shared ? kPiece : kPiece / 2;
  const int64_t numel = d.numel(), pieces = ceil_div(numel, length), outputs = shared ? 1 : T;
  const int64_t grain = 1 + kGrain / (length * (shared ? T : 1));
  st::parallel_for(0, outputs * pieces, grain, [&](int64_t a, int64_t b) {
    for (int64_t i = a; i < b; ++i) {
      const int64_t first = i / pieces, last = shared ? T : first + 1;
      const int64_t begin = i % pieces * length, end = std::min(numel, begin + length);
      alignas(64) acc_t sum_x[kPiece], sum_residual[kPiece], grad_y[kPiece], y[kPiece];
      for (int64_t t = first; t < last; ++t) {
        const Share<acc_t> share = {sum_x, sum_residual, &table.scale[t * d.C], d.C, d.S, begin,
                                    end,   slope};
        const Inputs<scalar_t> piece = in.at(t * numel + begin, 0);
        if (shared) {
          add_share(share, piece, t == first);
          continue;
        }
        const Inputs<acc_t> wide = {
            widened(grad_y, piece.grad_y, end - begin), widened(y, piece.y, end - begin), nullptr};
        add_share(share, wide, true);
      }
      const int64_t out = first * numel + begin;
      if (grad_x) store_all(grad_x + out, sum_x, end - begin);
      if (grad_residual) store_all(grad_residual + out, sum_residual, end - begin);
    }
  });
}

// ---- sums --------------------------------------------------------------------------------------

constexpr int64_t kGroup = 64;
constexpr int64_t kRun = 8192;  // elements of a plane that are added up in one number

// Channels [begin, end) of one replica: their sums of g and of g (x - mean) rstd.
template <typename acc_t>
struct Sums {
  double g[kGroup] = {}, gx[kGroup] = {};
  const acc_t *mean, *rstd;  // (C,)
  int64_t begin, end;
  acc_t slope;
};

template <typename scalar_t, typename acc_t>
BNUQ_CLONES void sum_planes(Sums<acc_t>& sums, Inputs<scalar_t> in, Extent d) {
  for (int64_t n = 0; n < d.N; ++n)
    for (int64_t c = sums.begin; c < sums.end; ++c) {
      const int64_t first = (n * d.C + c) * d.S, last = first + d.S;
      const acc_t mean = sums.mean[c], rstd = sums.rstd[c], slope = sums.slope;
      for (int64_t from = first; from < last; from += kRun) {
        const int64_t end = std::min(last, from + kRun);
        acc_t g_slice = 0, gx_slice = 0;
#pragma omp simd reduction(+ : g_slice, gx_slice)
        for (int64_t i = from; i < end; ++i) {
          const acc_t g = grad_at(in, i, slope);
          g_slice += g;
          gx_slice += g * ((load(in.x[i]) - mean) * rstd);
        }
        sums.g[c - sums.begin] += double(g_slice);
        sums.gx[c - sums.begin] += double(gx_slice);
      }
    }
}

// For S = 1. Rows are added up in groups of kGroup, the groups in float64.
template <typename scalar_t, typename acc_t>
BNUQ_CLONES void sum_rows(Sums<acc_t>& sums, Inputs<scalar_t> in, Extent d) {
  const int64_t count = sums.end - sums.begin;
  const acc_t *mean = sums.mean + sums.begin, *rstd = sums.rstd + sums.begin;
  for (int64_t n = 0; n < d.N; n += kGroup) {
    acc_t g_rows[kGroup] = {}, gx_rows[kGroup] = {};
    for (int64_t row = n; row < std::min(d.N, n + kGroup); ++row) {
      const int64_t first = row * d.C + sums.begin;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const acc_t g = grad_at(in, first + i, sums.slope);
        g_rows[i] += g;
        gx_rows[i] += g * ((load(in.x[first + i]) - mean[i]) * rstd[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      sums.g[i] += double(g_rows[i]);
      sums.gx[i] += double(gx_rows[i]);
    }
  }
}

// One task owns one (t, group of channels), so the order of addition is fixed.
template <typename scalar_t, typename acc_t>
void add_sums(
    acc_t* out, Inputs<scalar_t> in, const AffineTable<acc_t>& table, Extent d, int64_t T,
    acc_t slope, bool shared) {
  const int64_t groups = ceil_div(d.C, kGroup), numel = d.numel();
  const int64_t grain = 1 + kGrain * d.C / (numel * kGroup + 1);
  st::parallel_for(0, T * groups, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i / groups;
      Sums<acc_t> sums;
      sums.mean = &table.mean[t * d.C];
      sums.rstd = &table.scale[t * d.C];
      sums.begin = i % groups * kGroup;
      sums.end = std::min(d.C, sums.begin + kGroup);
      sums.slope = slope;
      const Inputs<scalar_t> replica = in.at(t * numel, shared ? 0 : t * numel);
      d.S == 1 ? sum_rows<scalar_t, acc_t>(sums, replica, d)
               : sum_planes<scalar_t, acc_t>(sums, replica, d);
      for (int64_t c = sums.begin; c < sums.end; ++c) {
        out[t * d.C + c] = acc_t(sums.g[c - sums.begin]);
        out[(T + t) * d.C + c] = acc_t(sums.gx[c - sums.begin]);
      }
    }
  });
}

// ---- the op ------------------------------------------------------------------------------------

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

template <typename Statistics>
Gradients backward(
    const Tensor& given_grad_y, const std::optional<Tensor>& given_x,
    const std::optional<Tensor>& given_y, const Statistics& statistics, int64_t T,
    const std::optional<Tensor>& weight, double eps, double slope, bool shared, bool need_x,
    bool need_residual, bool need_sums) {
  const BackwardInputs given = backward_inputs(
      given_grad_y, given_x, given_y, statistics, T, weight, slope, shared, need_sums);
  const Extent d = given.extent;
  const Tensor& grad_y = given.grad_y;
  const ScalarType acc = acc_of(grad_y.scalar_type());
  const auto none = [&] { return st::new_empty(grad_y, {0}); };  // results must not alias
  const Tensor grad_x = need_x ? fresh_rows(grad_y, given.rows, given.format) : none();
  const Tensor grad_residual =
      need_residual ? fresh_rows(grad_y, given.rows, given.format) : none();
  const Tensor totals =
      need_sums ? st::new_zeros(grad_y, {2, T, d.C}, acc) : st::new_empty(grad_y, {0}, acc);
  if (d.numel() == 0) return {grad_x, grad_residual, totals};

  dispatch<Half, BFloat16>(grad_y.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    const scalar_t* grad = pointer<scalar_t>(grad_y);
    const Inputs<scalar_t> in = {
        grad, given.y ? pointer<scalar_t>(given.y) : grad, pointer<scalar_t>(given.x)};
    if (need_x || need_residual)
      gradients<scalar_t, acc_t>(
          need_x ? static_cast<scalar_t*>(grad_x.mutable_data_ptr()) : nullptr,
          need_residual ? static_cast<scalar_t*>(grad_residual.mutable_data_ptr()) : nullptr, in,
          affine_table<acc_t>(statistics, T, d.C, d.C, weight, std::nullopt, eps), d, T,
          acc_t(slope), shared);
    if (need_sums)
      add_sums<scalar_t, acc_t>(
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
