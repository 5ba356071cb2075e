// How an instruction of independent lanes is made of a function of numbers.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ptx.h"

namespace hostrun::ptx {

template <typename T>
T get(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <>
inline bool get<bool>(uint64_t bits) {
  return bits != 0;
}

template <typename T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename F, typename R, typename... A, size_t... I>
void apply_lanes(Warp& warp, const Instruction& i, uint32_t lanes, std::index_sequence<I...>) {
  uint64_t* to = warp.write(i.operands[0]);
  const uint64_t* from[] = {warp.read(i.operands[I + 1])...};
  if (lanes == ~0u) {
    for (int l = 0; l < kLanes; ++l) to[l] = bits_of<R>(F()(get<A>(from[I][l])...));
  } else {
    for (int l = 0; l < kLanes; ++l)
      if (lanes >> l & 1) to[l] = bits_of<R>(F()(get<A>(from[I][l])...));
  }
}

template <typename F, typename R, typename... A>
void apply(Warp& warp, const Instruction& i, uint32_t lanes) {
  apply_lanes<F, R, A...>(warp, i, lanes, std::index_sequence_for<A...>());
}

// R f(A...) in each lane.
template <typename R, typename... A, typename F>
Operation each(F) {
  return {&apply<F, R, A...>, int(sizeof...(A)) + 1};
}

using Table = std::map<std::string, Operation>;

// float32 arithmetic has one NaN.
template <typename T>
T canonical(T v) {
  if constexpr (std::is_same_v<T, float>)
    if (v != v) return get<float>(0x7fffffff);
  return v;
}

inline float toward_zero(double v) {
  const float near = float(v);
  if (!std::isfinite(near) || std::fabs(double(near)) <= std::fabs(v)) return near;
  return get<float>(bits_of(near) - 1);
}

// How much of their allowed error the approximate instructions make: 0 none, 1 all of it.
extern double approximation;

void add_arithmetic(Table& table);
void add_memory(Table& table);
void add_warp(Table& table);

}  // namespace hostrun::ptx
