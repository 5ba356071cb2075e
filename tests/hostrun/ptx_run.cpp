#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

#include "ptx_lanes.h"

namespace hostrun::ptx {
namespace {

[[noreturn]] void fail(const Kernel& kernel, const std::string& what) {
  throw std::runtime_error("ptx: " + kernel.name + ": " + what);
}

// The lanes that an instruction is carried out for.
uint32_t guarded(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (!i.guarded) return lanes;
  uint32_t set = 0;
  const uint64_t* predicate = warp.read(i.predicate);
  for (int l = 0; l < kLanes; ++l) set |= uint32_t(predicate[l] != 0) << l;
  return lanes & (i.negated ? ~set : set);
}

void set_pc(Warp& warp, uint32_t lanes, uint32_t pc) {
  for (int l = 0; l < kLanes; ++l)
    if (lanes >> l & 1) warp.pc[l] = pc;
}

// Runs `lanes`, which stand together at `pc`, up to `limit`, where others wait to be joined, or to a
// branch, barrier or return.
void run_together(Kernel& kernel, Warp& warp, uint32_t lanes, uint32_t pc, uint32_t limit) {
  for (; pc < limit; ++pc) {
    const Instruction& i = kernel.code[pc];
    const uint32_t on = guarded(warp, i, lanes);
    kernel.executed[pc] += on || i.flow != Flow::kNext;
    if (i.flow == Flow::kNext) {
      if (on) i.execute(warp, i, on);
      continue;
    }
    if (i.flow == Flow::kBarrier && on != lanes) fail(kernel, "a barrier under a predicate");
    set_pc(warp, lanes, pc + 1);
    if (i.flow == Flow::kBranch) set_pc(warp, on, i.target);
    if (i.flow == Flow::kBarrier) warp.waiting |= on;
    if (i.flow == Flow::kReturn) warp.alive &= ~on;
    return;
  }
  set_pc(warp, lanes, pc);
}

// The lanes that are furthest behind go first. Most ways join behind their parts, so that all meet
// there; lanes that come to a barrier before the others wait there.
void run_to_barrier(Kernel& kernel, Warp& warp) {
  while (const uint32_t ready = warp.alive & ~warp.waiting) {
    uint32_t pc = ~0u, limit = uint32_t(kernel.code.size()), lanes = 0;
    for (int l = 0; l < kLanes; ++l)
      if (ready >> l & 1) pc = std::min(pc, warp.pc[l]);
    for (int l = 0; l < kLanes; ++l) {
      if (!(ready >> l & 1)) continue;
      if (warp.pc[l] == pc)
        lanes |= 1u << l;
      else
        limit = std::min(limit, warp.pc[l]);
    }
    run_together(kernel, warp, lanes, pc, limit);
  }
  for (int l = 0; l < kLanes; ++l)
    if (!(warp.alive >> l & 1) && !warp.begun[l].empty())
      fail(kernel, "a thread returns with a copy that it has not waited for");
}

// True once every thread has returned.
bool pass_barrier(const Kernel& kernel, std::vector<Warp>& warps) {
  int returned = 0;
  uint32_t pc = 0;
  bool first = true;
  for (Warp& warp : warps) {
    if (warp.alive == 0) {
      ++returned;
      continue;
    }
    if (warp.alive != warp.lanes) fail(kernel, "a barrier that some lanes of a warp never reach");
    for (int l = 0; l < kLanes; ++l) {
      if (!(warp.alive >> l & 1)) continue;
      if (first) pc = warp.pc[l];
      first = false;
      if (warp.pc[l] != pc) fail(kernel, "a barrier diverged");
    }
    warp.waiting = 0;
  }
  if (returned && returned < int(warps.size()))
    fail(kernel, "a barrier that some warps never reach");
  return returned > 0;
}

// ---- special registers -------------------------------------------------------------------------

struct Place {
  dim3 at, grid, block;
};

using Special = unsigned (*)(const Place& p, unsigned thread);

const std::map<std::string, Special> kSpecials = {
    {"%tid.x", [](const Place& p, unsigned i) { return i % p.block.x; }},
    {"%tid.y", [](const Place& p, unsigned i) { return i / p.block.x % p.block.y; }},
    {"%tid.z", [](const Place& p, unsigned i) { return i / p.block.x / p.block.y; }},
    {"%laneid", [](const Place&, unsigned i) { return i % kLanes; }},
    {"%ntid.x", [](const Place& p, unsigned) { return p.block.x; }},
    {"%ntid.y", [](const Place& p, unsigned) { return p.block.y; }},
    {"%ntid.z", [](const Place& p, unsigned) { return p.block.z; }},
    {"%ctaid.x", [](const Place& p, unsigned) { return p.at.x; }},
    {"%ctaid.y", [](const Place& p, unsigned) { return p.at.y; }},
    {"%ctaid.z", [](const Place& p, unsigned) { return p.at.z; }},
    {"%nctaid.x", [](const Place& p, unsigned) { return p.grid.x; }},
    {"%nctaid.y", [](const Place& p, unsigned) { return p.grid.y; }},
    {"%nctaid.z", [](const Place& p, unsigned) { return p.grid.z; }},
};

using Specials = std::vector<std::pair<int, Special>>;

Specials specials_of(const Kernel& kernel) {
  Specials found;
  for (const auto& [name, value] : kSpecials)
    if (kernel.registers.count(name)) found.push_back({kernel.registers.at(name), value});
  return found;
}

void prepare(const Specials& specials, Warp& warp, unsigned first, const Place& place) {
  const unsigned left = place.block.x * place.block.y * place.block.z - first;
  warp.lanes = warp.alive = left >= kLanes ? ~0u : (1u << left) - 1;
  warp.waiting = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    warp.pc[l] = 0;
    warp.begun[l].clear();
    for (const auto& [number, value] : specials) warp.write(number)[l] = value(place, first + l);
  }
}

// ---- a launch ----------------------------------------------------------------------------------

std::vector<char> packed(const Kernel& kernel, const std::vector<Argument>& arguments) {
  if (arguments.size() != kernel.param_offset.size()) fail(kernel, "another number of arguments");
  std::vector<char> params(kernel.param_bytes);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const size_t end = i + 1 < arguments.size() ? kernel.param_offset[i + 1] : kernel.param_bytes;
    if (kernel.param_offset[i] + arguments[i].bytes > end) fail(kernel, "an argument is too large");
    std::memcpy(&params[kernel.param_offset[i]], arguments[i].data, arguments[i].bytes);
  }
  return params;
}

