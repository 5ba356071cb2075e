// What module.cpp hands to Python: plain functions, one group for each stem of csrc/cuda.
#pragma once
#include <cstdint>
#include <string>

#include "hostrun.h"

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
};

void run_probe(const std::string& name, const Launch& l, const float* x, float* y, int64_t n);
void run_mma(bool bfloat16, const uint16_t* a, const uint16_t* b, const float* c, float* d);
void to_half(const float* x, uint16_t* y, int64_t n, bool bfloat16);
void from_half(const uint16_t* x, float* y, int64_t n, bool bfloat16);
