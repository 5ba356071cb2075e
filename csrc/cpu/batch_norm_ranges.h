// Batch norm, residual and activation over a range of elements of one replica: loops that the
// compiler vectorises; loops written by hand with AVX2 for 16-bit types and for float32 past the
// caches, with AVX-512 for all but float64. On one processor all give the same bits, but for what a
// NaN carries.
#pragma once
#include <algorithm>
#include <type_traits>

#include "../batch_norm.h"
#include "half.h"
#include "runs.h"
#include "simd.h"

namespace bnuq {
namespace {

// One replica's table, and the elements [begin, end) of its (N, C, S) to work on.
template <typename acc_t>
struct Range {
  const acc_t* mean;
  const acc_t* scale;
  const acc_t* bias;
  int64_t width, S, begin, end;
  acc_t slope;
  bool stream;   // whether the result goes past the caches
  bool ordered;  // as the table that it is of

  Runs runs() const { return Runs(begin, end, width, S); }
};

// y, x and residual point to element `begin`; y may be x or residual.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_planes(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
  for (Runs run = range.runs(); run.left > 0; run.next()) {
    const int64_t count = run.count;
    const Affine<acc_t> a = {range.mean[run.c], range.scale[run.c], range.bias[run.c]};
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      acc_t z = normalise(load(x[i]), a);
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, range.slope));
    }
    y += count, x += count;
    if (kResidual) residual += count;
  }
}

// The same for S = 1: a row holds one value of every entry of the table.
template <typename scalar_t, typename acc_t, bool kResidual>
BNUQ_CLONES void forward_rows(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<acc_t> range) {
  for (Runs run = range.runs(); run.left > 0; run.next()) {
    const int64_t c = run.c, count = run.count;
    const acc_t *mean = range.mean + c, *scale = range.scale + c, *bias = range.bias + c;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      acc_t z = normalise(load(x[i]), Affine<acc_t>{mean[i], scale[i], bias[i]});
      if (kResidual) z += load(residual[i]);
      y[i] = store<scalar_t>(activate(z, range.slope));
    }
    y += count, x += count;
    if (kResidual) residual += count;
  }
}

// body(flag...) with flags that are constants to the compiler.
template <typename Body>
void with_constant_flags(const Body& body) {
  body();
}

template <typename Body, typename... Flags>
void with_constant_flags(const Body& body, bool flag, Flags... flags) {
  const auto choose = [&](auto constant) {
    with_constant_flags([&](auto... others) { body(constant, others...); }, flags...);
  };
  flag ? choose(std::true_type()) : choose(std::false_type());
}

template <typename scalar_t, typename acc_t>
void forward_loop(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<acc_t>& range) {
  const auto run = [&](auto rows, auto adds) {
    const auto loop =
        rows ? forward_rows<scalar_t, acc_t, adds> : forward_planes<scalar_t, acc_t, adds>;
    loop(y, x, residual, range);
  };
  with_constant_flags(run, range.S == 1, residual != nullptr);
}

// Through float32 pieces in the first cache: for short planes, for fewer than sixteen elements, and
// for processors without the loops below.
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

template <typename scalar_t, typename acc_t>
void forward_plain(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<acc_t>& range) {
  if constexpr (std::is_same_v<scalar_t, acc_t>)
    forward_loop(y, x, residual, range);
  else
    forward_pieces(y, x, residual, range);
}

#if defined(BNUQ_FMA)
BNUQ_FMA inline __m256 activate_eight(__m256 z, float slope) {
  const __m256 zero = _mm256_setzero_ps();
  if (slope == 0) return _mm256_max_ps(zero, z);  // z where it is NaN or a zero of either sign
  const __m256 below = _mm256_cmp_ps(z, zero, _CMP_LT_OQ);
  return _mm256_blendv_ps(z, _mm256_mul_ps(z, _mm256_set1_ps(slope)), below);
}

// What sixteen elements need: one entry of the table for all, or one each.
struct EightsTable {
  Eights mean, scale, bias;
};

BNUQ_FMA inline Eights same_eights(float v) {
  return {_mm256_set1_ps(v), _mm256_set1_ps(v)};
}

