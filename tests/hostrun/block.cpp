#include "block.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"
#include "races.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace hostrun {
namespace {

// Limits of compute capability 9.0.
constexpr unsigned kMaxThreads = 1024, kMaxBlockZ = 64, kMaxGridX = 0x7fffffff, kMaxGridYZ = 65535;
constexpr size_t kRedZone = 64, kCopyBytes = 16;

enum class State { kReady, kBlockBarrier, kWarpCollective, kDone };

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Thread {
  std::unique_ptr<Fiber> fiber = std::make_unique<Fiber>();
  dim3 index;
  State state;
  Site site;      // of the barrier or collective
  unsigned mask;  // of the collective, as are these two
  Combine combine;
  void* operand;
  std::vector<Copy> begun;
  unsigned barriers;  // passed
};

struct SharedArray {
  const void* key;
  char* data;
};

struct Block {
  std::vector<Thread> threads;  // kept from launch to launch for their stacks
  unsigned size = 0, current = 0;
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
  std::vector<SharedArray> arrays;
  size_t shared_used = 0, static_bytes = 0, dynamic_bytes = 0;
  bool busy = false;
};

Block block;
char meetings[2];
uint64_t order_seed = 0, last_blocks = 0;
std::mt19937_64 order;
alignas(1024) char shared_memory[kMaxShared + 64 * kRedZone];

std::string text(dim3 d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

std::string text(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

std::string whereabouts(const Thread& t) {
  const std::string who = "thread " + text(t.index) + " of block " + text(blockIdx);
  if (t.state == State::kDone) return who + " has returned";
  if (t.state == State::kBlockBarrier) return who + " waits in __syncthreads at " + text(t.site);
  return who + " waits for its warp at " + text(t.site);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("hostrun: " + what);
}

// ---- shared memory -----------------------------------------------------------------------------

char* take_shared(size_t bytes, size_t alignment) {
  const size_t start = (block.shared_used + kRedZone + alignment - 1) / alignment * alignment;
  const size_t total = block.static_bytes + block.dynamic_bytes;
  if (total > kMaxShared || start + bytes > sizeof(shared_memory))
    fail("shared memory must not exceed 49152 bytes, got " + std::to_string(total));
  block.shared_used = start + bytes;
  ASAN_UNPOISON_MEMORY_REGION(shared_memory + start, bytes);
  return shared_memory + start;
}

void clear_shared() {
  ASAN_UNPOISON_MEMORY_REGION(shared_memory, sizeof(shared_memory));
  std::memset(shared_memory, 0xff, sizeof(shared_memory));
  ASAN_POISON_MEMORY_REGION(shared_memory, sizeof(shared_memory));
  block.arrays.clear();
  block.shared_used = block.static_bytes = 0;
  block.arrays.push_back({nullptr, take_shared(block.dynamic_bytes, 1024)});
}

// ---- one block ---------------------------------------------------------------------------------

void thread_main() {
  try {
    (*block.body)();
  } catch (...) {
    block.error = std::current_exception();
  }
  Thread& self = block.threads[block.current];
  if (!self.begun.empty() && !block.error)
    block.error = std::make_exception_ptr(
        std::runtime_error("hostrun: a thread returns with a copy that it has not waited for"));
  self.begun.clear();
  self.state = State::kDone;
  self.fiber->suspend(true);
}

void run_thread(unsigned i) {
  block.current = i;
  threadIdx = block.threads[i].index;
  block.threads[i].fiber->resume();
  if (block.error) std::rethrow_exception(block.error);
}

void wait_here() {
  block.threads[block.current].fiber->suspend();
}

struct Warp {
  unsigned first, size;

  Thread& lane(unsigned i) const { return block.threads[first + i]; }
  bool has(State state) const {
    for (unsigned i = 0; i < size; ++i)
      if (lane(i).state == state) return true;
    return false;
  }
};

// The collective of one lane, if all lanes of its mask are there.
bool combine_group(const Warp& warp, const Thread& leader) {
  void* operands[32] = {};
  for (unsigned i = 0; i < 32; ++i) {
    if (!(leader.mask >> i & 1)) continue;
    if (i >= warp.size)
      fail("lane " + std::to_string(i) + " of the mask does not exist; " + whereabouts(leader));
    const Thread& t = warp.lane(i);
    if (t.state == State::kReady) return false;
    const bool same = t.state == State::kWarpCollective && t.mask == leader.mask &&
                      t.combine == leader.combine && t.site.line == leader.site.line &&
                      !std::strcmp(t.site.file, leader.site.file);
    if (!same) fail("a warp diverged: " + whereabouts(leader) + ", but " + whereabouts(t));
    operands[i] = t.operand;
  }
  {
    const Unseen unseen;
    leader.combine(operands);
  }
  for (unsigned i = 0; i < warp.size; ++i)
    if (operands[i]) warp.lane(i).state = State::kReady;
  return true;
}

// Runs each ready lane until it waits, then whatever collectives are complete.
void step_warp(const Warp& warp) {
  unsigned lanes[32];
  std::iota(lanes, lanes + warp.size, 0u);
  if (order_seed) std::shuffle(lanes, lanes + warp.size, order);
  for (unsigned i = 0; i < warp.size; ++i)
    if (warp.lane(lanes[i]).state == State::kReady) run_thread(warp.first + lanes[i]);
  for (unsigned i = 0; i < warp.size; ++i)
    if (warp.lane(i).state == State::kWarpCollective) combine_group(warp, warp.lane(i));
}

// A warp runs on to the next block barrier; a shuffled one may be overtaken at every collective.
void run_to_barrier(const std::vector<Warp>& warps) {
  std::vector<Warp> runnable = warps;
  while (!runnable.empty()) {
    const size_t i = order_seed ? order() % runnable.size() : 0;
    do step_warp(runnable[i]);
    while (runnable[i].has(State::kReady) && (!order_seed || order() % 4));
    if (!runnable[i].has(State::kReady)) runnable.erase(runnable.begin() + i);
  }
}

// True once every thread has returned.
bool pass_barrier() {
  const Thread& first = block.threads[0];
  for (unsigned i = 0; i < block.size; ++i) {
    const Thread& t = block.threads[i];
    if (t.state != first.state ||
        (t.state == State::kBlockBarrier &&
         (t.site.line != first.site.line || std::strcmp(t.site.file, first.site.file))))
      fail("a barrier diverged: " + whereabouts(first) + ", but " + whereabouts(t));
  }
  if (first.state == State::kDone) return true;
  for (unsigned i = 0; i < block.size; ++i) block.threads[i].state = State::kReady;
  return false;
}

void run_block() {
  clear_shared();
  std::vector<Warp> warps;
  for (unsigned i = 0; i < block.size; i += 32) warps.push_back({i, std::min(32u, block.size - i)});
  for (unsigned i = 0; i < block.size; ++i) {
    Thread& t = block.threads[i];
    t.fiber->prepare(thread_main);
    t.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
    t.state = State::kReady;
    t.barriers = 0;
  }
  do run_to_barrier(warps);
  while (!pass_barrier());
}

// ---- a grid ------------------------------------------------------------------------------------

void check_launch(dim3 g, dim3 b, size_t dynamic_bytes) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("hostrun: launch: " + what);
  };
  const uint64_t threads = uint64_t(b.x) * b.y * b.z;
  if (threads == 0 || threads > kMaxThreads || b.z > kMaxBlockZ)
    refuse("block must have 1 to 1024 threads, at most 64 along z, got " + text(b));
  if (g.x == 0 || g.y == 0 || g.z == 0) refuse("grid must not be empty, got " + text(g));
  if (g.x > kMaxGridX || g.y > kMaxGridYZ || g.z > kMaxGridYZ)
    refuse("grid must lie within (2147483647, 65535, 65535), got " + text(g));
  if (dynamic_bytes > kMaxShared)
    refuse("shared memory must not exceed 49152 bytes, got " + std::to_string(dynamic_bytes));
}

struct Busy {
  Busy() {
    if (block.busy) fail("a kernel must not launch a kernel");
    block.busy = true;
  }
  ~Busy() { block.busy = false; }
};

}  // namespace

