// One element of batch norm, forward, V at a time.
#pragma once
#include "columns.cuh"

namespace bnuq {

template <typename scalar_t>
struct ForwardArgs {
  const scalar_t* x;         // (N, C, S) if shared, else (T, N, C, S)
  const scalar_t* residual;  // like x, or null
  scalar_t* y;               // (T, N, C, S)
  Parameters<acc_type<scalar_t>> par;
  Extents d;
};

// activate() of each, with the slope's cases told apart once: no arithmetic without an activation.
template <typename acc_t, int V>
BNUQ_DEVICE void activate_all(acc_t (&z)[V], acc_t slope) {
  if (slope == acc_t(0)) {
#pragma unroll
    for (int e = 0; e < V; ++e) z[e] = max_or_nan(z[e], acc_t(0));
  } else if (slope != acc_t(1)) {
#pragma unroll
    for (int e = 0; e < V; ++e) z[e] = z[e] < acc_t(0) ? slope * z[e] : z[e];
  }
}

template <typename scalar_t, int V, typename acc_t>
BNUQ_DEVICE void write_elements(
    scalar_t* y, const Pack<scalar_t, V>& x, const Pack<scalar_t, V>& residual, bool has_residual,
    const Affine<acc_t> (&a)[V], acc_t slope) {
  acc_t z[V];
  unpack(x, z);
#pragma unroll
  for (int e = 0; e < V; ++e) z[e] = normalise(z[e], a[e]);
  if (has_residual) {
    acc_t r[V];
    unpack(residual, r);
#pragma unroll
    for (int e = 0; e < V; ++e) z[e] += r[e];
  }
  activate_all(z, slope);
  store_stream(y, z);
}

}  // namespace bnuq
