// The execution model: a grid runs block after block, and a block's threads are fibers that run one
// at a time until they wait for each other. The order of blocks, warps and lanes comes from a seed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace hostrun {

// More than this a kernel has to ask for (cudaFuncSetAttribute), and none of csrc/cuda does.
constexpr size_t kMaxShared = 48 << 10;

// Where in the source a thread waits.
struct Site {
  const char* file;
  int line;
};

// What the lanes of a warp do together once all of them are there: operands[lane] is what each lane
// handed in, alive until the lane goes on; null for a lane outside the mask.
using Combine = void (*)(void* const* operands);

// What is launched, and where.
struct Origin {
  const void* kernel;
  void* stream;
};

// An argument of a kernel, as it lies in memory.
struct Argument {
  const void* data;
  size_t bytes;
};

// Runs the body for every thread of the grid. Refuses what a GPU of compute capability 9.0 refuses.
// Kernels of several threads of the process run one after another.
void launch(
    Origin origin, dim3 grid, dim3 block, size_t dynamic_bytes,
    const std::vector<Argument>& arguments, const std::function<void()>& body);

// Where it is set, it runs what a compiler made of the kernel in the place of the body.
inline void (*run_compiled)(
    const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes,
    const std::vector<Argument>& arguments, uint64_t order_seed) = nullptr;

template <typename... P, typename... A>
void launch_kernel(
    void (*kernel)(P...), void* stream, dim3 grid, dim3 block, size_t dynamic_bytes, A&&... given) {
  const std::tuple<P...> values(std::forward<A>(given)...);
  const auto run = [&](const P&... v) {
    const Origin origin = {reinterpret_cast<const void*>(kernel), stream};
    const auto body = [&] { kernel(v...); };
    // By reference: a copy would be on the heap, and reads of it accesses of the kernel's.
    launch(origin, grid, block, dynamic_bytes, {Argument{&v, sizeof(v)}...}, std::cref(body));
  };
  std::apply(run, values);
}

// Called at the start of every launch, where it is set.
inline void (*on_launch)(Origin origin) = nullptr;

// 0 runs blocks, warps and lanes in ascending order; any other seed shuffles all three.
void set_order(uint64_t seed);

// 0 runs every block of a grid, any other number only so many, the last ones: enough to see whether
// the largest indices are right.
void set_last_blocks(uint64_t count);

void block_barrier(Site site);
void warp_collective(unsigned mask, Combine combine, void* operand, Site site);

// An array in shared memory, all bits set before every block; one per declaration, which `key`
// names.
void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();

template <typename Array, typename Declaration>
std::remove_reference_t<Array>& shared_array(Declaration) {
  static const char key = 0;
  return *static_cast<Array*>(static_shared(&key, sizeof(Array), alignof(Array)));
}

// An asynchronous copy of 16 bytes, zeros unless `inside`: there once the thread that began it
// waits, and until then what was there before is gone.
void begin_copy(void* to, const void* from, bool inside, Site site);
void finish_copies();

int lane();

[[noreturn]] void refuse_source(int source);

// Fails unless p is aligned as an access of T needs it.
void check_aligned(const void* p, size_t alignment, Site site);

}  // namespace hostrun