BNUQ_FMA inline EightsTable same_entry(const Range<float>& range, int64_t c) {
  return {same_eights(range.mean[c]), same_eights(range.scale[c]), same_eights(range.bias[c])};
}

template <typename scalar_t, bool kOrdered>
BNUQ_FMA inline EightsTable entries(const Range<float>& range, int64_t c) {
  const auto in = in_order<scalar_t, kOrdered>;
  return {in(range.mean + c), in(range.scale + c), in(range.bias + c)};
}

// Elements i .. i + 15 of a row or plane that begins at entry c.
template <typename scalar_t, bool kRows, bool kOrdered, bool kResidual>
BNUQ_FMA inline Eights forward_eights(
    const scalar_t* x, const scalar_t* residual, const Range<float>& range, int64_t c, int64_t i,
    const EightsTable& same) {
  const EightsTable a = kRows ? entries<scalar_t, kOrdered>(range, c + i) : same;
  Eights z = load_eights(x + i);
  z.first = _mm256_fmadd_ps(_mm256_sub_ps(z.first, a.mean.first), a.scale.first, a.bias.first);
  z.second = _mm256_fmadd_ps(_mm256_sub_ps(z.second, a.mean.second), a.scale.second, a.bias.second);
  if (kResidual) {
    const Eights added = load_eights(residual + i);
    z.first = _mm256_add_ps(z.first, added.first), z.second = _mm256_add_ps(z.second, added.second);
  }
  return {activate_eight(z.first, range.slope), activate_eight(z.second, range.slope)};
}

template <typename scalar_t, bool kRows, bool kOrdered, bool kResidual, bool kStream>
BNUQ_FMA void forward_fma(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<float> range) {
  const auto eights = forward_eights<scalar_t, kRows, kOrdered, kResidual>;
  for (Runs run = range.runs(); run.left > 0; run.next()) {
    const int64_t c = run.c, count = run.count;
    if (count < 16) {
      Range<float> piece = range;
      piece.begin = range.end - run.left, piece.end = piece.begin + count;
      forward_plain(y, x, residual, piece);
    } else {
      const EightsTable same = same_entry(range, c);
      int64_t i = 0;
      for (; i + 32 <= count; i += 16)
        store_eights<kStream>(y + i, eights(x, residual, range, c, i, same));
      // The end overlaps the sixteen before it: read before those are written, for y may be x.
      const Eights last = eights(x, residual, range, c, i, same);
      if (i + 16 < count)
        store_eights<false>(y + count - 16, eights(x, residual, range, c, count - 16, same));
      store_eights<kStream>(y + i, last);
    }
    y += count, x += count;
    if (kResidual) residual += count;
  }
  if (kStream) _mm_sfence();  // before another thread is told
}

template <typename scalar_t>
void forward_fma(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range) {
  // Beside a store past the caches, an end that is not aligned costs more than that store saves.
  const bool aligned = reinterpret_cast<uintptr_t>(y) % 32 == 0 && range.begin % 16 == 0 &&
                       range.runs().length % 16 == 0;
  const auto loop = [&](auto rows, auto ordered, auto adds, auto stream) {
    forward_fma<scalar_t, rows, ordered, adds, stream>(y, x, residual, range);
  };
  with_constant_flags(
      loop, range.S == 1, range.ordered, residual != nullptr, range.stream && aligned);
}
#endif

#if defined(BNUQ_AVX512)
// What sixteen elements need: one entry of the table for all, or one each.
struct Sixteen {
  __m512 mean, scale, bias;
};

BNUQ_AVX512 inline Sixteen sixteen_same(const Range<float>& range, int64_t c) {
  return {
      _mm512_set1_ps(range.mean[c]), _mm512_set1_ps(range.scale[c]), _mm512_set1_ps(range.bias[c])};
}

BNUQ_AVX512 inline Sixteen sixteen_entries(const Range<float>& range, int64_t c, __mmask16 some) {
  return {
      load_sixteen(range.mean + c, some), load_sixteen(range.scale + c, some),
      load_sixteen(range.bias + c, some)};
}

