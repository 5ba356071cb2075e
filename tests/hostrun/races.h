// What ThreadSanitizer is told, where it watches the kernels (HOSTRUN_RACES). A fiber is a thread
// of its own, which begins after all that ended before, and of the others in its block knows what
// the block's barriers tell it: two accesses to one address, a write among them, without a barrier
// between are a race in whatever order they ran.
#pragma once

#ifdef HOSTRUN_RACES
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace hostrun {

#ifdef HOSTRUN_RACES

inline void* make_thread() {
  return __tsan_create_fiber(0);
}
inline void* current_thread() {
  return __tsan_get_current_fiber();
}
inline void switch_thread(void* thread, bool ordered) {
  __tsan_switch_to_fiber(thread, ordered ? 0 : __tsan_switch_to_fiber_no_sync);
}

// From now on it comes after what the caller knows of.
inline void order_thread(void* thread) {
  void* caller = current_thread();
  switch_thread(thread, true);
  switch_thread(caller, false);
}

// Whoever leaves knows what those did who have arrived.
inline void arrive(char* meeting) {
  __tsan_release(meeting);
}
inline void leave(char* meeting) {
  __tsan_acquire(meeting);
}

// What lanes hand each other is none of their accesses to memory, and orders none.
struct Unseen {
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

#else

inline void* make_thread() {
  return nullptr;
}
inline void* current_thread() {
  return nullptr;
}
inline void switch_thread(void*, bool) {}
inline void order_thread(void*) {}
inline void arrive(char*) {}
inline void leave(char*) {}
struct Unseen {
  Unseen() {}
};

#endif

}  // namespace hostrun
