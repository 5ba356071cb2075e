#include "affine_table.h"

#include "half.h"
#include "noise.h"
#include "simd.h"

namespace bnuq {
namespace {

// NaN of any bits as NAN, which rounded_words asks for.
template <typename acc_t>
acc_t one_nan(acc_t v) {
  return v == v ? v : acc_t(NAN);
}

// A row of C entries from C means and variances.
template <typename acc_t>
BNUQ_CLONES void affine_row(
    acc_t* __restrict__ mean, acc_t* __restrict__ scale, const acc_t* means, const acc_t* vars,
    const acc_t* weight, acc_t eps, int64_t C) {
#pragma omp simd
  for (int64_t c = 0; c < C; ++c) {
    const acc_t* no_bias = nullptr;
    const Affine<acc_t> a = affine(Moments<acc_t>{means[c], vars[c]}, weight, no_bias, c, eps);
    mean[c] = one_nan(a.mean);
    scale[c] = one_nan(a.scale);
  }
}

// body(begin, end) over the replicas; of a folded x as a rule in the thread that will use them.
template <typename Body>
void for_replicas(int64_t T, int64_t C, const Body& body) {
  torch::stable::parallel_for(0, T, 1 + 2048 / (C + 1), body);
}

// Calls row(t, means, vars) with the C means and variances of each replica.
template <typename acc_t, typename Row>
void for_each_row(const Bank& bank, int64_t T, int64_t C, const Row& row) {
  BankSource<acc_t> source = bank.source<acc_t>(C);
  std::vector<int64_t> rows(T);
  if (source.seed) {
    snapshots(rows.data(), source.seed, source.B, T);
    source.snapshot = rows.data();
  }
  const std::vector<acc_t> outside(C, acc_t(NAN));
  for_replicas(T, C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t s = source.row(t);
      row(t, s < 0 ? outside.data() : source.mean + s * C,
          s < 0 ? outside.data() : source.var + s * C);
    }
  });
}

template <typename acc_t, typename Row>
void for_each_row(const Fitted& fitted, int64_t T, int64_t C, const Row& row) {
  const FittedSource<acc_t> source = fitted.source<acc_t>(C);
  const Key mean_key = subkey(source.seed[0], source.stream, kTagMean);
  const Key spread_key = subkey(source.seed[0], source.stream, kTagSpread);
  for_replicas(T, C, [&](int64_t begin, int64_t end) {
    std::vector<float> z_mean(C), z_spread(C);
    std::vector<acc_t> means(C), vars(C);
    for (int64_t t = begin; t < end; ++t) {
      const uint64_t replica = uint64_t(source.row(t));
      vector_normals(z_mean.data(), mean_key, replica, C);
      vector_normals(z_spread.data(), spread_key, replica, C);
      for (int64_t c = 0; c < C; ++c) {
        const Moments<acc_t> m = source.draw(c, acc_t(z_mean[c]), acc_t(z_spread[c]));
        means[c] = m.mean;
        vars[c] = m.var;
      }
      row(t, means.data(), vars.data());
    }
  });
}

// Continues the first C entries of a row periodically.
template <typename acc_t>
void repeat(acc_t* row, int64_t C, int64_t width) {
  for (int64_t c = C; c < width; c += C) std::copy(row, row + C, row + c);
}

template <typename acc_t>
void finish(acc_t* row, int64_t C, int64_t width, bool ordered) {
  repeat(row, C, width);
  if (ordered) put_in_order(row, width);
}

}  // namespace

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, int64_t width,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
    bool ordered) {
  AffineTable<acc_t> table = {
      width, std::unique_ptr<acc_t[]>(new acc_t[T * width]),
      std::unique_ptr<acc_t[]>(new acc_t[T * width]), std::vector<acc_t>(width), ordered};
  // These throw, as nothing may in the threads.
  const acc_t *weights = pointer<acc_t>(weight), *biases = pointer<acc_t>(bias);
  for_each_row<acc_t>(statistics, T, C, [&](int64_t t, const acc_t* means, const acc_t* vars) {
    acc_t *mean = &table.mean[t * width], *scale = &table.scale[t * width];
    affine_row<acc_t>(mean, scale, means, vars, weights, acc_t(eps), C);
    finish(mean, C, width, ordered);
    finish(scale, C, width, ordered);
  });
  if (bias) std::transform(biases, biases + C, table.bias.data(), one_nan<acc_t>);
  finish(table.bias.data(), C, width, ordered);
  return table;
}

#define BNUQ_TABLE(acc_t, Statistics)                                             \
  template AffineTable<acc_t> affine_table<acc_t, Statistics>(                    \
      const Statistics&, int64_t, int64_t, int64_t, const std::optional<Tensor>&, \
      const std::optional<Tensor>&, double, bool);
BNUQ_TABLE(float, Bank)
BNUQ_TABLE(float, Fitted)
BNUQ_TABLE(double, Bank)
BNUQ_TABLE(double, Fitted)

}  // namespace bnuq
