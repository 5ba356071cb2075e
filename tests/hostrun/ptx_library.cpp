// Launches of csrc/cuda that run the kernel's PTX in the place of its source.
#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "ptx_lanes.h"

namespace {

using hostrun::ptx::Kernel;
using hostrun::ptx::launch;
using hostrun::ptx::parse;

std::map<std::string, std::unique_ptr<Kernel>> kernels;

// The one of the name that a function has; looking that up takes as long as a small launch.
Kernel& kernel_of(const void* function) {
  static std::map<const void*, Kernel*> known;
  Kernel*& kernel = known[function];
  if (kernel) return *kernel;
  Dl_info found;
  const bool named = dladdr(function, &found) && found.dli_sname;
  const auto entry = kernels.find(named ? found.dli_sname : "");
  if (entry == kernels.end())
    throw std::runtime_error(std::string("ptx: no entry for ") + (named ? found.dli_sname : "?"));
  kernel = entry->second.get();
  return *kernel;
}

void run(
    const void* function, dim3 grid, dim3 block, size_t dynamic_bytes,
    const std::vector<hostrun::Argument>& arguments, uint64_t order_seed) {
  launch(kernel_of(function), grid, block, dynamic_bytes, arguments, order_seed);
}

// What was thrown, or nothing.
template <typename F>
const char* message(F f) {
  static thread_local std::string text;
  text.clear();
  try {
    f();
  } catch (const std::exception& e) {
    text = e.what();
  }
  return text.c_str();
}

}  // namespace

#define HOSTRUN_EXPORT extern "C" __attribute__((visibility("default")))

// From here on launches run the kernels of this file.
HOSTRUN_EXPORT const char* hostrun_load_ptx(const char* path) {
  return message([&] {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    kernels.merge(parse(text.str()));
    hostrun::run_compiled = run;
  });
}

// A kernel that takes one pointer.
HOSTRUN_EXPORT const char* hostrun_run_ptx(
    const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, void* pointer,
    uint64_t order_seed) {
  return message([&] {
    const std::vector<hostrun::Argument> arguments = {{&pointer, sizeof(pointer)}};
    launch(*kernels.at(name), blocks, threads, dynamic_bytes, arguments, order_seed);
  });
}

// From here on the only memory that kernels may touch; without bytes all is theirs.
HOSTRUN_EXPORT void hostrun_set_tensor(uint64_t begin, size_t bytes, bool writable) {
  hostrun::ptx::tensors.clear();
  if (bytes) hostrun::ptx::add_tensor({begin, begin + bytes, writable});
}

HOSTRUN_EXPORT void hostrun_set_approximation(double share) {
  hostrun::ptx::approximation = share;
}

// A line for each kernel: its name, how many instructions it has, how many of them have run.
HOSTRUN_EXPORT const char* hostrun_ptx_report() {
  static std::string text;
  text.clear();
  for (const auto& [name, kernel] : kernels) {
    const auto& counts = kernel->executed;
    const auto idle = std::count(counts.begin(), counts.end(), 0);
    text += name + " " + std::to_string(counts.size()) + " " +
            std::to_string(counts.size() - idle) + "\n";
  }
  return text.c_str();
}
