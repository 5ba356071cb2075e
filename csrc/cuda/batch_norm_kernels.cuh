// batch_norm_bank and batch_norm_fitted, forward: y = act((x - mean) * scale + bias + residual).
//
// Floor: bytes. Each element of x (and residual) is read once and each of y written once, so 2 b
// bytes an element for folded x and (1/T + 1) b for shared x, b the size of a number (b more with a
// residual); 5 operations an element. Statistics cost T*C numbers.
//
// Three ways over (T, N, C, S), C*S a row:
//   vectors  batch_norm_vectors.cuh; for folded x with statistics that need not be drawn, where V
//            elements are of one plane or S = 1.
//   columns  a thread keeps its V places in the row, hence its affine maps in registers, and walks
//            over rows; for S = 1 (channels_last too), small S, and, with V = 1, what is unaligned.
//   planes   a warp takes segments of 32*V elements of (n, c) planes; a lane makes the affine
//            map of one plane (shared x: of one replica), and the warp passes it round; for large
//            S, where x is shared or statistics are drawn.
// Shared x stays in registers while its thread passes over the replicas.
#pragma once
#include "batch_norm_vectors.cuh"

namespace bnuq {

constexpr int kUnroll = 4;  // 16-byte loads in flight a thread
constexpr int kScalarUnroll = 8;
constexpr int64_t kPlaneLength = 256;  // elements from which a plane feeds a warp

// ---- columns -----------------------------------------------------------------------------------

constexpr int unroll_of(int V) {
  return V == 1 ? kScalarUnroll : kUnroll;
}

template <typename acc_t, int V>
BNUQ_DEVICE void read_table(
    Affine<acc_t> (&a)[V], const acc_t* run, int slots, const int (&slot)[V]) {
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = {run[slot[e]], run[slots + slot[e]], run[2 * slots + slot[e]]};
}

// One block per (replica, row chunk, tile).
template <typename scalar_t, int V, typename Source>
__global__ void __launch_bounds__(kThreads, 3)
    columns_kernel(ForwardArgs<scalar_t> args, Source source, ColumnsPlan p) {
  using acc_t = acc_type<scalar_t>;
  BNUQ_DYNAMIC_SHARED(acc_t, table);
  BNUQ_SHARED(int64_t, rows_of, [kTableReplicas]);
  const Extents d = args.d;
  const Place place(p);
  const int64_t t = place.t, length = p.length;
  find_rows(rows_of, source, t, 1);
  const Column<V> column(p, place.tile, d.C, d.S);
  const int64_t first = place.chunk * p.rows_per_block;
  const int64_t end = column.active ? smaller(p.rows, first + p.rows_per_block) : 0;
  const int64_t offset = t * p.rows * length + column.element, step = blockDim.y * length;
  int64_t n = first + threadIdx.y, at = offset + n * length;

  Pack<scalar_t, V> x[unroll_of(V)], residual[unroll_of(V)];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < unroll_of(V); ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      x[u] = load_stream<V>(args.x + at + u * step);
      if (args.residual) residual[u] = load_stream<V>(args.residual + at + u * step);
    }
  };
  load();  // in flight while the table is made
  fill_table(table, rows_of, p, column, source, args.par, 1);
  int slot[V];
  column.find_slots(slot);
  Affine<acc_t> a[V];
  if (column.active) read_table(a, table, p.slots, slot);
  while (n < end) {
#pragma unroll
    for (int u = 0; u < unroll_of(V); ++u) {
      if (n + u * int64_t(blockDim.y) >= end) break;
      write_elements(
          args.y + at + u * step, x[u], residual[u], args.residual != nullptr, a, args.par.slope);
    }
    n += unroll_of(V) * int64_t(blockDim.y);
    at += unroll_of(V) * step;
    load();
  }
}

