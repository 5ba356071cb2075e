// A fiber: a stack of its own and the place where it stopped. One for every CUDA thread of a block.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(HOSTRUN_UCONTEXT)
#define HOSTRUN_UCONTEXT
#endif
#ifdef HOSTRUN_UCONTEXT
#include <ucontext.h>
#endif

namespace hostrun {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Forgets where the fiber stopped; the next resume begins `entry`, which must never return.
  void prepare(void (*entry)());
  // Runs the fiber until it suspends. Called by the scheduler, never by a fiber.
  void resume();
  // Back to the scheduler. With `finished` the fiber never runs again before the next prepare.
  void suspend(bool finished = false);

 private:
  static void begin();
  void switch_in();
  void switch_out();

  char* mapping_;  // a guard page, then the stack
  void (*entry_)() = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  void* thread_ = nullptr;      // ThreadSanitizer's
#ifdef HOSTRUN_UCONTEXT
  ucontext_t place_;
#else
  void* place_ = nullptr;  // the stack pointer
#endif
};

}  // namespace hostrun
