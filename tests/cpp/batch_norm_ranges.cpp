// The loops of csrc/cpu/batch_norm_ranges.h without torch, each against one element at a time.
//
//   batch_norm_ranges form     plain, fma or avx512: the number of elements compared, 0 where the
//                              processor lacks it; a line and status 1 at the first that differs
//
// Lengths of rows and planes, beginnings and ends inside them, addresses, x or the residual as the
// output, stores past the caches; NaN of every payload, infinities, subnormals. Nothing but the
// range may be written.
#include "cpu/batch_norm_ranges.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using namespace bnuq;

uint32_t state = 1;
uint32_t random_bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8 ^ state << 16;
}
int64_t random_below(int64_t n) {
  return random_bits() % n;
}

template <typename scalar_t>
scalar_t random_value() {
  const float value = float(int32_t(random_bits())) * 0x1p-30f;
  const uint32_t bits = random_bits();
  return store<scalar_t>(random_below(8) ? value : as_float(bits));  // or any float at all
}

template <typename scalar_t>
bool same(scalar_t a, scalar_t b) {
  const float x = load(a), y = load(b);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// y as csrc/batch_norm.h has it, by a fused multiply-add or not.
template <typename scalar_t>
scalar_t expected(
    const Range<float>& r, int64_t i, scalar_t x, const scalar_t* residual, bool fused) {
  const int64_t c = i / r.S % r.width;
  const float centred = load(x) - r.mean[c];
  volatile float product = centred * r.scale[c];  // kept from being fused
  float z = fused ? std::fma(centred, r.scale[c], r.bias[c]) : product + r.bias[c];
  if (residual) z += load(*residual);
  return store<scalar_t>(z < 0 ? (r.slope == 0 ? 0.0f : r.slope * z) : z);
}

template <typename scalar_t>
using Loop = void (*)(scalar_t*, const scalar_t*, const scalar_t*, const Range<float>&);

constexpr int64_t kGuard = 64;

// Where the compiler chooses, each element may be fused or not.
enum class Fused { kYes, kEither };

// orders: whether the loop takes ordered tables too.
template <typename scalar_t>
int64_t check(Loop<scalar_t> loop, Fused fused, bool orders) {
  const int64_t grid = random_below(2) ? 16 : 1;  // sixteens keep stores past the caches aligned
  const int64_t S = random_below(3) ? grid * (1 + random_below(random_below(2) ? 40 : 400)) : 1;
  const int64_t width = S == 1 ? grid * (1 + random_below(100)) : 1 + random_below(9);
  const int64_t numel = width * S * (1 + random_below(3));
  std::vector<float> table(3 * width);
  for (float& v : table) v = load(random_value<BFloat16>());
  const bool ordered = orders && S == 1 && grid == 16 && random_below(2);
  const int64_t begin = random_below(numel) / grid * grid,
                end = ordered ? numel : begin + 1 + random_below(numel - begin);
  const float slope = random_below(2) ? 0.0f : (random_below(2) ? 1.0f : 0.25f);
  const int output = random_below(3);  // fresh, x, residual
  const bool adds = output == 2 || random_below(2), stream = output == 0 && random_below(2);
  const Range<float> natural = {
      table.data(), &table[width], &table[2 * width], width, S, begin, end, slope, stream, false};
  std::vector<float> given = table;
  if (ordered) put_in_order(given.data(), 3 * width);
  Range<float> range = natural;
  range.mean = given.data(), range.scale = &given[width], range.bias = &given[2 * width];
  range.ordered = ordered;
  const int64_t count = end - begin, size = count + 2 * kGuard;
  const int64_t offset = kGuard + random_below(2) * random_below(16);
  std::vector<scalar_t> memory[3];  // y, x, residual
  for (auto& values : memory)
    for (int64_t i = 0; i < size; ++i) values.push_back(random_value<scalar_t>());
  const auto before = memory[output];
  const auto x = memory[1], residual = memory[2];
  scalar_t* y = &memory[output][offset];
  loop(y, &memory[1][offset], adds ? &memory[2][offset] : nullptr, range);
  for (int64_t i = 0; i < size; ++i) {
    const bool inside = i >= offset && i < offset + count;
    const auto want = [&](bool multiply_add) {
      if (!inside) return before[i];
      return expected(
          natural, begin + i - offset, x[i], adds ? &residual[i] : nullptr, multiply_add);
    };
    const scalar_t actual = memory[output][i];
    if (same(actual, want(true)) || (fused == Fused::kEither && same(actual, want(false))))
      continue;
    std::printf(
        "element %ld of %ld of an output %d: S %ld width %ld begin %ld slope %g residual %d stream "
        "%d ordered %d: %a, not %a\n",
        long(i - offset), long(count), output, long(S), long(width), long(begin), slope, adds,
        stream, ordered, load(actual), load(want(true)));
    std::exit(1);
  }
  return count;
}

template <typename scalar_t>
int64_t check_all(Loop<scalar_t> loop, Fused fused, bool orders = false) {
  int64_t compared = 0;
  for (int i = 0; i < 3000; ++i) compared += check(loop, fused, orders);
  return compared;
}

#if defined(BNUQ_AVX512)
// Of processors that do not round to bfloat16 themselves.
BNUQ_AVX512 int64_t check_rounded_words() {
  constexpr int64_t kTimes = 10000;
  for (int64_t i = 0; i < kTimes; ++i) {
    float values[16];
    for (float& v : values) v = random_value<float>();
    BFloat16 words[16];
    const __m256i rounded = rounded_words(_mm512_loadu_ps(values));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), rounded);
    for (int j = 0; j < 16; ++j) {
      if (same(words[j], store<BFloat16>(values[j]))) continue;
      std::printf("%a rounded to %a\n", values[j], load(words[j]));
      std::exit(1);
    }
  }
  return 16 * kTimes;
}
#endif

int main(int, char** arguments) {
  const std::string form = arguments[1];
  int64_t compared = 0;
  if (form == "plain")
    compared = check_all<Half>(forward_plain, Fused::kEither) +
               check_all<BFloat16>(forward_plain, Fused::kEither) +
               check_all<float>(forward_plain, Fused::kEither);
#if defined(BNUQ_FMA)
  if (form == "fma" && has_fma())
    compared = check_all<Half>(forward_fma, Fused::kYes) +
               check_all<BFloat16>(forward_fma, Fused::kYes, true) +
               check_all<float>(forward_fma, Fused::kYes);
#endif
#if defined(BNUQ_AVX512)
  if (form == "avx512" && has_avx512())
    compared = check_rounded_words() + check_all<Half>(forward_avx512, Fused::kYes) +
               check_all<BFloat16>(forward_avx512, Fused::kYes) +
               check_all<float>(forward_avx512, Fused::kYes);
#endif
  if (form != "plain" && form != "fma" && form != "avx512") return 2;
  std::printf("%ld\n", long(compared));
}
