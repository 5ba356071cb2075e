#include "affine_table.h"

#include "noise.h"
#include "simd.h"

namespace bnuq {
namespace {

void check_seed(const Tensor& seed) {
  STD_TORCH_CHECK(
      seed.numel() == 2 && seed.scalar_type() == ScalarType::Long && seed.is_contiguous(),
      "bnuq: seed must be int64, contiguous, and have 2 entries");
}

template <typename acc_t>
BNUQ_CLONES void affine_row(
    acc_t* mean, acc_t* var_to_scale, acc_t* bias, const acc_t* weight, const acc_t* given_bias,
    acc_t eps, int64_t C) {
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) {
    const Affine<acc_t> a =
        affine(Moments<acc_t>{mean[c], var_to_scale[c]}, weight, given_bias, c, eps);
    mean[c] = a.mean;
    var_to_scale[c] = a.scale;
    bias[c] = a.bias;
  }
}

// Continues the first C entries of a row periodically.
template <typename acc_t>
void repeat(acc_t* row, int64_t C, int64_t width) {
  for (int64_t c = C; c < width; c += C) std::copy(row, row + C, row + c);
}

}  // namespace

void Bank::check(int64_t T, int64_t C, ScalarType acc) const {
  const int64_t B = mean.size(0);
  STD_TORCH_CHECK(B >= 1, "batch_norm_bank: the bank must not be empty");
  check_table(mean, acc, B, C);
  check_table(var, acc, B, C);
  STD_TORCH_CHECK(
      seed.has_value() != snapshot.has_value(), "batch_norm_bank: give seed or snapshot");
  if (seed) return check_seed(*seed);
  STD_TORCH_CHECK(
      snapshot->numel() == T && snapshot->scalar_type() == ScalarType::Long &&
          snapshot->is_contiguous(),
      "batch_norm_bank: snapshot must be int64, contiguous, and have num_samples entries");
}

template <typename acc_t>
void Bank::fill(acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) const {
  std::vector<int64_t> rows(T);
  if (seed) snapshots(rows.data(), pointer<int64_t>(*seed), mean.size(0), T);
  const BankSource<acc_t> source = {
      pointer<acc_t>(mean),
      pointer<acc_t>(var),
      seed ? rows.data() : pointer<int64_t>(snapshot),
      nullptr,
      mean.size(0),
      C};
  for (int64_t t = 0; t < T; ++t) {
    const int64_t row = source.row(t);
    for (int64_t c = 0; c < C; ++c) {
      const Moments<acc_t> m = source.at(row, c);
      means[t * width + c] = m.mean;
      vars[t * width + c] = m.var;
    }
  }
}

void Fitted::check(int64_t, int64_t C, ScalarType acc) const {
  check_table(params, acc, 4, C);
  check_seed(seed);
}

template <typename acc_t>
void Fitted::fill(acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) const {
  const FittedSource<acc_t> source = {
      pointer<acc_t>(params), pointer<int64_t>(seed), uint32_t(stream), int(family), C};
  std::vector<float> z_mean(C), z_spread(C);
  for (int64_t t = 0; t < T; ++t) {
    const uint64_t replica = uint64_t(source.row(t));
    vector_normals(z_mean.data(), subkey(source.seed[0], source.stream, kTagMean), replica, C);
    vector_normals(z_spread.data(), subkey(source.seed[0], source.stream, kTagSpread), replica, C);
    for (int64_t c = 0; c < C; ++c) {
      const Moments<acc_t> m = source.draw(c, acc_t(z_mean[c]), acc_t(z_spread[c]));
      means[t * width + c] = m.mean;
      vars[t * width + c] = m.var;
    }
  }
}

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, int64_t width,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps) {
  AffineTable<acc_t> table = {
      width, std::vector<acc_t>(T * width), std::vector<acc_t>(T * width),
      std::vector<acc_t>(width)};
  statistics.fill(table.mean.data(), table.scale.data(), T, C, width);
  for (int64_t t = 0; t < T; ++t) {
    acc_t *mean = &table.mean[t * width], *scale = &table.scale[t * width];
    affine_row<acc_t>(
        mean, scale, table.bias.data(), pointer<acc_t>(weight), pointer<acc_t>(bias), acc_t(eps),
        C);
    repeat(mean, C, width);
    repeat(scale, C, width);
  }
  repeat(table.bias.data(), C, width);
  return table;
}

#define BNUQ_TABLE(acc_t, Statistics)                                             \
  template AffineTable<acc_t> affine_table<acc_t, Statistics>(                    \
      const Statistics&, int64_t, int64_t, int64_t, const std::optional<Tensor>&, \
      const std::optional<Tensor>&, double);
BNUQ_TABLE(float, Bank)
BNUQ_TABLE(float, Fitted)
BNUQ_TABLE(double, Bank)
BNUQ_TABLE(double, Fitted)

}  // namespace bnuq
