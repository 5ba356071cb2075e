// batch_norm, backward. With g = act'(y) * grad_y:
//   grad_x = g * scale, grad_residual = g (each summed over the replicas if x is shared),
//   sums = (sum_{n,s} g, sum_{n,s} g * (x - mean) * rstd) for each (t, c).
//
// Floor: bytes. Gradients: grad_y (and y, with an activation) read once, each result written once;
// sums: grad_y, y and x read once. All go over columns (see columns.cuh). A sum's order is fixed: a
// thread over its rows, a block over its threads, one warp over the blocks; no atomics.
//
// The statistics are a bank: launchers write those that are fitted into a (T, C) bank first.
#pragma once
#include "columns.cuh"

namespace bnuq {

constexpr int kGradUnroll = 4;
constexpr int kSharedGradUnroll = 2;   // each row has V accumulators for each result
constexpr unsigned kFinishUnroll = 8;  // loads in flight: a long batch has few warps here

template <typename scalar_t>
struct BackwardArgs {
  const scalar_t* grad_y;   // (T, N, C, S)
  const scalar_t* y;        // like grad_y; null where the slope is 1
  const scalar_t* x;        // (N, C, S) if shared, else (T, N, C, S); null without sums
  scalar_t* grad_x;         // like x, or null
  scalar_t* grad_residual;  // like x, or null
  Parameters<acc_type<scalar_t>> par;
  Extents d;
};

// (mean, var) (T, C) of a fitted source, and the row of each replica in them: itself.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads) fitted_moments_kernel(
    FittedSource<acc_t> source, acc_t* __restrict__ mean, acc_t* __restrict__ var,
    int64_t* __restrict__ snapshot, int64_t T) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= T * source.C) return;
  const int64_t t = i / source.C, c = i % source.C;
  const Moments<acc_t> m = source.at(source.row(t), c);
  mean[i] = m.mean;
  var[i] = m.var;
  if (c == 0) snapshot[t] = t;
}

// g of V neighbours.
template <typename scalar_t, int V>
BNUQ_DEVICE void gradient(
    acc_type<scalar_t> (&g)[V], const Pack<scalar_t, V>& grad_y, const Pack<scalar_t, V>& y,
    bool has_y, acc_type<scalar_t> slope) {
  unpack(grad_y, g);
  if (!has_y) return;
  acc_type<scalar_t> out[V];
  unpack(y, out);
#pragma unroll
  for (int e = 0; e < V; ++e) g[e] = activate_grad(g[e], out[e], slope);
}

// ---- grad_x and grad_residual ------------------------------------------------------------------

// One block per (replica, row chunk, tile).
template <typename scalar_t, int V>
__global__ void __launch_bounds__(kThreads, 3) gradients_kernel(
    BackwardArgs<scalar_t> args, BankSource<acc_type<scalar_t>> source, ColumnsPlan p) {
  using acc_t = acc_type<scalar_t>;
  BNUQ_DYNAMIC_SHARED(acc_t, table);
  BNUQ_SHARED(int64_t, rows_of, [kTableReplicas]);
  const Extents d = args.d;
  const Place place(p);
  const int64_t t = place.t, length = d.C * d.S;
  find_rows(rows_of, source, t, 1);
  const Column<V> column(p, place.tile, d.C, d.S);
  const int64_t end = column.active ? smaller(d.N, (place.chunk + 1) * p.rows_per_block) : 0;
  const int64_t step = blockDim.y * length;
  int64_t n = place.chunk * p.rows_per_block + threadIdx.y;
  int64_t at = (t * d.N + n) * length + column.element;

  Pack<scalar_t, V> grad_y[kGradUnroll], y[kGradUnroll];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      grad_y[u] = load_stream<V>(args.grad_y + at + u * step);
      if (args.y) y[u] = load_stream<V>(args.y + at + u * step);
    }
  };
  load();
  fill_table(table, rows_of, p, column, source, args.par, 1);
  int slot[V];
  column.find_slots(slot);
  acc_t scale[V];
