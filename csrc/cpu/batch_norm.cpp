#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <type_traits>

#include "affine_table.h"
#include "half.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

// Bytes moved from which on no cache keeps the result: a store past the caches does not read what
// it overwrites.
constexpr int64_t kCaches = int64_t(64) << 20;

// One replica's table, and the elements [begin, end) of its (N, C, S) to work on.
template <typename acc_t>
struct Range {
  const acc_t* mean;
  const acc_t* scale;
  const acc_t* bias;
  int64_t width, S, begin, end;
  acc_t slope;
  bool stream;  // whether the result goes past the caches
};

// y, x and residual point to element `begin`; y may be x or residual.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_planes(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
  int64_t begin = range.begin;
  for (int64_t plane = begin / range.S; begin < range.end; ++plane) {
    const int64_t c = plane % range.width;
    const int64_t count = std::min(range.end, (plane + 1) * range.S) - begin;
    const Affine<acc_t> a = {range.mean[c], range.scale[c], range.bias[c]};
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      acc_t z = normalise(load(x[i]), a);
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, range.slope));
    }
    begin += count, y += count, x += count;
    if (kResidual) residual += count;
  }
}

// The same for S = 1: a row holds one value of every entry of the table.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_rows(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
  int64_t begin = range.begin;
  while (begin < range.end) {
    const int64_t c = begin % range.width, count = std::min(range.end - begin, range.width - c);
    const acc_t *mean = range.mean + c, *scale = range.scale + c, *bias = range.bias + c;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      acc_t z = normalise(load(x[i]), Affine<acc_t>{mean[i], scale[i], bias[i]});
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, range.slope));
    }
    begin += count, y += count, x += count;
    if (kResidual) residual += count;
  }
}

template <typename scalar_t, typename acc_t>
void forward_loop(scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
  const auto loop =
      range.S == 1
          ? (residual ? forward_rows<scalar_t, acc_t, true> : forward_rows<scalar_t, acc_t, false>)
          : (residual ? forward_planes<scalar_t, acc_t, true>
                      : forward_planes<scalar_t, acc_t, false>);
  loop(y, x, residual, range);
}

// Through float32 pieces in the first cache, where a loop ends with fewer single elements than one
// over 32 lanes of a short plane, and where the processor converts float16.
template <typename half_t>
void forward_pieces(half_t* y, const half_t* x, const half_t* residual, const Range<float>& range) {
  constexpr int64_t kPiece = 1024;
  alignas(64) float values[kPiece], added[kPiece];
  Range<float> piece = range;
  while (piece.begin < range.end) {
    piece.end = std::min(range.end, piece.begin + kPiece);
    const int64_t first = piece.begin - range.begin, size = piece.end - piece.begin;
    load_all(values, x + first, size);
    if (residual) load_all(added, residual + first, size);
    forward_loop<float, float>(values, values, residual ? added : nullptr, piece);
    store_all(y + first, values, size);
    piece.begin = piece.end;
  }
}

#if defined(BNUQ_AVX512)
// What sixteen elements need: one entry of the table for all, or one each.
struct Lanes {
  __m512 mean, scale, bias;
};

BNUQ_AVX512 inline Lanes same_entry(const Range<float>& range, int64_t c) {
  return {
      _mm512_set1_ps(range.mean[c]), _mm512_set1_ps(range.scale[c]), _mm512_set1_ps(range.bias[c])};
}

BNUQ_AVX512 inline Lanes entries(const Range<float>& range, int64_t c, __mmask16 some) {
  return {
      load_lanes(range.mean + c, some), load_lanes(range.scale + c, some),
      load_lanes(range.bias + c, some)};
}

BNUQ_AVX512 inline __m512 activate_lanes(__m512 z, float slope) {
  const __m512 zero = _mm512_setzero_ps();
  if (slope == 0) return _mm512_max_ps(zero, z);  // z where it is NaN or a zero of either sign
  const __mmask16 below = _mm512_cmp_ps_mask(z, zero, _CMP_LT_OQ);
  return _mm512_mask_mul_ps(z, below, z, _mm512_set1_ps(slope));
}