std::vector<uint64_t> shuffled(uint64_t count, uint64_t seed, std::mt19937_64& order) {
  std::vector<uint64_t> made(count);
  std::iota(made.begin(), made.end(), 0);
  if (seed) std::shuffle(made.begin(), made.end(), order);
  return made;
}

}  // namespace

bool is_special(const std::string& name) {
  return kSpecials.count(name) > 0;
}

Operation find_operation(const std::string& name) {
  static const Table table = [] {
    Table made;
    add_arithmetic(made);
    add_memory(made);
    add_warp(made);
    return made;
  }();
  const auto found = table.find(name);
  return found == table.end() ? Operation() : found->second;
}

void launch(
    Kernel& kernel, dim3 grid, dim3 block, size_t dynamic_bytes,
    const std::vector<Argument>& arguments, uint64_t seed) {
  const unsigned threads = block.x * block.y * block.z;
  const size_t shared_bytes = kernel.shared_bytes + dynamic_bytes;
  if (kernel.max_threads && threads > kernel.max_threads)
    fail(kernel, std::to_string(threads) + " threads are more than its __launch_bounds__");
  if (shared_bytes > kMaxShared)
    fail(kernel, std::to_string(shared_bytes) + " bytes of shared memory are more than there are");
  const std::vector<char> params = packed(kernel, arguments);
  alignas(16) static thread_local char shared[kMaxShared];
  const Warp fresh(kernel, shared, shared_bytes, params.data());
  std::vector<Warp> warps((threads + kLanes - 1) / kLanes, fresh);
  const Specials specials = specials_of(kernel);
  std::mt19937_64 order(seed);
  for (const uint64_t b : shuffled(uint64_t(grid.x) * grid.y * grid.z, seed, order)) {
    const dim3 at(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    for (size_t w = 0; w < warps.size(); ++w)
      prepare(specials, warps[w], unsigned(w) * kLanes, {at, grid, block});
    std::memset(shared, 0xff, shared_bytes);
    const std::vector<uint64_t> turns = shuffled(warps.size(), seed, order);
    do
      for (const uint64_t w : turns) run_to_barrier(kernel, warps[w]);
    while (!pass_barrier(kernel, warps));
  }
}

}  // namespace hostrun::ptx