#pragma unroll
  for (int e = 0; e < V; ++e) scale[e] = column.active ? table[p.slots + slot[e]] : acc_t(0);
  while (n < end) {
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      acc_t g[V];
      gradient(g, grad_y[u], y[u], args.y != nullptr, args.par.slope);
      if (args.grad_residual) store_stream(args.grad_residual + at + u * step, g);
#pragma unroll
      for (int e = 0; e < V; ++e) g[e] *= scale[e];
      if (args.grad_x) store_stream(args.grad_x + at + u * step, g);
    }
    n += kGradUnroll * int64_t(blockDim.y);
    at += kGradUnroll * step;
    load();
  }
}

// One block per (row chunk, tile): a thread sums over the replicas, in their order.
template <typename scalar_t, int V>
__global__ void __launch_bounds__(kThreads, 2) shared_gradients_kernel(
    BackwardArgs<scalar_t> args, BankSource<acc_type<scalar_t>> source, ColumnsPlan p) {
  using acc_t = acc_type<scalar_t>;
  BNUQ_DYNAMIC_SHARED(acc_t, table);
  BNUQ_SHARED(int64_t, rows_of, [kTableReplicas]);
  const Extents d = args.d;
  const Place place(p);
  const int64_t length = d.C * d.S;
  const Column<V> column(p, place.tile, d.C, d.S);
  const int64_t n = place.chunk * p.rows_per_block + threadIdx.y, rows = d.N - n;
  const int64_t at = n * length + column.element, step = blockDim.y * length;
  int count = 0;  // rows of this thread
  if (column.active && rows > 0)
    count = int(smaller<int64_t>(kSharedGradUnroll, ceil_div<int64_t>(rows, blockDim.y)));
  int slot[V];
  column.find_slots(slot);

  acc_t grad_x[kSharedGradUnroll][V] = {}, grad_residual[kSharedGradUnroll][V] = {};
  int64_t from = at;
  for (int64_t t0 = 0; t0 < d.T; t0 += p.replicas) {
    const int replicas = int(smaller<int64_t>(p.replicas, d.T - t0));
    find_rows(rows_of, source, t0, replicas);
    fill_table(table, rows_of, p, column, source, args.par, replicas);
    if (count == 0) continue;
    for (int j = 0; j < replicas; ++j, from += d.N * length) {
      Pack<scalar_t, V> grad_y[kSharedGradUnroll], y[kSharedGradUnroll];
#pragma unroll
      for (int u = 0; u < kSharedGradUnroll; ++u) {
        if (u >= count) break;
        grad_y[u] = load_stream<V>(args.grad_y + from + u * step);
        if (args.y) y[u] = load_stream<V>(args.y + from + u * step);
      }
      const acc_t* run = table + (j * 3 + 1) * p.slots;
#pragma unroll
      for (int u = 0; u < kSharedGradUnroll; ++u) {
        if (u >= count) break;
        acc_t g[V];
        gradient(g, grad_y[u], y[u], args.y != nullptr, args.par.slope);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          grad_residual[u][e] += g[e];
          grad_x[u][e] += g[e] * run[slot[e]];
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kSharedGradUnroll; ++u) {
    if (u >= count) break;
    if (args.grad_x) store_stream(args.grad_x + at + u * step, grad_x[u]);
    if (args.grad_residual) store_stream(args.grad_residual + at + u * step, grad_residual[u]);
  }
}

// ---- sums --------------------------------------------------------------------------------------

// Adds a block's `sum` of V places a thread to one number a channel of the tile. Every thread
// calls.
template <typename acc_t, int V>
BNUQ_DEVICE void block_sums(
    acc_t* out, acc_t* scratch, const Column<V>& column, const acc_t (&sum)[V]) {
  const int by = blockDim.y, length = blockDim.x * V, thread = block_thread();
  __syncthreads();  // the scratch is free
#pragma unroll
  for (int e = 0; e < V; ++e) scratch[slot_of(thread * V + e)] = sum[e];
  __syncthreads();
  const int widest = smaller(column.period, length);
  const bool by_warp = widest * by >= 2 * kWarp;
  const int lanes = by_warp ? kWarp : 1, lane = thread % lanes;
  const int teams = block_threads() / lanes, team = thread / lanes;
  if (team == teams) return;  // lanes of an incomplete warp
  for (int k = team; k < column.channels; k += teams) {
    const int first = k == 0 ? 0 : column.left + (k - 1) * column.period;
    const int last = smaller(length, column.left + k * column.period), span = last - first;
    acc_t total = 0;
    for (int i = lane; i < span * by; i += lanes)
      total += scratch[slot_of(i / span * length + first + i % span)];
    if (by_warp) total = lanes_sum(total);
    if (lane == 0) out[k] = total;
  }
}

// One block per (replica, row chunk, tile); partial (2, T, chunks, tiles, p.channels).
template <typename scalar_t, int V>
__global__ void __launch_bounds__(kThreads, 2) sums_kernel(
    BackwardArgs<scalar_t> args, BankSource<acc_type<scalar_t>> source,
    acc_type<scalar_t>* __restrict__ partial, ColumnsPlan p, bool shared) {
  using acc_t = acc_type<scalar_t>;
  BNUQ_DYNAMIC_SHARED(acc_t, table);
  BNUQ_SHARED(int64_t, rows_of, [kTableReplicas]);
  const Extents d = args.d;
  const Place place(p);
  const int64_t t = place.t, length = d.C * d.S;
  const Column<V> column(p, place.tile, d.C, d.S);
  const int64_t end = column.active ? smaller(d.N, (place.chunk + 1) * p.rows_per_block) : 0;
  const int64_t step = blockDim.y * length, replica = shared ? 0 : t * d.N * length;

  const Parameters<acc_t> plain = {nullptr, nullptr, args.par.eps, 0};  // the scale is rstd
  find_rows(rows_of, source, t, 1);
  fill_table(table, rows_of, p, column, source, plain, 1);
  int slot[V];
  column.find_slots(slot);
  acc_t mean[V], rstd[V], sum_g[V] = {}, sum_gx[V] = {};
#pragma unroll
  for (int e = 0; e < V; ++e) {
    mean[e] = column.active ? table[slot[e]] : acc_t(0);
    rstd[e] = column.active ? table[p.slots + slot[e]] : acc_t(0);
  }
  int64_t n = place.chunk * p.rows_per_block + threadIdx.y, at = n * length + column.element;
  for (; n < end; n += kGradUnroll * int64_t(blockDim.y), at += kGradUnroll * step) {
    Pack<scalar_t, V> grad_y[kGradUnroll], y[kGradUnroll], x[kGradUnroll];
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      grad_y[u] = load_stream<V>(args.grad_y + t * d.N * length + at + u * step);
      if (args.y) y[u] = load_stream<V>(args.y + t * d.N * length + at + u * step);
      x[u] = load_again<V>(args.x + replica + at + u * step);
    }
#pragma unroll
    for (int u = 0; u < kGradUnroll; ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      acc_t g[V], value[V];
      gradient(g, grad_y[u], y[u], args.y != nullptr, args.par.slope);
      unpack(x[u], value);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        sum_g[e] += g[e];
        sum_gx[e] += g[e] * (value[e] - mean[e]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < V; ++e) sum_gx[e] *= rstd[e];
  const int64_t all = int64_t(gridDim.x) * p.channels, first = int64_t(blockIdx.x) * p.channels;
  block_sums(partial + first, table, column, sum_g);
  block_sums(partial + all + first, table, column, sum_gx);
}

// One warp per number of sums (2, T, C).
template <typename acc_t, int V>
__global__ void __launch_bounds__(kThreads) finish_sums_kernel(
    const acc_t* __restrict__ partial, acc_t* __restrict__ sums, ColumnsPlan p, Extents d) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= 2 * d.T * d.C) return;
  const int64_t c = warp % d.C, t = warp / d.C, length = int64_t(p.block.x) * V;  // t < 2 T
  const int64_t first = c * d.S / length;
  const unsigned tiles = unsigned(((c + 1) * d.S - 1) / length - first + 1);
  // In its first tile the channel follows others; further tiles start with it.
  const int k = int(c - first * length / d.S);
  const acc_t* from = partial + (t * p.chunks * p.tiles + first) * p.channels;
  acc_t total = 0;
  for (unsigned i = lane; i < p.chunks * tiles; i += kFinishUnroll * kWarp) {
    acc_t part[kFinishUnroll] = {};
#pragma unroll
    for (unsigned u = 0; u < kFinishUnroll; ++u) {
      const unsigned at = i + u * kWarp, tile = at % tiles;
      if (at < p.chunks * tiles)
        part[u] = from[(at / tiles * p.tiles + tile) * p.channels + (tile == 0 ? k : 0)];
    }
#pragma unroll
    for (unsigned u = 0; u < kFinishUnroll; ++u) total += part[u];
  }
  total = lanes_sum(total);
  if (lane == 0) sums[warp] = total;
}

// ---- launches ----------------------------------------------------------------------------------

template <typename acc_t>
void run_fitted_moments(
    const FittedSource<acc_t>& source, acc_t* mean, acc_t* var, int64_t* snapshot, int64_t T,
    cudaStream_t stream) {
  const unsigned blocks = unsigned(ceil_div<int64_t>(T * source.C, kThreads));
  const auto kernel = fitted_moments_kernel<acc_t>;
  BNUQ_LAUNCH(kernel, dim3(blocks), dim3(kThreads), 0, stream, source, mean, var, snapshot, T);
}

template <int V, typename scalar_t>
void run_gradients_by(
    const BackwardArgs<scalar_t>& args, const BankSource<acc_type<scalar_t>>& source, bool shared,
    cudaStream_t stream) {
  const int unroll = shared ? kSharedGradUnroll : kGradUnroll;
  ColumnsPlan p = plan_columns(args.d, V, unroll, shared, int(sizeof(acc_type<scalar_t>)));
  p.grid.y = 1;
  const auto kernel = shared ? shared_gradients_kernel<scalar_t, V> : gradients_kernel<scalar_t, V>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, p.shared, stream, args, source, p);
}

