// Arithmetic, comparison, conversion. Approximate instructions are computed exactly and then moved by
// up to the error that the PTX ISA grants them, if asked to. ptxas may make one rounding of a
// product and a sum, where these make two.
#include <cfenv>
#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "ptx_lanes.h"
#include "types.h"

namespace hostrun::ptx {
namespace {

using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using f32 = float;
using f64 = double;

f32 flushed(f32 v) {
  return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v;
}

// Wraps around, where C++ leaves it open for signed numbers.
template <typename T>
using Wrapping = std::make_unsigned_t<T>;

template <typename T>
T divisor(T b) {
  if (b == 0) throw std::runtime_error("ptx: a division by zero");
  return b;
}

template <typename T>
void add_integers(Table& t, const std::string& s) {
  using W = Wrapping<T>;
  t["add." + s] = each<T, T, T>([](T a, T b) { return T(W(a) + W(b)); });
  t["sub." + s] = each<T, T, T>([](T a, T b) { return T(W(a) - W(b)); });
  t["mul.lo." + s] = each<T, T, T>([](T a, T b) { return T(W(a) * W(b)); });
  t["mad.lo." + s] = each<T, T, T, T>([](T a, T b, T c) { return T(W(a) * W(b) + W(c)); });
  t["div." + s] = each<T, T, T>([](T a, T b) { return T(a / divisor(b)); });
  t["rem." + s] = each<T, T, T>([](T a, T b) { return T(a % divisor(b)); });
  t["neg." + s] = each<T, T>([](T a) { return T(W(0) - W(a)); });
  t["min." + s] = each<T, T, T>([](T a, T b) { return b < a ? b : a; });
  t["max." + s] = each<T, T, T>([](T a, T b) { return a < b ? b : a; });
  constexpr u32 kBits = 8 * sizeof(T);
  t["shr." + s] = each<T, T, u32>([](T a, u32 n) {
    if (n < kBits) return T(a >> n);
    return T(a < 0 ? -1 : 0);
  });
}

template <typename T>
void add_bits(Table& t, const std::string& s) {
  t["and." + s] = each<T, T, T>([](T a, T b) { return T(a & b); });
  t["or." + s] = each<T, T, T>([](T a, T b) { return T(a | b); });
  t["xor." + s] = each<T, T, T>([](T a, T b) { return T(a ^ b); });
  constexpr u32 kBits = 8 * sizeof(T);
  t["shl." + s] = each<T, T, u32>([](T a, u32 n) { return n < kBits ? T(a << n) : T(0); });
  t["shr." + s] = each<T, T, u32>([](T a, u32 n) { return n < kBits ? T(a >> n) : T(0); });
  t["bfi." + s] = each<T, T, T, u32, u32>([](T a, T b, u32 at, u32 length) {
    at &= 0xff, length &= 0xff;
    const T ones = length >= kBits ? T(~T(0)) : T((T(1) << length) - 1);
    return at >= kBits ? b : T((b & ~(ones << at)) | ((a & ones) << at));
  });
}

template <typename T>
void add_moves(Table& t, const std::string& s) {
  t["mov." + s] = each<T, T>([](T a) { return a; });
  t["selp." + s] = each<T, T, T, bool>([](T a, T b, bool p) { return p ? a : b; });
}

template <typename T>
void add_comparisons(Table& t, const std::string& s) {
  t["setp.eq." + s] = each<bool, T, T>([](T a, T b) { return a == b; });
  t["setp.ne." + s] = each<bool, T, T>([](T a, T b) {
    return std::is_floating_point_v<T> ? a < b || a > b : a != b;  // false of a NaN
  });
  t["setp.lt." + s] = each<bool, T, T>([](T a, T b) { return a < b; });
  t["setp.le." + s] = each<bool, T, T>([](T a, T b) { return a <= b; });
  t["setp.gt." + s] = each<bool, T, T>([](T a, T b) { return a > b; });
  t["setp.ge." + s] = each<bool, T, T>([](T a, T b) { return a >= b; });
}

template <typename R, typename... A, typename F>
Operation each_canonical(F) {
  return each<R, A...>([](A... a) { return canonical<R>(F()(a...)); });
}

// The number of a number and a NaN; +0 is larger than -0.
template <typename T>
T larger(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

template <typename T>
void add_floats(Table& t, const std::string& s) {
  add_comparisons<T>(t, s);
  // True of a NaN.
  t["setp.equ." + s] = each<bool, T, T>([](T a, T b) { return !(a < b || a > b); });
  t["setp.neu." + s] = each<bool, T, T>([](T a, T b) { return a != b; });
  t["setp.ltu." + s] = each<bool, T, T>([](T a, T b) { return !(a >= b); });
  t["setp.leu." + s] = each<bool, T, T>([](T a, T b) { return !(a > b); });
  t["setp.gtu." + s] = each<bool, T, T>([](T a, T b) { return !(a <= b); });
  t["setp.geu." + s] = each<bool, T, T>([](T a, T b) { return !(a < b); });
  t["setp.nan." + s] = each<bool, T, T>([](T a, T b) { return a != a || b != b; });
  t["setp.num." + s] = each<bool, T, T>([](T a, T b) { return a == a && b == b; });
  for (const std::string rn : {".", ".rn."}) {
    t["add" + rn + s] = each_canonical<T, T, T>([](T a, T b) { return a + b; });
    t["sub" + rn + s] = each_canonical<T, T, T>([](T a, T b) { return a - b; });
    t["mul" + rn + s] = each_canonical<T, T, T>([](T a, T b) { return a * b; });
  }
  t["fma.rn." + s] = each_canonical<T, T, T, T>([](T a, T b, T c) { return std::fma(a, b, c); });
  t["div.rn." + s] = each_canonical<T, T, T>([](T a, T b) { return a / b; });
  t["rcp.rn." + s] = each_canonical<T, T>([](T a) { return T(1) / a; });
  t["sqrt.rn." + s] = each_canonical<T, T>([](T a) { return std::sqrt(a); });
  t["neg." + s] = each<T, T>([](T a) { return -a; });
  t["abs." + s] = each<T, T>([](T a) { return std::fabs(a); });
  t["max." + s] = each_canonical<T, T, T>([](T a, T b) { return larger(a, b); });
  t["min." + s] = each_canonical<T, T, T>([](T a, T b) { return -larger(-a, -b); });
  t["max.NaN." + s] =
      each_canonical<T, T, T>([](T a, T b) { return a != a || b != b ? a + b : larger(a, b); });
}

// The numbers are read, and written, between the two calls: nothing moves them out.
template <int kMode, typename F, typename... A>
void apply_rounded(Warp& warp, const Instruction& i, uint32_t lanes) {
  const int before = std::fegetround();
  std::fesetround(kMode);
  apply<F, f32, A...>(warp, i, lanes);
  std::fesetround(before);
}

template <int kMode, typename... A, typename F>
Operation each_rounded(F) {
  return {&apply_rounded<kMode, F, A...>, int(sizeof...(A)) + 1};
}

void add_directed(Table& t) {
  t["fma.rm.f32"] = each_rounded<FE_DOWNWARD, f32, f32, f32>(
      [](f32 a, f32 b, f32 c) { return canonical(std::fma(a, b, c)); });
  t["add.rz.f32"] =
      each_rounded<FE_TOWARDZERO, f32, f32>([](f32 a, f32 b) { return canonical(a + b); });
}

// ---- approximate instructions ------------------------------------------------------------------

// Between -1 and 1, another for each number.
double wobble(f64 v) {
  uint64_t h = bits_of(v) * 0x9e3779b97f4a7c15ull;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ull;
  return double(int64_t(h)) * 0x1p-63;
}

// A table holds powers of two as they are.
f32 relative(f64 exact, f64 error) {
  int exponent;
  if (std::fabs(std::frexp(exact, &exponent)) == 0.5) return f32(exact);
  return f32(exact * (1 + approximation * error * wobble(exact)));
}

f32 absolute(f64 exact, f64 error) {
  return f32(exact + approximation * error * wobble(exact));
}

// Of a sine or cosine of this angle.
f64 trigonometric_error(f32 a) {
  if (a == 0) return 0;
  return std::fabs(a) <= 6.2831855f ? 0x1.6a09e6p-21 : 0x1.3b2c48p-15;  // 2^-20.5, 2^-14.7
}

// The upper half of the bits of a float64.
f64 upper(f64 v) {
  return get<f64>(bits_of(v) & 0xffffffff00000000ull);
}

void add_approximate(Table& t) {
  t["ex2.approx.ftz.f32"] = each_canonical<f32, f32>(
      [](f32 a) { return flushed(relative(std::exp2(f64(flushed(a))), 0x1p-22)); });
  t["lg2.approx.ftz.f32"] = each_canonical<f32, f32>([](f32 a) {
    const f64 exact = std::log2(f64(flushed(a)));
    if (!std::isfinite(exact) || exact == 0) return f32(exact);
    return absolute(exact, 0x1p-22 * std::fmax(1, std::fabs(exact)));
  });
  t["sin.approx.f32"] = each_canonical<f32, f32>(
      [](f32 a) { return absolute(std::sin(f64(a)), trigonometric_error(a)); });
  t["cos.approx.f32"] = each_canonical<f32, f32>(
      [](f32 a) { return absolute(std::cos(f64(a)), trigonometric_error(a)); });
  t["sqrt.approx.ftz.f32"] = each_canonical<f32, f32>(
      [](f32 a) { return flushed(relative(std::sqrt(f64(flushed(a))), 0x1p-23)); });
  t["rsqrt.approx.f32"] = each_canonical<f32, f32>(
      [](f32 a) { return relative(1 / std::sqrt(f64(a)), 0x1.13p-23); });  // 2^-22.9
  t["rsqrt.approx.f64"] = each<f64, f64>([](f64 a) { return 1 / std::sqrt(a); });
  t["rcp.approx.ftz.f64"] = each<f64, f64>([](f64 a) { return upper(1 / upper(a)); });
}

// ---- conversions -------------------------------------------------------------------------------

template <typename R, typename A>
void add_conversion(Table& t, const std::string& s) {
  t["cvt." + s] = each_canonical<R, A>([](A a) { return R(a); });
}

void add_conversions(Table& t) {
  add_conversion<u32, u64>(t, "u32.u64");
  add_conversion<u64, u32>(t, "u64.u32");
  add_conversion<s64, s32>(t, "s64.s32");
  add_conversion<f32, s32>(t, "rn.f32.s32");
  add_conversion<f32, u32>(t, "rn.f32.u32");
  add_conversion<f32, s64>(t, "rn.f32.s64");
  add_conversion<f64, s64>(t, "rn.f64.s64");
  add_conversion<f64, f32>(t, "f64.f32");
  add_conversion<f32, f64>(t, "rn.f32.f64");
  t["cvt.sat.f32.f32"] = each<f32, f32>([](f32 a) { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; });
  t["cvt.f32.f16"] = each_canonical<f32, u16>([](u16 a) { return half_value(a); });
  t["cvt.f32.bf16"] = each_canonical<f32, u16>([](u16 a) { return bfloat16_value(a); });
  t["cvt.rn.f16.f32"] = each<u16, f32>([](f32 a) { return half_bits(a); });
  t["cvt.rn.bf16.f32"] = each<u16, f32>([](f32 a) { return bfloat16_bits(a); });
  // The first is the upper half.
  t["cvt.rn.f16x2.f32"] =
      each<u32, f32, f32>([](f32 a, f32 b) { return u32(half_bits(a)) << 16 | half_bits(b); });
  t["cvt.rn.bf16x2.f32"] = each<u32, f32, f32>(
      [](f32 a, f32 b) { return u32(bfloat16_bits(a)) << 16 | bfloat16_bits(b); });
}

// ---- bits, pairs -------------------------------------------------------------------------------

// Rounded to odd, so that it can be rounded once more to 16 bits as if it had not been.
f32 odd(f64 exact) {
  const f32 cut = toward_zero(exact);
  return std::isfinite(cut) && f64(cut) != exact ? get<f32>(bits_of(cut) | 1) : cut;
}

template <typename F>
u32 halves(F f) {
  return u32(f(0)) | u32(f(16)) << 16;
}

void add_register_moves(Table& t) {
  for (const char* s : {"b32", "u32", "s32"}) add_moves<u32>(t, s);
  for (const char* s : {"b64", "u64", "s64"}) add_moves<u64>(t, s);
  for (const char* s : {"b16", "u16", "s16"}) add_moves<u16>(t, s);
  add_moves<f32>(t, "f32");
  add_moves<f64>(t, "f64");
  add_moves<bool>(t, "pred");
  t["cvta.to.global.u64"] = t["mov.u64"];
  t["join.b64"] = each<u64, u32, u32>([](u32 low, u32 high) { return u64(high) << 32 | low; });
  t["join.b32"] = each<u32, u16, u16>([](u16 low, u16 high) { return u32(high) << 16 | low; });
}

void add_predicates(Table& t) {
  t["not.pred"] = each<bool, bool>([](bool a) { return !a; });
  t["and.pred"] = each<bool, bool, bool>([](bool a, bool b) { return a && b; });
  t["or.pred"] = each<bool, bool, bool>([](bool a, bool b) { return a || b; });
  t["xor.pred"] = each<bool, bool, bool>([](bool a, bool b) { return a != b; });
}

void add_words(Table& t) {
  t["mul.hi.u32"] = each<u32, u32, u32>([](u32 a, u32 b) { return u32(u64(a) * b >> 32); });
  t["mul.wide.u32"] = each<u64, u32, u32>([](u32 a, u32 b) { return u64(a) * b; });
  t["mul.wide.s32"] = each<s64, s32, s32>([](s32 a, s32 b) { return s64(a) * b; });
  t["not.b32"] = each<u32, u32>([](u32 a) { return ~a; });
  t["not.b64"] = each<u64, u64>([](u64 a) { return ~a; });
  t["lop3.b32"] = each<u32, u32, u32, u32, u32>([](u32 a, u32 b, u32 c, u32 table) {
    u32 out = 0;
    for (int bit = 0; bit < 32; ++bit)
      out |= (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit;
    return out;
  });
  t["prmt.b32"] = each<u32, u32, u32, u32>([](u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
      out |= (pick & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return out;
  });
}

void add_pairs(Table& t) {
  t["mul.rn.f16x2"] = each<u32, u32, u32>([](u32 a, u32 b) {
    return halves([&](int h) { return half_bits(half_value(a >> h) * half_value(b >> h)); });
  });
  t["fma.rn.bf16x2"] = each<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) {
    return halves([&](int h) {
      const auto value = [&](u32 v) { return f64(bfloat16_value(u16(v >> h))); };
      return bfloat16_bits(odd(std::fma(value(a), value(b), value(c))));
    });
  });
}

template <int kBits>
void part(Warp& warp, const Instruction& i, uint32_t lanes) {
  constexpr uint64_t kLow = (uint64_t(1) << kBits) - 1;
  const uint64_t* from = warp.read(i.operands[2]);
  uint64_t *low = warp.write(i.operands[0]), *high = warp.write(i.operands[1]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t v = from[l];
    low[l] = v & kLow;
    high[l] = v >> kBits & kLow;
  }
}

}  // namespace

double approximation = 0;

void add_arithmetic(Table& t) {
  add_bits<u16>(t, "b16");
  add_bits<u32>(t, "b32");
  add_bits<u64>(t, "b64");
  add_integers<s16>(t, "s16");
  add_integers<s32>(t, "s32");
  add_integers<s64>(t, "s64");
  add_integers<u16>(t, "u16");
  add_integers<u32>(t, "u32");
  add_integers<u64>(t, "u64");
  add_comparisons<s16>(t, "s16");
  add_comparisons<s32>(t, "s32");
  add_comparisons<s64>(t, "s64");
  add_comparisons<u16>(t, "u16");
  add_comparisons<u32>(t, "u32");
  add_comparisons<u64>(t, "u64");
  add_comparisons<u16>(t, "b16");
  add_comparisons<u32>(t, "b32");
  add_comparisons<u64>(t, "b64");
  add_floats<f32>(t, "f32");
  add_floats<f64>(t, "f64");
  add_directed(t);
  add_approximate(t);
  add_conversions(t);
  add_register_moves(t);
  add_predicates(t);
  add_words(t);
  add_pairs(t);
  t["part.b64"] = {&part<32>, 3};
  t["part.b32"] = {&part<16>, 3};
}

}  // namespace hostrun::ptx
