// batch_norm_bank of folded x, forward: threads without a place of their own, for which nothing waits.
//
// Two vectors of 16 bytes a thread, in blocks that end at once. Measured on an H200: more of them or
// longer blocks are no faster, fewer registers than 64 spill. Maps of channels cost loads that the
// first cache has, so that no thread makes one for others.
#pragma once
#include "batch_norm_elements.cuh"

namespace bnuq {

constexpr int kVectors = 2;

// n / divisor by a multiplication, n below 2^31: a division is some twenty instructions.
struct Divider {
  uint32_t divisor, multiplier;
  int shift;

  explicit Divider(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
  BNUQ_DEVICE uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
  BNUQ_DEVICE uint32_t rest(uint32_t n) const { return n - quotient(n) * divisor; }
};

// A vector lies in one plane of S elements, or, for S = 1, its elements are neighbouring channels.
struct VectorsPlan {
  dim3 grid, block;
  bool planes;
  uint32_t vectors;   // of a replica
  Divider per_plane;  // vectors
  Divider channels;   // of a row; for S = 1 vectors of them
};

// Whether there is one.
inline bool has_vectors(Extents d, int V) {
  const bool planes = d.S % V == 0, row = d.S == 1 && d.C % V == 0 && d.C / V <= kThreads;
  return (planes || row) && d.N * d.C * d.S / V < int64_t(1) << 30;
}

inline VectorsPlan plan_vectors(Extents d, int V) {
  const bool planes = d.S % V == 0;
  const uint32_t row = uint32_t(planes ? d.C : d.C / V);
  // A thread keeps its channels where the threads of a block are whole rows.
  const unsigned threads = planes ? kThreads : kThreads / row * row;
  const int64_t vectors = d.N * d.C * d.S / V;
  const unsigned blocks = unsigned(ceil_div<int64_t>(vectors, int64_t(threads) * kVectors));
  return {
      dim3(blocks, unsigned(smaller<int64_t>(d.T, 65535))),
      dim3(threads),
      planes,
      uint32_t(vectors),
      Divider(uint32_t(planes ? d.S / V : 1)),
      Divider(row)};
}

// Whether vectors of parameters can be read, as rows of them are for S = 1; else they are those of
// a view.
template <typename acc_t>
bool has_runs(const BankSource<acc_t>& source, const Parameters<acc_t>& par) {
  return aligned(source.mean) && aligned(source.var) && aligned(par.weight) && aligned(par.bias);
}

// V numbers of a run that is aligned, or `none` for null.
template <int V, typename acc_t>
BNUQ_DEVICE void load_run(acc_t (&v)[V], const acc_t* run, int64_t at, acc_t none) {
  constexpr int kEach = smaller(V, kVector<acc_t>);
#pragma unroll
  for (int e = 0; e < V; e += kEach) {
    acc_t part[kEach];
    if (run) unpack(load_again<kEach>(run + at + e), part);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[e + i] = run ? part[i] : none;
  }
}

// The maps of V neighbouring channels.
template <int V, typename acc_t>
BNUQ_DEVICE void row_maps(
    Affine<acc_t> (&a)[V], const BankSource<acc_t>& source, const Parameters<acc_t>& par,
    int64_t row, int64_t c) {
  acc_t mean[V], var[V], weight[V], bias[V];
  const bool inside = row >= 0;
  load_run(mean, inside ? source.mean : nullptr, row * source.C + c, acc_t(NAN));
  load_run(var, inside ? source.var : nullptr, row * source.C + c, acc_t(NAN));
  load_run(weight, par.weight, c, acc_t(1));
  load_run(bias, par.bias, c, acc_t(0));
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = affine<acc_t>({mean[e], var[e]}, weight, bias, e, par.eps);
}

template <typename scalar_t, bool kPlanes>
__global__ void __launch_bounds__(kThreads, sizeof(scalar_t) == 8 ? 2 : 4) vectors_kernel(
    ForwardArgs<scalar_t> args, BankSource<acc_type<scalar_t>> source, VectorsPlan p) {
  using acc_t = acc_type<scalar_t>;
  constexpr int V = kVector<scalar_t>;
  const uint32_t first = blockIdx.x * (blockDim.x * kVectors) + threadIdx.x;
  for (int64_t t = blockIdx.y; t < args.d.T; t += gridDim.y) {
    const int64_t start = t * p.vectors;
    Pack<scalar_t, V> x[kVectors], residual[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = first + u * blockDim.x;
      if (vector >= p.vectors) break;
      x[u] = load_stream<V>(args.x + (start + vector) * V);
      if (args.residual) residual[u] = load_stream<V>(args.residual + (start + vector) * V);
    }
    const int64_t row = source.row(t);
    Affine<acc_t> a[V];
    if (!kPlanes) row_maps(a, source, args.par, row, p.channels.rest(first) * V);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = first + u * blockDim.x;
      if (vector >= p.vectors) break;
      if (kPlanes) {
        const uint32_t c = p.channels.rest(p.per_plane.quotient(vector));
        const Affine<acc_t> one =
            affine(source.at(row, c), args.par.weight, args.par.bias, c, args.par.eps);
#pragma unroll
        for (int e = 0; e < V; ++e) a[e] = one;
      }
      write_elements(
          args.y + (start + vector) * V, x[u], residual[u], args.residual != nullptr, a,
          args.par.slope);
    }
  }
}

template <typename scalar_t>
void run_vectors(
    const ForwardArgs<scalar_t>& args, const BankSource<acc_type<scalar_t>>& source,
    cudaStream_t stream) {
  const VectorsPlan p = plan_vectors(args.d, kVector<scalar_t>);
  const auto kernel = p.planes ? vectors_kernel<scalar_t, true> : vectors_kernel<scalar_t, false>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, 0, stream, args, source, p);
}

}  // namespace bnuq