// Elements i .. i + 15 of a row or plane that begins at entry c; those of them that `some` names.
template <typename scalar_t, bool kResidual, bool kRows, bool kStream>
BNUQ_AVX512 inline void forward_lanes(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range, int64_t c,
    int64_t i, const Lanes& same, __mmask16 some) {
  const Lanes a = kRows ? entries(range, c + i, some) : same;
  __m512 z = _mm512_fmadd_ps(_mm512_sub_ps(load_lanes(x + i, some), a.mean), a.scale, a.bias);
  if (kResidual) z = _mm512_add_ps(z, load_lanes(residual + i, some));
  store_lanes<kStream>(y + i, activate_lanes(z, range.slope), some);
}

// How many elements lie before the first whole sixteen of y.
template <typename scalar_t>
int64_t unaligned(const scalar_t* y) {
  constexpr uintptr_t kBytes = 16 * sizeof(scalar_t);
  return (kBytes - reinterpret_cast<uintptr_t>(y) % kBytes) % kBytes / sizeof(scalar_t);
}

// forward_rows and forward_planes with conversions in registers.
template <typename scalar_t, bool kResidual, bool kRows, bool kStream>
BNUQ_AVX512 void forward_avx512(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<float> range) {
  for (int64_t begin = range.begin; begin < range.end;) {
    const int64_t plane = begin / range.S, c = plane % range.width;
    const int64_t stop = kRows ? begin - c + range.width : (plane + 1) * range.S;
    const int64_t count = std::min(range.end, stop) - begin;
    const Lanes same = same_entry(range, c);
    const auto lanes = forward_lanes<scalar_t, kResidual, kRows, kStream>;
    int64_t i = kStream ? std::min(count, unaligned(y)) : 0;
    if (i > 0) lanes(y, x, residual, range, c, 0, same, first_lanes(i));
    for (; i + 16 <= count; i += 16) lanes(y, x, residual, range, c, i, same, kAllLanes);
    if (i < count) lanes(y, x, residual, range, c, i, same, first_lanes(count - i));
    begin += count, y += count, x += count;
    if (kResidual) residual += count;
  }
  if (kStream) _mm_sfence();  // before another thread is told
}

template <typename scalar_t, bool kResidual, bool kRows>
void forward_avx512(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range) {
  const auto loop = range.stream ? forward_avx512<scalar_t, kResidual, kRows, true>
                                 : forward_avx512<scalar_t, kResidual, kRows, false>;
  loop(y, x, residual, range);
}

template <typename scalar_t>
void forward_avx512(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range) {
  const auto loop = range.S == 1 ? (residual ? forward_avx512<scalar_t, true, true>
                                             : forward_avx512<scalar_t, false, true>)
                                 : (residual ? forward_avx512<scalar_t, true, false>
                                             : forward_avx512<scalar_t, false, false>);
  loop(y, x, residual, range);
}
#endif

template <typename scalar_t, typename acc_t>
void forward_range(scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
#if defined(BNUQ_AVX512)
  // A masked end takes as long as several whole ones: not for short planes.
  if constexpr (std::is_same_v<acc_t, float>)
    if (has_avx512() && (range.S == 1 || range.S >= 32))
      return forward_avx512(y, x, residual, range);
#endif
  if constexpr (std::is_same_v<scalar_t, acc_t>)
    forward_loop(y, x, residual, range);
  else
    forward_pieces(y, x, residual, range);
}

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
          stream};
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
  dispatch(in.x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = typename AccType<scalar_t>::type;
    forward<scalar_t, acc_t>(
        static_cast<scalar_t*>(y.mutable_data_ptr()), pointer<scalar_t>(in.x),
        pointer<scalar_t>(in.residual),
        affine_table<acc_t>(statistics, T, d.C, table_width(d), weight, bias, eps), d, T,
        acc_t(slope), shared);
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
  const Tensor y = fresh_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
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
  const Tensor y = fresh_rows(x, x.size(0) * (shared ? num_samples : 1), format_of(x));
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
