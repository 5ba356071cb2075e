// ldmatrix, and mma.sync.aligned.m16n8k16 with 16-bit operands and a float32 accumulator, by the
// fragment layout of the PTX ISA. With g = lane / 4 and t = lane % 4:
//   A (16 x 16): register r holds row g + 8 * (r & 1), columns 2 t + 8 * (r >> 1) and the next
//   B (16 x 8):  register r holds rows 2 t + 8 * r and the next, column g
//   C, D (16 x 8): element e is row g + 8 * (e >> 1), column 2 t + (e & 1)
#pragma once
#include "hostrun.h"

namespace hostrun {

struct Mma {
  const uint32_t *a, *b;
  const float* c;
  float d[4];
};

template <typename scalar_t>
float packed_value(uint32_t pair, int slot) {
  scalar_t value;
  value.bits = uint16_t(pair >> (16 * slot));
  return value;
}

// One element of D, summed in float64 and rounded once.
template <typename scalar_t>
float mma_element(void* const* lanes, int row, int column, float c) {
  double sum = c;
  for (int k = 0; k < 16; ++k) {
    const auto* a = static_cast<const Mma*>(lanes[row % 8 * 4 + k % 8 / 2]);
    const auto* b = static_cast<const Mma*>(lanes[column * 4 + k % 8 / 2]);
    sum += double(packed_value<scalar_t>(a->a[row / 8 + 2 * (k / 8)], k % 2)) *
           packed_value<scalar_t>(b->b[k / 8], k % 2);
  }
  return float(sum);
}

// D = A B + C for the whole warp; d may be c.
template <typename scalar_t>
void mma_m16n8k16(
    float* d, const uint32_t* a, const uint32_t* b, const float* c,
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  Mma operand = {a, b, c, {}};
  const auto combine = [](void* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      auto* mine = static_cast<Mma*>(lanes[lane]);
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        mine->d[e] = mma_element<scalar_t>(lanes, row, column, mine->c[e]);
      }
    }
  };
  warp_collective(~0u, combine, &operand, {file, line});
  for (int e = 0; e < 4; ++e) d[e] = operand.d[e];
}

struct LoadMatrices {
  uint16_t row[8];
  uint32_t matrix[4];
};

inline uint16_t matrix_element(void* const* lanes, int m, int row, int column) {
  return static_cast<const LoadMatrices*>(lanes[8 * m + row])->row[column];
}

// ldmatrix.x4: lane l gives row l % 8 of matrix l / 8 (8 x 8 numbers of 16 bits); lane 4 g + t gets
// of each matrix row g, columns 2 t and the next; transposed, column g, rows 2 t and the next.
template <bool kTransposed>
void load_matrices(
    uint32_t (&matrix)[4], const void* row, const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  check_aligned(row, 16, {file, line});
  LoadMatrices operand = {};
  memcpy(operand.row, row, sizeof(operand.row));
  const auto combine = [](void* const* lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        const int g = lane / 4, t = lane % 4 * 2;
        const uint32_t low =
            kTransposed ? matrix_element(lanes, m, t, g) : matrix_element(lanes, m, g, t);
        const uint32_t high =
            kTransposed ? matrix_element(lanes, m, t + 1, g) : matrix_element(lanes, m, g, t + 1);
        static_cast<LoadMatrices*>(lanes[lane])->matrix[m] = low | high << 16;
      }
  };
  warp_collective(~0u, combine, &operand, {file, line});
  for (int m = 0; m < 4; ++m) matrix[m] = operand.matrix[m];
}

}  // namespace hostrun
