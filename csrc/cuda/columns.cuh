// How a block covers rows of C*S elements when each thread keeps its place in the row, and the
// table of affine maps that the block makes once, in shared memory.
//
// A block is bx columns (V neighbours each) by `by` rows. The table holds, for each replica, three
// runs (mean, scale, bias) over the channels of the tile, in groups of eight channels: one group is
// what one Philox call gives.
#pragma once
#include "../batch_norm.h"
#include "device.cuh"

namespace bnuq {

constexpr int kThreads = 256;
constexpr int kTableBytes = 32 * 1024;
constexpr int kTableReplicas = 32;
constexpr int64_t kTileChannels = 256;
constexpr int64_t kTargetBlocks = 132 * 3 * 4;  // four waves of an H200
constexpr int kMostPasses = 8;

struct Extents {
  int64_t T, N, C, S;
};

// A row is C*S elements, or, where that is odd, several of them: then rows begin at aligned
// addresses.
struct ColumnsPlan {
  dim3 grid, block;
  size_t shared;
  int merged;            // rows of C*S elements in one row here
  int64_t rows, length;  // N / merged, merged * C * S
  int64_t columns;       // of a row, V elements each
  int64_t tiles;         // of a row
  int64_t rows_per_block;
  int64_t chunks;  // of the N rows
  int64_t replicas_per_split;
  int channels;  // of a table, at most
  int slots;     // of a run of the table
  int replicas;  // of a table
};

constexpr int64_t kMergedChannels = 1024;  // their table holds all channels

// Rows to merge so that V divides the row; 0 where that cannot be.
inline int merged_rows(Extents d, int V) {
  int merged = 1;
  while (d.C * d.S * merged % V != 0) merged *= 2;
  return merged == 1 || (d.N % merged == 0 && d.C <= kMergedChannels) ? merged : 0;
}

// Where number i stands in shared memory: padding after each 32 keeps accesses of lanes that are 1,
// 4 or 8 numbers apart free of bank conflicts.
constexpr int slot_of(int i) {
  return i + (i >> 5);
}

// `unroll` rows a thread at a time, `most_passes` times: one where a table costs little, for the
// rest of a wave of short blocks ends soon. Shared x: a block keeps its rows while it passes over
// replicas.
inline ColumnsPlan plan_columns(
    Extents d, int V, int unroll, bool shared, int acc_size, int merged = 1,
    int most_passes = kMostPasses) {
  ColumnsPlan p;
  p.merged = merged;
  p.rows = d.N / merged;
  p.length = d.C * d.S * merged;
  p.columns = p.length / V;
  // A channel of the table costs some 90 instructions: a narrow tile has more rows to share it.
  const int64_t widest = (shared ? kTileChannels / 2 : kTileChannels) * d.S / V;
  p.tiles = ceil_div(
      p.columns, merged > 1 ? kThreads : smaller<int64_t>(kThreads, larger<int64_t>(widest, 16)));
  const int bx = int(ceil_div(p.columns, p.tiles)), by = kThreads / bx;
  p.block = dim3(bx, by);
  p.channels = int(merged > 1 ? d.C : smaller<int64_t>(d.C, (int64_t(bx) * V - 1) / d.S + 2));
  p.slots = slot_of((p.channels + 14) / 8 * 8);
  const int run_bytes = 3 * p.slots * acc_size;
  p.replicas = shared ? larger(1, smaller(kTableBytes / run_bytes, kTableReplicas)) : 1;
  p.shared = size_t(p.replicas) * run_bytes;

  const int64_t step = int64_t(by) * unroll, steps = ceil_div(p.rows, step);
  const int64_t replicas = shared ? 1 : d.T, blocks = replicas * p.tiles * steps;
  const int64_t passes =
      shared ? 1 : smaller<int64_t>(most_passes, larger<int64_t>(1, blocks / kTargetBlocks));
  p.rows_per_block = step * passes;
  p.chunks = ceil_div(p.rows, p.rows_per_block);
  const int64_t splits =
      shared ? larger<int64_t>(1, smaller(d.T, kTargetBlocks / (p.tiles * p.chunks))) : 1;
  p.replicas_per_split = ceil_div(d.T, splits);
  p.grid = dim3(
      unsigned(p.tiles * p.chunks * replicas),
      shared ? unsigned(ceil_div(d.T, p.replicas_per_split)) : 1);
  return p;
}

// What a block does: a tile of the row, a chunk of the rows, a replica (shared x: all of them).
struct Place {
  int64_t tile, chunk, t;

  BNUQ_DEVICE explicit Place(const ColumnsPlan& p) {
    const unsigned tiles = unsigned(p.tiles),
                   chunks = unsigned(p.chunks);  // below 2^31: of the grid
    const unsigned rest = blockIdx.x / tiles;
    tile = blockIdx.x - rest * tiles;
    chunk = rest % chunks;
    t = rest / chunks;
  }
};

// The place of a thread in the row, and its channels.
template <int V>
struct Column {
  int64_t element;  // of the row; the first of V
  bool active;
  int64_t first_channel;  // of the table
  int channels;           // of the table
  int start;              // the channel of the tile's first element, from first_channel
  int left;               // elements of that channel
  int period;             // S, capped: a tile is shorter than the cap
  int wrap;  // the channel after the last, from first_channel, is this; merged rows go round

