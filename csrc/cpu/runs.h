// The elements of a range by runs that lie one after the other: of one entry of a table, or for
// S = 1 a row of all entries.
#pragma once
#include <algorithm>
#include <cstdint>

namespace bnuq {
namespace {

// for (Runs run(...); run.left > 0; run.next()): `count` elements from entry c on. Divides once,
// for a division takes as long as a short run.
struct Runs {
  int64_t width, length, left, c, count;
  bool rows;

  Runs(int64_t begin, int64_t end, int64_t width, int64_t S)
      : width(width),
        length(S == 1 ? width : S),
        left(end - begin),
        c(begin / S % width),
        count(std::min(left, length - begin % length)),
        rows(S == 1) {}

  void next() {
    left -= count;
    count = std::min(left, length);
    c = rows || c + 1 == width ? 0 : c + 1;
  }
};

}  // namespace
}  // namespace bnuq
