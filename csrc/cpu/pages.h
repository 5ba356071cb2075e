// Memory that is about to be filled for the first time.
#pragma once
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bnuq {

// Asks for large pages: the first touch of small ones takes several times as long as the arithmetic
// of batch norm. Only a hint, and none where the memory is smaller than a few large pages.
inline void prefer_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLarge = uintptr_t(1) << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kLarge - 1) & ~(kLarge - 1);
  const uintptr_t past = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~(kLarge - 1);
  if (past >= first + 2 * kLarge)
    madvise(reinterpret_cast<void*>(first), past - first, MADV_HUGEPAGE);
#endif
}

}  // namespace bnuq