  BNUQ_DEVICE Column(const ColumnsPlan& p, int64_t tile, int64_t C, int64_t S) {
    const int64_t first = tile * blockDim.x * V, plane = first / S;
    element = first + threadIdx.x * V;
    active = element < p.length;
    constexpr int64_t kCap = 1 << 24;
    left = int(smaller(kCap, (plane + 1) * S - first));
    period = int(smaller(kCap, S));
    const bool round = p.merged > 1;
    first_channel = round ? 0 : plane;
    start = round ? int(plane % C) : 0;
    channels =
        round ? int(C) : plane_of(int(smaller<int64_t>(blockDim.x * V, p.length - first)) - 1) + 1;
    wrap = round ? int(C) : int(kCap);
  }

  // Element `q` of the tile to its plane, counted from the tile's first.
  BNUQ_DEVICE int plane_of(int q) const { return q < left ? 0 : 1 + (q - left) / period; }

  // The slots of the thread's V elements in the table.
  BNUQ_DEVICE void find_slots(int (&slot)[V]) const {
    const int q = threadIdx.x * V, past = plane_of(q);
    int c = (start + past) % wrap, next = left + past * period;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if (q + e == next) {
        if (++c == wrap) c = 0;
        next += period;
      }
      slot[e] = slot_of(c + int(first_channel & 7));
    }
  }
};

// ---- the table ---------------------------------------------------------------------------------

template <typename acc_t>
struct Parameters {
  const acc_t* weight;  // (C,) or null
  const acc_t* bias;    // (C,) or null
  acc_t eps, slope;
};

// A bank needs no noise.
template <typename acc_t>
BNUQ_DEVICE void draw_group(const BankSource<acc_t>&, int64_t, int64_t, acc_t*, int) {}

// The noise of eight channels, one Philox call for each moment, where mean and scale will stand.
template <typename acc_t>
BNUQ_DEVICE void draw_group(
    const FittedSource<acc_t>& source, int64_t replica, int64_t group, acc_t* run, int slots) {
  float z[8];
  normals8(philox_at(subkey(source.seed[0], source.stream, kTagMean), group, uint64_t(replica)), z);
#pragma unroll
  for (int e = 0; e < 8; ++e) run[e] = z[e];
  normals8(
      philox_at(subkey(source.seed[0], source.stream, kTagSpread), group, uint64_t(replica)), z);
#pragma unroll
  for (int e = 0; e < 8; ++e) run[slots + e] = z[e];
}

template <typename acc_t>
BNUQ_DEVICE Moments<acc_t> moments_of(
    const BankSource<acc_t>& source, int64_t row, int64_t c, const acc_t*, int) {
  return source.at(row, c);
}

template <typename acc_t>
BNUQ_DEVICE Moments<acc_t> moments_of(
    const FittedSource<acc_t>& source, int64_t, int64_t c, const acc_t* run, int slots) {
  return source.draw(c, run[0], run[slots]);
}

BNUQ_DEVICE int block_thread() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}

BNUQ_DEVICE int block_threads() {
  return blockDim.x * blockDim.y;
}

// The rows of replicas [t0, t0 + count) in their source, for fill_table.
template <typename Source>
BNUQ_DEVICE void find_rows(int64_t* rows, const Source& source, int64_t t0, int count) {
  for (int j = block_thread(); j < count; j += block_threads()) rows[j] = source.row(t0 + j);
}

// Makes the table of the replicas whose rows these are. Every thread of the block calls it.
template <typename acc_t, typename Source, int V>
BNUQ_DEVICE void fill_table(
    acc_t* table, const int64_t* rows, const ColumnsPlan& p, const Column<V>& column,
    const Source& source, const Parameters<acc_t>& par, int count) {
  const int thread = block_thread(), threads = block_threads();
  __syncthreads();
  const int64_t first_group = column.first_channel >> 3;
  const int groups = int(((column.first_channel + column.channels - 1) >> 3) - first_group) + 1;
  for (int i = thread; i < count * groups; i += threads) {
    const int j = i / groups, g = i % groups;
    acc_t* run = table + j * 3 * p.slots + slot_of(g * 8);
    draw_group(source, rows[j], first_group + g, run, p.slots);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < count * groups * 8; i += threads) {
    const int j = i / (groups * 8), k = i % (groups * 8);
    const int64_t c = first_group * 8 + k;
    if (c >= source.C) continue;
    acc_t* run = table + j * 3 * p.slots + slot_of(k);
    const Affine<acc_t> a =
        affine(moments_of(source, rows[j], c, run, p.slots), par.weight, par.bias, c, par.eps);
    run[0] = a.mean;
    run[p.slots] = a.scale;
    run[2 * p.slots] = a.bias;
  }
  __syncthreads();
}

}  // namespace bnuq
