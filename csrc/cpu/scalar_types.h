// The type of an op's elements, from that of a tensor.
#pragma once
#include "../dispatch.h"
#include "convert.h"

namespace bnuq {

template <typename F>
void dispatch(ScalarType type, const F& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float());
    case ScalarType::Double:
      return body(double());
    case ScalarType::Half:
      return body(Half());
    case ScalarType::BFloat16:
      return body(BFloat16());
    default:
      STD_TORCH_CHECK(false, "bnuq: dtype must be float32, float64, float16 or bfloat16");
  }
}

}  // namespace bnuq
