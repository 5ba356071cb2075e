// What the kernels of both backends compute with besides formulas.
#pragma once
#include <cstdint>

namespace bnuq {

template <typename I>
constexpr I ceil_div(I a, I b) {
  return (a + b - 1) / b;
}

// The type of statistics, parameters and sums for activations of scalar_t.
template <typename scalar_t>
struct Acc {
  using type = float;
};
template <>
struct Acc<double> {
  using type = double;
};
template <typename scalar_t>
using acc_type = typename Acc<scalar_t>::type;

}  // namespace bnuq
