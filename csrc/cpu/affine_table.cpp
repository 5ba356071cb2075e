#include "affine_table.h"

#include "noise.h"
#include "simd.h"

namespace bnuq {
namespace {

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

// Rows of C means and variances for T replicas.
template <typename acc_t>
void fill_moments(
    const Bank& bank, acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) {
  BankSource<acc_t> source = bank.source<acc_t>(C);
  std::vector<int64_t> rows(T);
  if (source.seed) {
    snapshots(rows.data(), source.seed, source.B, T);
    source.snapshot = rows.data();
  }
  for (int64_t t = 0; t < T; ++t) {
    const int64_t row = source.row(t);
    for (int64_t c = 0; c < C; ++c) {
      const Moments<acc_t> m = source.at(row, c);
      means[t * width + c] = m.mean;
      vars[t * width + c] = m.var;
    }
  }
}

template <typename acc_t>
void fill_moments(
    const Fitted& fitted, acc_t* means, acc_t* vars, int64_t T, int64_t C, int64_t width) {
  const FittedSource<acc_t> source = fitted.source<acc_t>(C);
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

}  // namespace

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, int64_t width,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps) {
  AffineTable<acc_t> table = {
      width, std::vector<acc_t>(T * width), std::vector<acc_t>(T * width),
      std::vector<acc_t>(width)};
  fill_moments(statistics, table.mean.data(), table.scale.data(), T, C, width);
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
