// Torch's side of csrc/cuda/launch.h for tensors on the CPU. The linker puts these in the place of
// torch's own (--wrap), so that csrc/ops.cpp and csrc/cuda/*.cu make a library that registers its
// kernels for the CPU and runs them there.
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "block.h"

namespace {

thread_local int guards = 0;  // alive
int stream;                   // its address stands for the current stream
std::map<const void*, int64_t> launches;

// A launch beside the current stream, or for whichever device is the current one, is an error that
// a machine with one GPU and one stream never shows.
void check_origin(hostrun::Origin origin) {
  if (!guards) throw std::runtime_error("hostrun: a launch without a device guard");
  if (origin.stream != &stream)
    throw std::runtime_error("hostrun: a launch beside the current stream");
  ++launches[origin.kernel];
}

const bool installed = (hostrun::on_launch = check_origin, true);

}  // namespace

extern "C" {

AOTITorchError __real_aoti_torch_library_init_impl(
    const char* ns, const char* k, const char* file, uint32_t line, TorchLibraryHandle* made);

AOTITorchError __wrap_aoti_torch_library_init_impl(
    const char* ns, const char* k, const char* file, uint32_t line, TorchLibraryHandle* made) {
  const char* key = std::strcmp(k, "CUDA") ? k : "CPU";
  return __real_aoti_torch_library_init_impl(ns, key, file, line, made);
}

int32_t __wrap_aoti_torch_device_type_cuda() {
  return aoti_torch_device_type_cpu();
}

AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(&guards);
  ++guards;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_delete_device_guard(DeviceGuardHandle) {
  --guards;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_get_current_cuda_stream(int32_t, void** current) {
  *current = &stream;
  return AOTI_TORCH_SUCCESS;
}

__attribute__((visibility("default"))) void hostrun_set_order(uint64_t seed) {
  hostrun::set_order(seed);
}

// A line for each kernel that was launched: its address in the library's file, and how often.
__attribute__((visibility("default"))) const char* hostrun_launches() {
  static std::string text;
  Dl_info library;
  dladdr(&text, &library);
  text.clear();
  for (const auto& [kernel, count] : launches) {
    const char* base = static_cast<const char*>(library.dli_fbase);
    text += std::to_string(static_cast<const char*>(kernel) - base) + " " + std::to_string(count) +
            "\n";
  }
  return text.c_str();
}
}
