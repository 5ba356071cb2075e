// One planted error for each tool of compute-sanitizer, by name. A tool that stays silent here
// would stay silent on the kernels too.
#include <cstdio>
#include <cstring>

namespace bnuq {  // the tools are told to look at kernels with this in their names

constexpr int kThreads = 64;

__global__ void out_of_bounds_kernel(int* y) {
  y[threadIdx.x + 1] = 1;
}

__global__ void race_kernel(int* y) {
  __shared__ int table[kThreads];
  table[threadIdx.x] = int(threadIdx.x);
  y[threadIdx.x] = table[kThreads - 1 - threadIdx.x];
}

__global__ void uninitialised_kernel(const int* x, int* y) {
  y[threadIdx.x] = x[threadIdx.x] + 1;
}

__global__ void divergent_barrier_kernel(int* y) {
  __shared__ int table[kThreads];
  table[threadIdx.x] = int(threadIdx.x);
  if (threadIdx.x < kThreads - 16) {
    __syncthreads();
  }
  // By all: the others may leave a kernel without it, which is no error.
  y[threadIdx.x] = table[kThreads - 1 - threadIdx.x];
}

}  // namespace bnuq

using namespace bnuq;

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  int *x = nullptr, *y = nullptr;
  if (cudaMalloc(&x, kThreads * sizeof(int)) || cudaMalloc(&y, kThreads * sizeof(int))) {
    std::puts("no CUDA device");
    return 1;
  }
  if (!std::strcmp(name, "memcheck")) out_of_bounds_kernel<<<1, kThreads>>>(y);
  if (!std::strcmp(name, "racecheck")) race_kernel<<<1, kThreads>>>(y);
  if (!std::strcmp(name, "initcheck")) uninitialised_kernel<<<1, kThreads>>>(x, y);
  if (!std::strcmp(name, "synccheck")) divergent_barrier_kernel<<<1, kThreads>>>(y);
  // The tool reports through its exit status, which an error of ours would hide.
  std::printf("%s: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