BNUQ_AVX512 inline __m512 activate_sixteen(__m512 z, float slope) {
  const __m512 zero = _mm512_setzero_ps();
  if (slope == 0) return _mm512_max_ps(zero, z);  // z where it is NaN or a zero of either sign
  const __mmask16 below = _mm512_cmp_ps_mask(z, zero, _CMP_LT_OQ);
  return _mm512_mask_mul_ps(z, below, z, _mm512_set1_ps(slope));
}

// Elements i .. i + 15 of a row or plane that begins at entry c; those of them that `some` names.
template <typename scalar_t, bool kRows, bool kResidual, bool kStream>
BNUQ_AVX512 inline void forward_sixteen(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range, int64_t c,
    int64_t i, const Sixteen& same, __mmask16 some) {
  const Sixteen a = kRows ? sixteen_entries(range, c + i, some) : same;
  __m512 z = _mm512_fmadd_ps(_mm512_sub_ps(load_sixteen(x + i, some), a.mean), a.scale, a.bias);
  if (kResidual) z = _mm512_add_ps(z, load_sixteen(residual + i, some));
  store_sixteen<kStream>(y + i, activate_sixteen(z, range.slope), some);
}

// How many elements lie before the first whole sixteen of y.
template <typename scalar_t>
int64_t unaligned(const scalar_t* y) {
  constexpr uintptr_t kBytes = 16 * sizeof(scalar_t);
  return (kBytes - reinterpret_cast<uintptr_t>(y) % kBytes) % kBytes / sizeof(scalar_t);
}

// forward_rows and forward_planes with conversions in registers.
template <typename scalar_t, bool kRows, bool kResidual, bool kStream>
BNUQ_AVX512 void forward_avx512(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, Range<float> range) {
  for (Runs run = range.runs(); run.left > 0; run.next()) {
    const int64_t c = run.c, count = run.count;
    const Sixteen same = sixteen_same(range, c);
    const auto sixteen = forward_sixteen<scalar_t, kRows, kResidual, kStream>;
    int64_t i = kStream ? std::min(count, unaligned(y)) : 0;
    if (i > 0) sixteen(y, x, residual, range, c, 0, same, first_lanes(i));
    for (; i + 16 <= count; i += 16) sixteen(y, x, residual, range, c, i, same, kAllLanes);
    if (i < count) sixteen(y, x, residual, range, c, i, same, first_lanes(count - i));
    y += count, x += count;
    if (kResidual) residual += count;
  }
  if (kStream) _mm_sfence();  // before another thread is told
}

template <typename scalar_t>
void forward_avx512(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<float>& range) {
  // Memory that lies between elements never comes to a whole sixteen.
  const bool aligned = reinterpret_cast<uintptr_t>(y) % sizeof(scalar_t) == 0;
  const auto loop = [&](auto rows, auto adds, auto stream) {
    forward_avx512<scalar_t, rows, adds, stream>(y, x, residual, range);
  };
  with_constant_flags(loop, range.S == 1, residual != nullptr, range.stream && aligned);
}
#endif

// Whether forward_range takes an ordered table best; then all ranges must be of whole sixteens.
template <typename scalar_t>
bool wants_order([[maybe_unused]] int64_t numel, [[maybe_unused]] int64_t width) {
#if defined(BNUQ_FMA)
  if constexpr (std::is_same_v<scalar_t, BFloat16>)
    return numel % 16 == 0 && width % 16 == 0 && has_fma() && !has_avx512();
#endif
  return false;
}

template <typename scalar_t, typename acc_t>
void forward_range(
    scalar_t* y, const scalar_t* x, const scalar_t* residual, const Range<acc_t>& range) {
  // Ends, masked or overlapping, take as long as whole groups: not for short planes.
  [[maybe_unused]] const bool long_runs = range.S == 1 || range.S >= 32;
#if defined(BNUQ_AVX512)
  if constexpr (std::is_same_v<acc_t, float>)
    if (has_avx512() && long_runs) return forward_avx512(y, x, residual, range);
#endif
#if defined(BNUQ_FMA)
  // The compiler's loops over float32 are as fast, but store within the caches.
  if constexpr (std::is_same_v<acc_t, float>)
    if (has_fma() && long_runs && (range.stream || !std::is_same_v<scalar_t, float>))
      return forward_fma(y, x, residual, range);
#endif
  forward_plain(y, x, residual, range);
}

}  // namespace
}  // namespace bnuq