// grad_x and grad_residual, where given. No size may be 0.
template <typename scalar_t>
void run_gradients(
    const BackwardArgs<scalar_t>& args, const BankSource<acc_type<scalar_t>>& source, bool shared,
    cudaStream_t stream) {
  constexpr int V = kVector<scalar_t>;
  const bool wide = aligned(args.grad_y) && aligned(args.y) && aligned(args.grad_x) &&
                    aligned(args.grad_residual) && args.d.C * args.d.S % V == 0;
  if (wide)
    run_gradients_by<V>(args, source, shared, stream);
  else
    run_gradients_by<1>(args, source, shared, stream);
}

// How sums are made: `wide` or by single numbers, and the size of the scratch that they need.
struct SumsPlan {
  bool wide;
  ColumnsPlan columns;
  int64_t partials;
};

template <typename scalar_t>
SumsPlan plan_sums(const BackwardArgs<scalar_t>& args) {
  constexpr int size = int(sizeof(acc_type<scalar_t>));
  const Extents d = args.d;
  SumsPlan p;
  p.wide = aligned(args.grad_y) && aligned(args.y) && aligned(args.x) &&
           d.C * d.S % kVector<scalar_t> == 0;
  const int V = p.wide ? kVector<scalar_t> : 1;
  p.columns = plan_columns(d, V, kGradUnroll, false, size);
  const int scratch = slot_of(int(p.columns.block.x * p.columns.block.y) * V) * size;
  p.columns.shared = larger(p.columns.shared, size_t(scratch));
  p.partials = 2 * int64_t(p.columns.grid.x) * p.columns.channels;
  return p;
}

