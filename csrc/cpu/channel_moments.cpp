// Mean and biased variance of each channel, added up in float64 from a channel's first number on,
// if that is finite: numbers that are near do not cancel, and equal ones have no variance.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "../arithmetic.h"
#include "../layout.h"
#include "convert.h"
#include "simd.h"

namespace bnuq {
namespace {

namespace st = torch::stable;

constexpr int64_t kGroup = 256;     // channels of a task at most
constexpr int64_t kTask = 1 << 16;  // numbers of a task, about

template <typename scalar_t>
double origin(const scalar_t& first) {
  const double value = load(first);
  return std::isfinite(value) ? value : 0;
}

// A plane of one channel.
template <typename scalar_t>
BNUQ_CLONES void add_plane(
    double& sum, double& squares, double first, const scalar_t* x, int64_t n) {
  double s = 0, q = 0;
#pragma omp simd reduction(+ : s, q)
  for (int64_t i = 0; i < n; ++i) {
    const double d = double(load(x[i])) - first;
    s += d, q += d * d;
  }
  sum += s, squares += q;
}

// A number of each of n channels.
template <typename scalar_t>
BNUQ_CLONES void add_row(
    double* sum, double* squares, const double* first, const scalar_t* x, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) {
    const double d = double(load(x[c])) - first[c];
    sum[c] += d, squares[c] += d * d;
  }
}

// Adds rows [begin, end) of the channels [channel, channel + count) to their sums.
template <typename scalar_t>
void add_rows(
    double* sum, double* squares, const scalar_t* x, Extent d, int64_t channel, int64_t count,
    int64_t begin, int64_t end) {
  double first[kGroup];
  for (int64_t c = 0; c < count; ++c) first[c] = origin(x[(channel + c) * d.S]);
  for (int64_t n = begin; n < end; ++n) {
    const scalar_t* row = x + (n * d.C + channel) * d.S;
    if (d.S == 1) {
      add_row(sum, squares, first, row, count);
      continue;
    }
    for (int64_t c = 0; c < count; ++c) add_plane(sum[c], squares[c], first[c], row + c * d.S, d.S);
  }
}

template <typename scalar_t, typename acc_t>
void moments(acc_t* mean, acc_t* var, const scalar_t* x, Extent d) {
  // By sizes alone, so that the order of addition does not hang on the threads.
  const int64_t most = std::min(d.C, kGroup);
  const int64_t group = d.S == 1 ? most : std::clamp<int64_t>(kTask / d.S, 1, most);
  const int64_t groups = ceil_div(d.C, group);
  const int64_t parts =
      std::clamp<int64_t>(d.N * d.S * group / kTask, 1, std::min<int64_t>(d.N, 64));
  std::vector<double> sums(parts * d.C), squares(parts * d.C);
  st::parallel_for(0, groups * parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t channel = i / parts * group, part = i % parts, at = part * d.C + channel;
      add_rows(
          &sums[at], &squares[at], x, d, channel, std::min(group, d.C - channel),
          d.N * part / parts, d.N * (part + 1) / parts);
    }
  });
  const double count = double(d.N * d.S);
  for (int64_t c = 0; c < d.C; ++c) {
    double s = 0, q = 0;
    for (int64_t at = c; at < parts * d.C; at += d.C) s += sums[at], q += squares[at];
    const double shift = s / count, v = q / count - shift * shift;
    mean[c] = acc_t(origin(x[c * d.S]) + shift);
    var[c] = acc_t(v < 0 ? 0 : v);  // keeps a NaN
  }
}

std::tuple<Tensor, Tensor> channel_moments_cpu(Tensor given) {
  STD_TORCH_CHECK(
      given.dim() >= 2 && given.numel() > 0,
      "channel_moments: x must be (N, C, *), with numbers in it");
  const MemoryFormat format = format_of(given);
  const Tensor x = with_format(given, format);
  const Extent extent = extent_of(x, format, 1, true);
  const ScalarType acc = acc_of(x.scalar_type());
  const Tensor mean = empty(x, {extent.C}, acc), var = empty(x, {extent.C}, acc);
  dispatch<Half, BFloat16>(x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = acc_type<scalar_t>;
    moments(
        mean.mutable_data_ptr<acc_t>(), var.mutable_data_ptr<acc_t>(), pointer<scalar_t>(x),
        extent);
  });
  return {mean, var};
}

STABLE_TORCH_LIBRARY_IMPL(bnuq, CPU, m) {
  m.impl("channel_moments", TORCH_BOX(&channel_moments_cpu));
}

}  // namespace
}  // namespace bnuq
