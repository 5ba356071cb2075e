// What the kernels' accesses to memory touch, request by request: a request is what the lanes of a
// warp ask for by one instruction. Of global memory it touches sectors of 32 bytes, of shared
// memory it takes turns at the banks; the least is what as many bytes could do with.
// -fsanitize=thread calls what is defined here, in the place of its own library.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "block.h"

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // of the module

namespace {

using Address = uintptr_t;
constexpr unsigned kLanes = 32, kSectorBytes = 32, kBanks = 32, kBankBytes = 4, kWarps = 32;
constexpr Address kHostStack = 1 << 20, kOwnStack = 64 << 10, kShared = 52 << 10;

using Lanes = std::array<Address, kLanes>;  // what each asks for; 0: nothing

struct Line {
  uint64_t requests = 0, touched = 0, least = 0;
  // Of the block that runs: how often each thread came here, and what each warp asked for.
  std::array<unsigned, kWarps * kLanes> turns = {};
  std::array<std::vector<Lanes>, kWarps> warps;
};

// Place in the code; a store; shared memory; bytes of a lane.
using Instruction = std::tuple<Address, bool, bool, unsigned>;
std::map<Instruction, Line> lines;
dim3 block;
Address host_frame;  // 0: nothing is counted
bool noting;         // what this file does, whose templates may be those that are watched

Address distinct(std::vector<Address>& places) {
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places.size();
}

void count_global(Line& line, const Lanes& lanes, unsigned bytes) {
  std::vector<Address> places, sectors;
  for (const Address at : lanes)
    if (at) places.push_back(at), sectors.push_back(at / kSectorBytes);
  line.touched += distinct(sectors);
  line.least += (distinct(places) * bytes + kSectorBytes - 1) / kSectorBytes;
}

// 8 bytes a lane go by half a warp, 16 by a quarter.
void count_shared(Line& line, const Lanes& lanes, unsigned bytes) {
  const unsigned together = kLanes * kBankBytes / std::max(bytes, kBankBytes);
  for (unsigned first = 0; first < kLanes; first += together) {
    std::vector<Address> words;
    for (unsigned i = first; i < first + together; ++i)
      for (unsigned b = 0; lanes[i] && b < bytes; b += kBankBytes)
        words.push_back((lanes[i] + b) / kBankBytes);
    line.least += (distinct(words) + kBanks - 1) / kBanks;
    unsigned banks[kBanks] = {};
    for (const Address word : words) ++banks[word % kBanks];
    line.touched += *std::max_element(banks, banks + kBanks);
  }
}

void finish_block() {
  for (auto& [instruction, line] : lines) {
    const auto [pc, store, shared, bytes] = instruction;
    for (std::vector<Lanes>& warp : line.warps) {
      line.requests += warp.size();
      for (const Lanes& lanes : warp) (shared ? count_shared : count_global)(line, lanes, bytes);
      warp.clear();
    }
    line.turns = {};
  }
}

bool within(Address at, Address first, Address bytes) {
  return at - first < bytes;
}

// Stacks and constants, parameters of a kernel too, are not memory here.
void note(const void* p, unsigned bytes, bool store, const void* caller) {
  const Address at = Address(p), frame = Address(__builtin_frame_address(0));
  const auto of_host = [](Address a) { return within(a, host_frame - kHostStack, 2 * kHostStack); };
  if (!host_frame || noting || of_host(frame) || of_host(at) || within(at, frame, kOwnStack))
    return;
  const Address module = Address(&__ehdr_start);
  const bool shared = within(at, Address(hostrun::dynamic_shared()) - 1024, kShared);
  if (!shared && within(at, module, Address(&_end) - module)) return;
  noting = true;
  if (std::tie(block.x, block.y, block.z) != std::tie(blockIdx.x, blockIdx.y, blockIdx.z)) {
    finish_block();
    block = blockIdx;
  }
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  Line& line = lines[{Address(caller) - 1 - module, store, shared, bytes}];
  std::vector<Lanes>& warp = line.warps[thread / kLanes];
  const unsigned turn = line.turns[thread]++;
  if (turn == warp.size()) warp.push_back({});
  warp[turn][thread % kLanes] = at;
  noting = false;
}

void begin_launch(hostrun::Origin) {
  finish_block();
  block = dim3(~0u);
  host_frame = Address(__builtin_frame_address(0));
}

}  // namespace

#define HERE __builtin_return_address(0)
#define COPY __wrap__ZN7hostrun10begin_copyEPvPKvbNS_4SiteE
#define REAL_COPY __real__ZN7hostrun10begin_copyEPvPKvbNS_4SiteE
// clang-format off
#define ACCESSES(bytes)                                             \
  void __tsan_read##bytes(void* p) { note(p, bytes, false, HERE); } \
  void __tsan_write##bytes(void* p) { note(p, bytes, true, HERE); }

extern "C" {
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
    // clang-format on
    void __tsan_read_range(void*, size_t) {}  // of the stack: a thread moves 16 bytes at most
void __tsan_write_range(void*, size_t) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes <= 16) note(from, unsigned(bytes), false, HERE), note(to, unsigned(bytes), true, HERE);
  return __real_memcpy(to, from, bytes);
}
void REAL_COPY(void* to, const void* from, bool inside, hostrun::Site site);
void COPY(void* to, const void* from, bool inside, hostrun::Site site) {
  if (inside) note(from, 16, false, HERE);
  note(to, 16, true, HERE);
  REAL_COPY(to, from, inside, site);
}
void* __wrap__Znwm(size_t bytes) {  // as a GPU's: at the beginning of a sector
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}

__attribute__((visibility("default"))) void start_accesses() {
  lines.clear();
  hostrun::on_launch = begin_launch;
}

// A line for each instruction: its place, store, shared, requests, touched, least.
__attribute__((visibility("default"))) const char* finish_accesses() {
  finish_block();
  hostrun::on_launch = nullptr;
  host_frame = 0;
  static std::string text;
  text.clear();
  for (const auto& [instruction, line] : lines) {
    const auto [pc, store, shared, bytes] = instruction;
    for (const uint64_t v : {pc, Address(store), Address(shared)}) text += std::to_string(v) + " ";
    for (const uint64_t v : {line.requests, line.touched, line.least})
      text += std::to_string(v) + " ";
    text += "\n";
  }
  return text.c_str();
}
}
