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
#include "ptx.h"

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

// All of its storage: kernels take strides beside a pointer.
AOTITorchError add_tensor(AtenTensorHandle tensor, const void* data, bool writable) {
  int64_t bytes = 0, offset = 0;
  int32_t dtype = 0;
  for (const AOTITorchError error :
       {aoti_torch_get_storage_size(tensor, &bytes), aoti_torch_get_storage_offset(tensor, &offset),
        aoti_torch_get_dtype(tensor, &dtype)})
    if (error) return error;
  const auto at = reinterpret_cast<uint64_t>(data);
  const uint64_t begin = at - uint64_t(offset) * aoti_torch_dtype_element_size(dtype);
  if (bytes) hostrun::ptx::add_tensor({begin, begin + uint64_t(bytes), writable});
  return AOTI_TORCH_SUCCESS;
}

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
  if (!--guards) hostrun::ptx::tensors.clear();
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __real_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError __real_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);

AOTITorchError __wrap_torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data) {
  const AOTITorchError error = __real_torch_get_const_data_ptr(tensor, data);
  return error ? error : add_tensor(tensor, *data, false);
}

AOTITorchError __wrap_torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = __real_torch_get_mutable_data_ptr(tensor, data);
  return error ? error : add_tensor(tensor, *data, true);
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