void launch(
    Origin origin, dim3 grid, dim3 threads, size_t dynamic_bytes,
    const std::vector<Argument>& arguments, const std::function<void()>& body) {
  static std::recursive_mutex mutex;  // a kernel that launches one is noticed by Busy
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (on_launch) on_launch(origin);
  check_launch(grid, threads, dynamic_bytes);
  const Busy busy;
  if (run_compiled)
    return run_compiled(origin.kernel, grid, threads, dynamic_bytes, arguments, order_seed);
  block.size = threads.x * threads.y * threads.z;
  if (block.threads.size() < block.size) block.threads.resize(block.size);
  block.body = &body;
  block.error = nullptr;
  block.dynamic_bytes = dynamic_bytes;
  gridDim = grid;
  blockDim = threads;
  order.seed(order_seed);
  const uint64_t all = uint64_t(grid.x) * grid.y * grid.z;
  std::vector<uint64_t> blocks(last_blocks ? std::min(all, last_blocks) : all);
  std::iota(blocks.begin(), blocks.end(), all - blocks.size());
  if (order_seed) std::shuffle(blocks.begin(), blocks.end(), order);
  for (const uint64_t i : blocks) {
    blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    run_block();
  }
}

void set_order(uint64_t seed) {
  order_seed = seed;
}

