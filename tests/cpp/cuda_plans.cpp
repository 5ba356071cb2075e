// Grids of the CUDA kernels for sizes up to 2^38 elements, twice what any GPU holds, checked
// without launching: within CUDA's limits, and no row, segment or position left out. Prints the
// number of sizes.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "batch_norm_kernels.cuh"
#include "predictive_kernels.cuh"

using namespace bnuq;

void require(bool holds, const char* what, Extents d, int V) {
  if (holds) return;
  std::printf(
      "%s: T %ld N %ld C %ld S %ld V %d\n", what, long(d.T), long(d.N), long(d.C), long(d.S), V);
  std::exit(1);
}
#define REQUIRE(condition) require(condition, #condition, d, V)

template <typename Plan>
bool launchable(const Plan& p, size_t shared_bytes) {
  return p.grid.x >= 1 && p.grid.x < (1u << 31) && p.grid.y >= 1 && p.grid.y <= 65535 &&
         p.block.x * p.block.y >= 1 && p.block.x * p.block.y <= kThreads &&
         shared_bytes + kTableReplicas * sizeof(int64_t) <= 48 * 1024;
}

bool covers_replicas(const dim3& grid, int64_t per_split, Extents d, bool shared) {
  return !shared || (grid.y * per_split >= d.T && (grid.y - 1) * per_split < d.T);
}

void check_columns(Extents d, int V, bool shared, int acc_size) {
  const int merged = merged_rows(d, V);
  if (merged == 0) return;
  for (auto [unroll, most_passes] : {std::pair(2, 8), {4, 1}, {4, 8}, {8, 8}}) {
    const ColumnsPlan p = plan_columns(d, V, unroll, shared, acc_size, merged, most_passes);
    REQUIRE(launchable(p, p.shared));
    REQUIRE(p.rows * p.length == d.N * d.C * d.S && p.length % V == 0);
    REQUIRE(p.tiles * p.block.x >= p.columns && (p.tiles - 1) * p.block.x < p.columns);
    REQUIRE(p.chunks * p.rows_per_block >= p.rows && (p.chunks - 1) * p.rows_per_block < p.rows);
    REQUIRE(int64_t(p.grid.x) == p.tiles * p.chunks * (shared ? 1 : d.T));
    REQUIRE(!shared || p.rows_per_block == int64_t(p.block.y) * unroll);
    REQUIRE(covers_replicas(p.grid, p.replicas_per_split, d, shared));
    REQUIRE(p.replicas >= 1 && p.replicas <= kTableReplicas);
    REQUIRE(p.shared >= size_t(p.replicas) * 3 * slot_of(p.channels + 7) * acc_size);
  }
}

void check_planes(Extents d, int V, bool shared) {
  const PlanesPlan p = plan_planes(d, V, shared);
  REQUIRE(launchable(p, 0));
  REQUIRE(p.segments * kWarp * V >= d.S && (p.segments - 1) * kWarp * V < d.S);
  REQUIRE(int64_t(p.grid.x) * (kThreads / kWarp) >= p.tasks);
  REQUIRE(p.task >= kUnroll && p.task <= kWarp && p.task % kUnroll == 0);
  REQUIRE(shared || p.tasks * p.task >= p.planes * p.segments);
  REQUIRE(covers_replicas(p.grid, p.replicas_per_split, d, shared));
}

void check_vectors(Extents d, int V) {
  const VectorsPlan p = plan_vectors(d, V);
  REQUIRE(launchable(p, 0));
  const int64_t block = int64_t(p.block.x) * kVectors, threads = p.grid.x * block;
  REQUIRE(p.vectors * int64_t(V) == d.N * d.C * d.S);
  REQUIRE(threads >= p.vectors && threads - block < p.vectors && threads < int64_t(1) << 31);
  REQUIRE(p.planes ? d.S % V == 0 : d.S == 1 && p.block.x * V % d.C == 0);
  for (uint32_t n : {0u, 1u, p.vectors / 3, p.vectors - 1, uint32_t(threads - 1)}) {
    REQUIRE(p.per_plane.quotient(n) == n / (p.planes ? d.S / V : 1));
    REQUIRE(p.channels.rest(n) == n % (p.planes ? d.C : d.C / V));
  }
}

// V is the number of classes of a thread; the classes stand for the channels.
void check_predictive(Extents d, int V) {
  const PredictivePlan p = plan_predictive({d.T, d.N, d.C, d.S}, V);
  const int64_t threads = p.block.x * p.block.y, positions = d.N * d.S;
  REQUIRE(p.grid.x >= 1 && p.grid.x < (1u << 31) && threads <= block_limit(p.group));
  const int64_t team = p.group == Group::kColumns ? p.block.y : p.block.x;
  REQUIRE(p.wide || team * V >= d.C);
  REQUIRE(p.grid.x * (p.group == Group::kBlock ? 1 : threads / team) >= positions);
  const size_t size = V == 8 ? 4 : 8;
  if (const auto staged = plan_staged(p, {d.T, d.N, d.C, d.S}, size)) {
    const int64_t all = staged->block.x * staged->block.y;
    REQUIRE(all % kWarp == 0 && all <= kMaxGroup && staged->grid.x == positions);
    REQUIRE(all * own_classes(p.group) > d.C);
    REQUIRE(staged->shared + 3 * kMaxGroup * size <= 48 * 1024);
  }
}

int main() {
  const int64_t Ts[] = {1, 2, 20, 100, 100000}, Ns[] = {1, 7, 32, 1024, 1 << 20};
  const int64_t Cs[] = {1, 3, 10, 64, 257, 1000, 1101, 2048, 4099, 5000, 200000};
  const int64_t Ss[] = {1, 2, 7, 49, 255, 256, 300, 3136, 12544, 1 << 24};
  int count = 0;
  for (int64_t T : Ts)
    for (int64_t N : Ns)
      for (int64_t C : Cs)
        for (int64_t S : Ss) {
          const Extents d = {T, N, C, S};
          if (double(T) * N * C * S > double(int64_t(1) << 38)) continue;
          for (bool shared : {false, true})
            for (int V : {1, 2, 4, 8}) {
              check_columns(d, V, shared, V == 2 ? 8 : 4);
              if (V > 1 && S % V == 0 && S >= kPlaneLength) check_planes(d, V, shared);
              if (V > 1 && has_vectors(d, V)) check_vectors(d, V);
            }
          for (int slots : {4, 8})
            if (N * S < int64_t(1) << 31) check_predictive(d, slots);
          ++count;
        }
  std::printf("%d\n", count);
}
