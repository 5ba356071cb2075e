// Kernels as nvcc compiled them: the PTX text of a library, run thread by thread on the CPU. What the
// emulated source cannot show is shown here: inline assembly, intrinsics, what the compiler made.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

namespace hostrun::ptx {

constexpr int kLanes = 32, kOperands = 14;

struct Warp;
struct Instruction;
using Execute = void (*)(Warp& warp, const Instruction& i, uint32_t lanes);

enum class Flow { kNext, kBranch, kBarrier, kReturn };

// An operand is a register of 32 lanes, a constant in the same form, or the base of an address.
struct Instruction {
  Execute execute = nullptr;
  Flow flow = Flow::kNext;
  int operands[kOperands] = {};  // at least 0: a register; less: constant -1 - operand
  int predicate = 0;             // of the lanes that take part, if guarded
  bool guarded = false, negated = false;
  int64_t offset = 0;  // of the address
  uint32_t target = 0;
  int line = 0;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<size_t> param_offset;
  size_t param_bytes = 0, shared_bytes = 0;
  unsigned max_threads = 0;
  std::map<std::string, int> registers;
  std::vector<uint64_t> constants;
  std::vector<uint64_t> executed;  // how often each instruction
};

// One for each .entry of a PTX file.
std::map<std::string, std::unique_ptr<Kernel>> parse(const std::string& text);

// What carries out an instruction, null if its name means nothing here, and how many operands it has.
struct Operation {
  Execute execute = nullptr;
  int operands = 0;
};

Operation find_operation(const std::string& name);
bool is_special(const std::string& name);

struct Copy {
  uint32_t to;
  const char* from;  // null: zeros
};

// Memory of a tensor. Where there are any, all other global memory is out of bounds.
struct Tensor {
  uint64_t begin, end;
  bool writable;

  bool allows(uint64_t at, size_t bytes, bool write) const {
    return begin <= at && at + bytes <= end && (writable || !write);
  }
};

extern thread_local std::vector<Tensor> tensors;

// In the place of those that it overlaps: their memory was freed, or is its own.
void add_tensor(Tensor added);

struct Warp {
  Warp(const Kernel& k, char* shared_memory, size_t bytes, const char* parameters)
      : kernel(&k), shared(shared_memory), shared_bytes(bytes), params(parameters) {
    registers.assign(k.registers.size() * kLanes, 0xa5a5a5a5a5a5a5a5ull);
  }

  uint64_t* write(int operand) { return &registers[size_t(operand) * kLanes]; }
  const uint64_t* read(int operand) const {
    return operand >= 0 ? &registers[size_t(operand) * kLanes]
                        : &kernel->constants[size_t(-1 - operand) * kLanes];
  }

  const Kernel* kernel;
  char* shared;
  size_t shared_bytes;
  const char* params;
  std::vector<uint64_t> registers;
  uint32_t pc[kLanes];
  uint32_t lanes, alive, waiting;  // that it has, that have not returned, that are at a barrier
  std::vector<Copy> begun[kLanes];
  const Tensor* last = nullptr;  // whose memory was accessed
};

// Runs a kernel's PTX for a whole grid, blocks and warps in an order that comes from a seed.
void launch(
    Kernel& kernel, dim3 grid, dim3 block, size_t dynamic_bytes,
    const std::vector<Argument>& arguments, uint64_t seed);

}  // namespace hostrun::ptx
