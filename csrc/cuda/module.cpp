// The CUDA library has a C++ source so that the linker is called as for any extension; the kernels
// register themselves in their .cu files.
