// Pieces of 16-bit matrices in shared memory: copied there asynchronously, read as fragments of an
// mma.
#pragma once
#include "mma.cuh"

namespace bnuq {

constexpr int kLinearWarps = 8;
constexpr int kLinearThreads = kLinearWarps * kWarp;
constexpr int kStage = 64;  // columns of a matrix that are in shared memory at a time
// Of a row of so many columns in shared memory: eight rows of 16 bytes meet 32 banks.
constexpr int pitch_bytes(int columns) {
  return 2 * (columns + 8);
}
constexpr int kPitchBytes = pitch_bytes(kStage);

#ifdef BNUQ_HOSTRUN

using SharedAddress = const char*;  // in bytes

inline SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(p);
}

inline void copy_async(SharedAddress shared, const void* from, bool inside) {
  hostrun::begin_copy(const_cast<char*>(shared), from, inside, {__FILE__, __LINE__});
}

inline void wait_for_copies() {
  hostrun::finish_copies();
}

template <bool kTransposed>
void load_matrices(uint32_t (&matrix)[4], SharedAddress row) {
  hostrun::load_matrices<kTransposed>(matrix, row);
}

#else

using SharedAddress = uint32_t;  // in bytes

// Made once: a generic address is made into this with four instructions.
BNUQ_DEVICE SharedAddress shared_address(const void* p) {
  SharedAddress address = SharedAddress(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(address));
  return address;
}

// 16 bytes to shared memory, zeros and nothing read where `inside` is false; there after
// wait_for_copies, for other threads after a barrier besides.
BNUQ_DEVICE void copy_async(SharedAddress shared, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

BNUQ_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8, and gets of each
// matrix row g = lane / 4 at columns 2 (lane % 4) and the next, or so of its transpose.
template <bool kTransposed>
BNUQ_DEVICE void load_matrices(uint32_t (&matrix)[4], SharedAddress row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row));
}

#endif

// What a thread copies of a 16-bit matrix, whose rows are padded with zeros to a multiple of 16
// columns: eight columns of every kCopyRows-th row of a stage. It is moved on by its owner, since
// to find a place anew takes as many instructions as a quarter of the noise.
template <typename half_t, int kColumns = kStage>
struct RowCopy {
  static constexpr int kCopyRows = kLinearThreads / (kColumns / 8);
  const half_t* from;  // of its first row
  int64_t step;        // to its next

  // Of the stage whose first number is `stage`.
  BNUQ_DEVICE static RowCopy at(const half_t* stage, int64_t pitch) {
    return {stage + row() * pitch + column(), kCopyRows * pitch};
  }
  BNUQ_DEVICE static int row() { return threadIdx.x / (kColumns / 8); }
  BNUQ_DEVICE static int column() { return threadIdx.x % (kColumns / 8) * 8; }

  // Begins to copy `rows` rows, and zeros up to num_rows <= kMost or more. All threads of the
  // block.
  template <int kMost>
  BNUQ_DEVICE void begin(SharedAddress shared, int num_rows, int rows) const {
    constexpr int kPitchBytes = pitch_bytes(kColumns);
    shared += row() * kPitchBytes + column() * 2;
#pragma unroll
    for (int k = 0; k < kMost; k += kCopyRows)
      if (k < num_rows && (kMost % kCopyRows == 0 || row() + k < kMost))
        copy_async(shared + k * kPitchBytes, from + k / kCopyRows * step, row() + k < rows);
  }
};

}  // namespace bnuq