// One block per (row chunk, tile) and split of the replicas.
template <typename scalar_t, int V, typename Source>
__global__ void __launch_bounds__(kThreads, 2)
    shared_columns_kernel(ForwardArgs<scalar_t> args, Source source, ColumnsPlan p) {
  using acc_t = acc_type<scalar_t>;
  BNUQ_DYNAMIC_SHARED(acc_t, table);
  BNUQ_SHARED(int64_t, rows_of, [kTableReplicas]);
  const Extents d = args.d;
  const Place place(p);
  const int64_t length = p.length;
  const Column<V> column(p, place.tile, d.C, d.S);
  const int64_t n = place.chunk * p.rows_per_block + threadIdx.y, rows = p.rows - n;
  const int64_t at = n * length + column.element, step = blockDim.y * length;
  int count = 0;  // rows of this thread
  if (column.active && rows > 0)
    count = int(smaller<int64_t>(unroll_of(V), ceil_div<int64_t>(rows, blockDim.y)));

  Pack<scalar_t, V> x[unroll_of(V)], residual[unroll_of(V)];
#pragma unroll
  for (int u = 0; u < unroll_of(V); ++u) {
    if (u >= count) break;
    x[u] = load_again<V>(args.x + at + u * step);
    if (args.residual) residual[u] = load_again<V>(args.residual + at + u * step);
  }
  int slot[V];
  column.find_slots(slot);
  const int64_t t_begin = blockIdx.y * p.replicas_per_split;
  const int64_t t_end = smaller(d.T, t_begin + p.replicas_per_split);
  scalar_t* y = args.y + t_begin * p.rows * length + at;
  for (int64_t t0 = t_begin; t0 < t_end; t0 += p.replicas) {
    const int replicas = int(smaller<int64_t>(p.replicas, t_end - t0));
    find_rows(rows_of, source, t0, replicas);
    fill_table(table, rows_of, p, column, source, args.par, replicas);
    if (count == 0) continue;
    for (int j = 0; j < replicas; ++j, y += p.rows * length) {
      Affine<acc_t> a[V];
      read_table(a, table + j * 3 * p.slots, p.slots, slot);
#pragma unroll
      for (int u = 0; u < unroll_of(V); ++u) {
        if (u >= count) break;
        keep_packed(x[u]);
        if (args.residual) keep_packed(residual[u]);
        write_elements(
            y + u * step, x[u], residual[u], args.residual != nullptr, a, args.par.slope);
      }
    }
  }
}

// ---- planes ------------------------------------------------------------------------------------

struct PlanesPlan {
  dim3 grid, block;
  int64_t planes;    // of x
  int64_t segments;  // of a plane
  int64_t tasks;     // of a warp each
  int task;          // segments of a task
  int64_t replicas_per_split;
};

inline PlanesPlan plan_planes(Extents d, int V, bool shared) {
  PlanesPlan p;
  p.planes = (shared ? 1 : d.T) * d.N * d.C;
  p.segments = ceil_div<int64_t>(d.S, kWarp * V);
  const int64_t warps = kTargetBlocks * kThreads / kWarp, all = p.planes * p.segments;
  // Folded: segments in a row, many, for statistics cost much. Shared: kUnroll of one plane.
  const int64_t even = ceil_div<int64_t>(ceil_div(all, warps), kUnroll) * kUnroll;
  p.task = shared ? kUnroll : int(smaller<int64_t>(kWarp, even));
  p.tasks =
      shared ? p.planes * ceil_div<int64_t>(p.segments, kUnroll) : ceil_div<int64_t>(all, p.task);
  const int64_t blocks = ceil_div<int64_t>(p.tasks, kThreads / kWarp);
  const int64_t splits = shared ? larger<int64_t>(1, smaller(d.T, kTargetBlocks / blocks)) : 1;
  p.replicas_per_split = ceil_div(d.T, splits);
  p.grid = dim3(unsigned(blocks), shared ? unsigned(ceil_div(d.T, p.replicas_per_split)) : 1);
  p.block = dim3(kThreads);
  return p;
}

template <typename acc_t, int V>
BNUQ_DEVICE void from_lane(Affine<acc_t> (&a)[V], const Affine<acc_t>& mine, int lane) {
  const Affine<acc_t> one = {
      __shfl_sync(kAllLanes, mine.mean, lane), __shfl_sync(kAllLanes, mine.scale, lane),
      __shfl_sync(kAllLanes, mine.bias, lane)};
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = one;
}

// One warp per task: segments [first, first + task), counted over all planes of all replicas.
template <typename scalar_t, typename Source>
__global__ void __launch_bounds__(kThreads, 3)
    planes_kernel(ForwardArgs<scalar_t> args, Source source, PlanesPlan p) {
  using acc_t = acc_type<scalar_t>;
  constexpr int V = kVector<scalar_t>;
  const Extents d = args.d;
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= p.tasks) return;
  const int64_t all = p.planes * p.segments, first = warp * p.task;
  const int count = int(smaller<int64_t>(p.task, all - first));
  const int64_t first_plane = first / p.segments;

  int64_t segment = first - first_plane * p.segments, s = segment * (kWarp * V) + lane * V;
  int64_t row = first_plane * d.S;
  int done = 0, local = 0;
  Pack<scalar_t, V> x[kUnroll], residual[kUnroll];
  int64_t at[kUnroll];
  int source_lane[kUnroll];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      at[u] = done + u < count && s < d.S ? row + s : -1;
      source_lane[u] = local;
      if (at[u] >= 0) {
        x[u] = load_stream<V>(args.x + at[u]);
        if (args.residual) residual[u] = load_stream<V>(args.residual + at[u]);
      }
      s += kWarp * V;
      if (++segment == p.segments) {
        segment = 0;
        s = lane * V;
        row += d.S;
        ++local;
      }
    }
  };
  load();  // in flight while the affine maps are made

  // A task of at most 32 segments touches at most 32 planes.
  const int64_t plane = first_plane + lane, t = plane / (d.N * d.C), c = plane % d.C;
  Affine<acc_t> mine = {0, 0, 0};
  if (plane < p.planes && plane * p.segments < first + count)
    mine = affine(source.at(source.row(t), c), args.par.weight, args.par.bias, c, args.par.eps);
  while (true) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Affine<acc_t> a[V];
      from_lane(a, mine, source_lane[u]);
      if (at[u] >= 0)
        write_elements(
            args.y + at[u], x[u], residual[u], args.residual != nullptr, a, args.par.slope);
    }
    done += kUnroll;
    if (done >= count) break;
    load();
  }
}

