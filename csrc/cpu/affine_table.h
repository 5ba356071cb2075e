// What the batch-norm kernels of the CPU share: the affine map of every (replica, channel), made
// once a call, and memory for results.
#pragma once
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "../arithmetic.h"
#include "../statistics.h"
#include "convert.h"
#include "pages.h"

namespace bnuq {

// Rows are `width` long: C, or for short rows of a tensor with S = 1 several copies of the C
// channels, so that the loop over a row is long enough, and of sixteens where that can be.
template <typename acc_t>
struct AffineTable {
  int64_t width;
  std::unique_ptr<acc_t[]> mean, scale;  // (T, width)
  std::vector<acc_t> bias;               // (width,)
  bool ordered;                          // see put_in_order
};

inline int64_t table_width(const Extent& d) {
  constexpr int64_t kRow = 512;
  if (d.S != 1 || d.C >= kRow) return d.C;
  const int64_t most = std::min(kRow / d.C, d.N), sixteens = 16 / std::gcd(d.C, int64_t(16));
  return d.C * (most < sixteens ? most : most / sixteens * sixteens);
}

template <typename acc_t, typename Statistics>
AffineTable<acc_t> affine_table(
    const Statistics& statistics, int64_t T, int64_t C, int64_t width,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
    bool ordered = false);

inline Tensor fresh_rows(const Tensor& like, int64_t rows, MemoryFormat format) {
  const Tensor y = empty_rows(like, rows, format);
  prefer_large_pages(y.data_ptr(), y.numel() * int64_t(y.element_size()));
  return y;
}

// Ranges of elements that stay in the second cache while T replicas pass over them.
constexpr int64_t kBlock = 16384;
constexpr int64_t kGrain = 32768;  // elements below which a second thread costs more than it gives

}  // namespace bnuq
