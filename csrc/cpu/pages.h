// Memory in large pages.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bnuq {

constexpr uintptr_t kLargePage = uintptr_t(1) << 21;

// Asks for large pages: the first touch of small ones takes several times as long as the arithmetic
// of batch norm. Only a hint, and none where the memory is smaller than a few large pages.
inline void prefer_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kLargePage - 1) & ~(kLargePage - 1);
  const uintptr_t past = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~(kLargePage - 1);
  if (past >= first + 2 * kLargePage)
    madvise(reinterpret_cast<void*>(first), past - first, MADV_HUGEPAGE);
#endif
}

constexpr int64_t kScratchBytes = 2 * int64_t(kLargePage);

// kScratchBytes that the calling thread, of torch's too, owns until it ends; null where there is
// no memory. What is written again and again takes up to a quarter longer in small pages, wherever
// they happen to lie, and in pages that go back to the system after each call.
inline void* thread_scratch() {
  constexpr std::align_val_t alignment{kLargePage};
  struct Deleter {
    void operator()(void* data) const { operator delete(data, alignment); }
  };
  thread_local const std::unique_ptr<void, Deleter> memory = [] {
    void* data = operator new(kScratchBytes, alignment, std::nothrow);
    if (data) prefer_large_pages(data, kScratchBytes);
    return std::unique_ptr<void, Deleter>(data);
  }();
  return memory.get();
}

}  // namespace bnuq