// One warp per kUnroll segments of a plane of x and split of the replicas; lanes make the affine
// maps of 32 replicas at a time.
template <typename scalar_t, typename Source>
__global__ void __launch_bounds__(kThreads, sizeof(scalar_t) == 8 ? 2 : 3)
    shared_planes_kernel(ForwardArgs<scalar_t> args, Source source, PlanesPlan p) {
  using acc_t = acc_type<scalar_t>;
  constexpr int V = kVector<scalar_t>;
  const Extents d = args.d;
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (warp >= p.tasks) return;
  const int64_t groups = ceil_div<int64_t>(p.segments, kUnroll);
  const int64_t plane = warp / groups, c = plane % d.C;
  const int64_t s = (warp % groups * kUnroll * kWarp + lane) * V, at = plane * d.S + s;

  Pack<scalar_t, V> x[kUnroll], residual[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (s + u * kWarp * V >= d.S) break;
    x[u] = load_again<V>(args.x + at + u * kWarp * V);
    if (args.residual) residual[u] = load_again<V>(args.residual + at + u * kWarp * V);
  }
  const int64_t t_begin = blockIdx.y * p.replicas_per_split;
  const int64_t t_end = smaller(d.T, t_begin + p.replicas_per_split);
  scalar_t* y = args.y + t_begin * d.N * d.C * d.S + at;
  for (int64_t t0 = t_begin; t0 < t_end; t0 += kWarp) {
    Affine<acc_t> mine = {0, 0, 0};
    if (t0 + lane < t_end)
      mine = affine(
          source.at(source.row(t0 + lane), c), args.par.weight, args.par.bias, c, args.par.eps);
    const int replicas = int(smaller<int64_t>(kWarp, t_end - t0));
    for (int j = 0; j < replicas; ++j, y += d.N * d.C * d.S) {
      Affine<acc_t> a[V];
      from_lane(a, mine, j);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (s + u * kWarp * V >= d.S) break;
        keep_packed(x[u]);
        if (args.residual) keep_packed(residual[u]);
        write_elements(
            y + u * kWarp * V, x[u], residual[u], args.residual != nullptr, a, args.par.slope);
      }
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------

template <int V, typename scalar_t, typename Source>
void run_columns(
    const ForwardArgs<scalar_t>& args, const Source& source, bool shared, int merged,
    cudaStream_t stream) {
  const int most_passes = V == 1 || Source::kDrawn ? kMostPasses : 1;
  const ColumnsPlan p = plan_columns(
      args.d, V, unroll_of(V), shared, int(sizeof(acc_type<scalar_t>)), merged, most_passes);
  const auto kernel =
      shared ? shared_columns_kernel<scalar_t, V, Source> : columns_kernel<scalar_t, V, Source>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, p.shared, stream, args, source, p);
}

template <typename scalar_t, typename Source>
void run_planes(
    const ForwardArgs<scalar_t>& args, const Source& source, bool shared, cudaStream_t stream) {
  const PlanesPlan p = plan_planes(args.d, kVector<scalar_t>, shared);
  auto kernel = shared_planes_kernel<scalar_t, Source>;
  if constexpr (Source::kDrawn)
    if (!shared) kernel = planes_kernel<scalar_t, Source>;
  BNUQ_LAUNCH(kernel, p.grid, p.block, 0, stream, args, source, p);
}

// No size may be 0.
template <typename scalar_t, typename Source>
void run_batch_norm(
    const ForwardArgs<scalar_t>& args, const Source& source, bool shared, cudaStream_t stream) {
  constexpr int V = kVector<scalar_t>;
  const Extents d = args.d;
  const bool wide = aligned(args.x) && aligned(args.y) && aligned(args.residual);
  if constexpr (!Source::kDrawn)
    if (wide && !shared && has_vectors(d, V) && (d.S % V == 0 || has_runs(source, args.par)))
      return run_vectors(args, source, stream);
  if (wide && d.S % V == 0 && d.S >= kPlaneLength && (shared || Source::kDrawn))
    return run_planes(args, source, shared, stream);
  const int merged = wide ? merged_rows(d, V) : 0;
  if (merged > 0)
    run_columns<V>(args, source, shared, merged, stream);
  else
    run_columns<1>(args, source, shared, 1, stream);
}

}  // namespace bnuq