template <int V, typename scalar_t>
void run_sums_by(
    const BackwardArgs<scalar_t>& args, const BankSource<acc_type<scalar_t>>& source, bool shared,
    acc_type<scalar_t>* partial, acc_type<scalar_t>* sums, const ColumnsPlan& p,
    cudaStream_t stream) {
  const auto kernel = sums_kernel<scalar_t, V>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, p.shared, stream, args, source, partial, p, shared);
  const auto finish = finish_sums_kernel<acc_type<scalar_t>, V>;
  const unsigned blocks = unsigned(ceil_div<int64_t>(2 * args.d.T * args.d.C, kThreads / kWarp));
  BNUQ_LAUNCH(finish, dim3(blocks), dim3(kThreads), 0, stream, partial, sums, p, args.d);
}

// sums (2, T, C); `partial` holds plan.partials numbers. No size may be 0.
template <typename scalar_t>
void run_sums(
    const BackwardArgs<scalar_t>& args, const BankSource<acc_type<scalar_t>>& source, bool shared,
    acc_type<scalar_t>* partial, acc_type<scalar_t>* sums, const SumsPlan& plan,
    cudaStream_t stream) {
  if (plan.wide)
    run_sums_by<kVector<scalar_t>>(args, source, shared, partial, sums, plan.columns, stream);
  else
    run_sums_by<1>(args, source, shared, partial, sums, plan.columns, stream);
}

}  // namespace bnuq
