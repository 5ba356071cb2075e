#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "races.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef HOSTRUN_UCONTEXT
// Saves the registers that a called function must keep and the stack pointer, and takes the others
// up. swapcontext does the same with a system call for the signal mask, fifteen times slower.
asm(R"(
.text
.hidden hostrun_switch
.globl hostrun_switch
.type hostrun_switch, @function
hostrun_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hostrun_switch, .-hostrun_switch
)");
extern "C" void hostrun_switch(void** save_to, void* load);
#endif

namespace hostrun {
namespace {

constexpr size_t kGuardBytes = 4096, kStackBytes = 128 << 10;

// The one scheduler: its place, and what AddressSanitizer wants to know of its stack.
#ifdef HOSTRUN_UCONTEXT
ucontext_t scheduler_place;
#else
void* scheduler_place;
#endif
[[maybe_unused]] const void* scheduler_bottom;
[[maybe_unused]] size_t scheduler_bytes;
void* scheduler_thread;
Fiber* running;

void start_switch(
    [[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t n) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(fake, bottom, n);
#endif
}

void finish_switch(
    [[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* n) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, bottom, n);
#endif
}

}  // namespace

Fiber::Fiber() {
  void* mapping = mmap(
      nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  mprotect(mapping_, kGuardBytes, PROT_NONE);
}

Fiber::~Fiber() {
  munmap(mapping_, kGuardBytes + kStackBytes);
}

void Fiber::prepare(void (*entry)()) {
  entry_ = entry;
  fake_stack_ = nullptr;
  if (!thread_) thread_ = make_thread();
  order_thread(thread_);
  char* stack = mapping_ + kGuardBytes;
#ifdef __SANITIZE_ADDRESS__
  // A fiber never returns from its frames, so their red zones are still marked.
  ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes);
#endif
#ifdef HOSTRUN_UCONTEXT
  getcontext(&place_);
  place_.uc_stack.ss_sp = stack;
  place_.uc_stack.ss_size = kStackBytes;
  place_.uc_link = nullptr;
  makecontext(&place_, begin, 0);
#else
  uint64_t* top = reinterpret_cast<uint64_t*>(stack + kStackBytes);
  *--top = 0;  // where begin would return to
  *--top = reinterpret_cast<uint64_t>(&begin);
  for (int i = 0; i < 6; ++i) *--top = 0;
  place_ = top;
#endif
}

void Fiber::begin() {
  finish_switch(nullptr, &scheduler_bottom, &scheduler_bytes);
  running->entry_();
  __builtin_trap();
}

void Fiber::switch_in() {
#ifdef HOSTRUN_UCONTEXT
  swapcontext(&scheduler_place, &place_);
#else
  hostrun_switch(&scheduler_place, place_);
#endif
}

void Fiber::switch_out() {
#ifdef HOSTRUN_UCONTEXT
  swapcontext(&place_, &scheduler_place);
#else
  hostrun_switch(&place_, scheduler_place);
#endif
}

void Fiber::resume() {
  running = this;
  scheduler_thread = current_thread();
  void* fake = nullptr;
  start_switch(&fake, mapping_ + kGuardBytes, kStackBytes);
  switch_thread(thread_, false);
  switch_in();
  finish_switch(fake, nullptr, nullptr);
}

void Fiber::suspend(bool finished) {
  start_switch(finished ? nullptr : &fake_stack_, scheduler_bottom, scheduler_bytes);
  switch_thread(scheduler_thread, finished);
  switch_out();
  finish_switch(fake_stack_, nullptr, nullptr);
}

}  // namespace hostrun