void set_last_blocks(uint64_t count) {
  last_blocks = count;
}

void block_barrier(Site site) {
  Thread& self = block.threads[block.current];
  self.state = State::kBlockBarrier;
  self.site = site;
  // Two in turn: a thread that leaves this barrier knows nothing of one that has come to the next.
  char* meeting = &meetings[self.barriers++ % 2];
  arrive(meeting);
  wait_here();
  leave(meeting);
}

void warp_collective(unsigned mask, Combine combine, void* operand, Site site) {
  Thread& self = block.threads[block.current];
  self.state = State::kWarpCollective;
  self.site = site;
  self.mask = mask;
  self.combine = combine;
  self.operand = operand;
  if (!(mask >> lane() & 1)) fail("a lane is not in its own mask: " + whereabouts(self));
  wait_here();
}

void begin_copy(void* to, const void* from, bool inside, Site site) {
  check_aligned(to, kCopyBytes, site);
  check_aligned(from, kCopyBytes, site);
  std::memset(to, 0xff, kCopyBytes);
  block.threads[block.current].begun.push_back({to, inside ? from : nullptr});
}

void finish_copies() {
  std::vector<Copy>& begun = block.threads[block.current].begun;
  for (const Copy& copy : begun) {
    if (copy.from)
      std::memcpy(copy.to, copy.from, kCopyBytes);
    else
      std::memset(copy.to, 0, kCopyBytes);
  }
  begun.clear();
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  for (const SharedArray& a : block.arrays)
    if (a.key == key) return a.data;
  block.static_bytes += bytes;
  block.arrays.push_back({key, take_shared(bytes, alignment)});
  return block.arrays.back().data;
}

void* dynamic_shared() {
  return block.arrays[0].data;
}

int lane() {
  return int(block.current % 32);
}

void refuse_source(int source) {
  fail(
      "a shuffle reads lane " + std::to_string(source) +
      ", which is not in the mask: " + whereabouts(block.threads[block.current]));
}

void check_aligned(const void* p, size_t alignment, Site site) {
  if (reinterpret_cast<uintptr_t>(p) % alignment)
    fail(
        "a vector access at " + text(site) + " needs " + std::to_string(alignment) +
        "-byte alignment");
}

}  // namespace hostrun
