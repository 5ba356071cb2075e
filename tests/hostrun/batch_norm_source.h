// The statistics and parameters of a call, in the types of the kernels.
#pragma once
#include "../../csrc/cuda/columns.cuh"
#include "bindings.h"

template <typename acc_t>
bnuq::BankSource<acc_t> bank_source(const BatchNorm& call) {
  const auto *mean = static_cast<const acc_t*>(call.mean),
             *var = static_cast<const acc_t*>(call.var);
  return {mean, var, call.snapshot, call.seed, call.B, call.C};
}

template <typename acc_t>
bnuq::FittedSource<acc_t> fitted_source(const BatchNorm& call) {
  return {static_cast<const acc_t*>(call.params), call.seed, call.stream, call.family, call.C};
}

template <typename acc_t>
bnuq::Parameters<acc_t> parameters(const BatchNorm& call) {
  return {
      static_cast<const acc_t*>(call.weight), static_cast<const acc_t*>(call.bias), acc_t(call.eps),
      acc_t(call.slope)};
}
