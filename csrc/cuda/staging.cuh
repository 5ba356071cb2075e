// Pieces of 16-bit matrices in shared memory: copied there asynchronously, read as fragments of an
// mma.
#pragma once
#include "mma.cuh"

namespace bnuq {

constexpr int kLinearWarps = 8;
constexpr int kLinearThreads = kLinearWarps * kWarp;
constexpr int kStage = 64;          // columns of a matrix that are in shared memory at a time
constexpr int kPitch = kStage + 8;  // 36 words a row: eight rows of 16 bytes meet 32 banks
constexpr int kPitchBytes = 2 * kPitch;

#ifdef BNUQ_HOSTRUN

using SharedAddress = const char*;  // in bytes

inline SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(p);
}

inline void copy_async(SharedAddress shared, const void* from, bool inside) {
  hostrun::check_aligned(shared, 16, {__FILE__, __LINE__});
  hostrun::check_aligned(from, 16, {__FILE__, __LINE__});
  char* to = const_cast<char*>(shared);
  hostrun::begin([=] { inside ? memcpy(to, from, 16) : memset(to, 0, 16); });
}

inline void wait_for_copies() {
  hostrun::finish_all();
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

// 16 bytes to shared memory, zeros where `inside` is false; there after wait_for_copies, for other
// threads after a barrier besides.
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

// A 16-bit matrix whose rows are padded with zeros to a multiple of 16 columns.
template <typename half_t>
struct Rows {
  const half_t* data;
  int64_t rows, columns;
};

// Begins to copy rows [first, first + num_rows) and columns [column, column + kStage) to shared
// memory, zeros for what lies outside. All threads of the block.
template <typename half_t>
BNUQ_DEVICE void stage_rows(
    SharedAddress shared, const Rows<half_t>& m, int64_t first, int num_rows, int64_t column) {
  constexpr int kVectors = kStage / 8, kStep = kLinearThreads / kVectors;
  const int c = threadIdx.x % kVectors * 8, r = threadIdx.x / kVectors;
  const int64_t rows = column + c < m.columns ? smaller<int64_t>(m.rows - first, num_rows) : 0;
  const half_t* from = m.data + (first + r) * m.columns + column + c;
  const int64_t step = kStep * m.columns;
  shared += r * kPitchBytes + c * 2;
  for (int k = r; k < num_rows; k += kStep, from += step, shared += kStep * kPitchBytes)
    copy_async(shared, k < int(rows) ? from : m.data, k < int(rows));
}

}  // namespace bnuq
