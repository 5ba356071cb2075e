// csrc/philox.h without torch, for the tests.
//
//   philox_driver words key stream tag replica index     the four words
//   philox_driver philox k0 k1 c0 c1 c2 c3               the bare block function
//   philox_driver tiles form key stream replica tile_o o tile calls
//                                      words of a weight's rows o, o + 8; [] where it cannot
//   philox_driver normals threads                        moments and tails over all words
//
// Bit 0 of a word is not used, so the 2^31 odd words are all there are.
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cpu/simd.h"
#include "cpu/weight_noise.h"
#include "philox.h"

using namespace bnuq;

struct Totals {
  double sum = 0, sum2 = 0, sum3 = 0, sum4 = 0, product = 0, largest = 0;
  int64_t above4 = 0, above5 = 0, tiny = 0;
};

constexpr int kBatch = 1024;

BNUQ_CLONES void make(float* z, uint32_t first) {
#pragma omp simd
  for (int i = 0; i < kBatch; ++i) normal_pair(first + 2 * uint32_t(i), z[i], z[kBatch + i]);
}

BNUQ_CLONES void add(Totals& totals, const float* z) {
  double sum = 0, sum2 = 0, sum3 = 0, sum4 = 0, product = 0;
  float largest = 0;
  int above4 = 0, above5 = 0, tiny = 0;
#pragma omp simd reduction(+ : sum, sum2, sum3, sum4, above4, above5, tiny) reduction(max : largest)
  for (int i = 0; i < 2 * kBatch; ++i) {
    const float size = std::fabs(z[i]);
    const double v = z[i], v2 = v * v;
    sum += v;
    sum2 += v2;
    sum3 += v2 * v;
    sum4 += v2 * v2;
    above4 += size > 4.0f;
    above5 += size > 5.0f;
    tiny += size < 1e-6f;
    largest = size > largest ? size : largest;
  }
#pragma omp simd reduction(+ : product)
  for (int i = 0; i < kBatch; ++i) product += double(z[i]) * double(z[kBatch + i]);
  totals.sum += sum, totals.sum2 += sum2, totals.sum3 += sum3, totals.sum4 += sum4;
  totals.product += product, totals.above4 += above4, totals.above5 += above5, totals.tiny += tiny;
  if (largest > totals.largest) totals.largest = largest;
}

void sweep(Totals& totals, uint64_t begin, uint64_t end) {
  Totals mine;
  std::array<float, 2 * kBatch> z;
  for (uint64_t w = begin; w < end; w += 2 * kBatch) {
    make(z.data(), uint32_t(w) | 1u);
    add(mine, z.data());
  }
  totals = mine;
}

void all_normals(int threads) {
  std::vector<Totals> parts(threads);
  std::vector<std::thread> pool;
  const uint64_t batches = (uint64_t(1) << 32) / (2 * kBatch);
  for (int i = 0; i < threads; ++i)
    pool.emplace_back(
        sweep, std::ref(parts[i]), batches * i / threads * 2 * kBatch,
        batches * (i + 1) / threads * 2 * kBatch);
  for (auto& thread : pool) thread.join();
  Totals t;
  for (const Totals& p : parts) {
    t.sum += p.sum, t.sum2 += p.sum2, t.sum3 += p.sum3, t.sum4 += p.sum4, t.product += p.product;
    t.above4 += p.above4, t.above5 += p.above5, t.tiny += p.tiny;
    if (p.largest > t.largest) t.largest = p.largest;
  }
  std::printf(
      "{\"count\": %.0f, \"sum\": %.17g, \"sum2\": %.17g, \"sum3\": %.17g, \"sum4\": %.17g, "
      "\"product\": %.17g, \"above4\": %" PRId64 ", \"above5\": %" PRId64 ", \"tiny\": %" PRId64
      ", \"largest\": %.9g}\n",
      4294967296.0, t.sum, t.sum2, t.sum3, t.sum4, t.product, t.above4, t.above5, t.tiny,
      t.largest);
}

// The words of rows o and o + 8 as processors with other vectors make them.
int tiles(const std::string& form, const std::vector<uint64_t>& a) {
  std::vector<uint32_t> words(4 * a[6]);
  const Key sub = subkey(int64_t(a[0]), uint32_t(a[1]), kTagWeight);
  const uint64_t first = weight_index(int64_t(a[3]), int64_t(a[5]), int(a[4]) * 4);
  uint32_t *lo = words.data(), *hi = words.data() + 2 * a[6];
  const int64_t calls = int64_t(a[6]);
  if (form == "portable") philox_words_portable(lo, hi, sub, first, 32, a[2], calls);
#if defined(BNUQ_AVX512)
  else if (form == "avx2" && has_avx2())
    philox_words_avx2(lo, hi, sub, first, 32, a[2], calls);
  else if (form == "avx512" && has_avx512())
    philox_words_avx512(lo, hi, sub, first, 32, a[2], calls);
#endif
  else
    words.clear();
  std::printf("[");
  for (size_t i = 0; i < words.size(); ++i) std::printf(i ? ", %u" : "%u", words[i]);
  std::printf("]\n");
  return 0;
}

uint64_t number(const char* text) {
  return text[0] == '-' ? uint64_t(std::strtoll(text, nullptr, 0))
                        : std::strtoull(text, nullptr, 0);
}

int main(int argc, char** argv) {
  Words4 w = {};
  if (argc == 3 && !std::strcmp(argv[1], "normals")) {
    all_normals(std::atoi(argv[2]));
    return 0;
  }
  const bool tiled = argc == 10 && !std::strcmp(argv[1], "tiles");
  std::vector<uint64_t> a;
  for (int i = tiled ? 3 : 2; i < argc; ++i) a.push_back(number(argv[i]));
  if (tiled) return tiles(argv[2], a);
  if (argc == 7 && !std::strcmp(argv[1], "words"))
    w = philox_at(subkey(int64_t(a[0]), uint32_t(a[1]), uint32_t(a[2])), a[4], a[3]);
  else if (argc == 8 && !std::strcmp(argv[1], "philox"))
    w = philox(
        {uint32_t(a[0]), uint32_t(a[1])}, uint32_t(a[2]), uint32_t(a[3]), uint32_t(a[4]),
        uint32_t(a[5]));
  else
    return 2;
  std::printf("[%u, %u, %u, %u]\n", w.v[0], w.v[1], w.v[2], w.v[3]);
  return 0;
}
