// Loads and stores, and what a warp does together.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ptx_lanes.h"
#include "types.h"

namespace hostrun::ptx {
namespace {

[[noreturn]] void fail(const Warp& warp, const Instruction& i, const std::string& what) {
  throw std::runtime_error(
      "ptx: " + warp.kernel->name + ": line " + std::to_string(i.line) + ": " + what);
}

enum class Space { kGlobal, kShared, kParam };

void check_global(Warp& warp, const Instruction& i, uint64_t at, size_t bytes, bool write) {
  if (tensors.empty() || (warp.last && warp.last->allows(at, bytes, write))) return;
  for (const Tensor& tensor : tensors)
    if (tensor.allows(at, bytes, write)) {
      warp.last = &tensor;
      return;
    }
  fail(
      warp, i,
      std::string(write ? "writes " : "reads ") + std::to_string(bytes) +
          " bytes outside of the tensors that it may " + (write ? "write" : "read"));
}

template <Space kSpace, bool kWrite>
char* address(Warp& warp, const Instruction& i, uint64_t base, int64_t offset, size_t bytes) {
  const uint64_t sum = base + uint64_t(offset);
  const uint64_t at = kSpace == Space::kShared ? uint32_t(sum) : sum;
  if (at % bytes) fail(warp, i, std::to_string(at) + " is not aligned to " + std::to_string(bytes));
  if constexpr (kSpace == Space::kGlobal) {
    check_global(warp, i, at, bytes, kWrite);
    return reinterpret_cast<char*>(at);
  }
  const size_t limit = kSpace == Space::kShared ? warp.shared_bytes : warp.kernel->param_bytes;
  if (at > limit || bytes > limit - at)
    fail(warp, i, std::to_string(at) + " is outside of " + std::to_string(limit) + " bytes");
  return (kSpace == Space::kShared ? warp.shared : const_cast<char*>(warp.params)) + at;
}

template <typename T>
uint64_t widened(T v) {
  if constexpr (std::is_signed_v<T>) return uint64_t(int64_t(v));
  return bits_of(v);
}

template <Space kSpace, typename T, int kVector>
void load(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint64_t* base = warp.read(i.operands[kVector]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    T values[kVector];
    std::memcpy(
        values, address<kSpace, false>(warp, i, base[l], i.offset, sizeof(values)), sizeof(values));
    for (int v = 0; v < kVector; ++v) warp.write(i.operands[v])[l] = widened(values[v]);
  }
}

template <Space kSpace, typename T, int kVector>
void store(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint64_t* base = warp.read(i.operands[0]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    T values[kVector];
    for (int v = 0; v < kVector; ++v) values[v] = get<T>(warp.read(i.operands[1 + v])[l]);
    std::memcpy(
        address<kSpace, true>(warp, i, base[l], i.offset, sizeof(values)), values, sizeof(values));
  }
}

template <Space kSpace, typename T>
void add_accesses(Table& t, const std::string& space, const std::string& type) {
  const std::string ld = "ld." + space, st = "st." + space;
  t[ld + "." + type] = {&load<kSpace, T, 1>, 2};
  t[ld + ".v2." + type] = {&load<kSpace, T, 2>, 3};
  t[ld + ".v4." + type] = {&load<kSpace, T, 4>, 5};
  t[st + "." + type] = {&store<kSpace, T, 1>, 2};
  t[st + ".v2." + type] = {&store<kSpace, T, 2>, 3};
  t[st + ".v4." + type] = {&store<kSpace, T, 4>, 5};
}

template <Space kSpace>
void add_types(Table& t, const std::string& space) {
  add_accesses<kSpace, uint8_t>(t, space, "u8");
  add_accesses<kSpace, int8_t>(t, space, "s8");
  for (const char* type : {"u16", "b16"}) add_accesses<kSpace, uint16_t>(t, space, type);
  for (const char* type : {"u32", "b32", "f32"}) add_accesses<kSpace, uint32_t>(t, space, type);
  for (const char* type : {"u64", "b64", "f64"}) add_accesses<kSpace, uint64_t>(t, space, type);
}

// ---- a warp together ---------------------------------------------------------------------------

void need_all(const Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != ~0u) fail(warp, i, "a warp diverged before a collective");
}

template <bool kButterfly>
void shuffle(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint64_t result[kLanes], there[kLanes];
  const uint64_t *from = warp.read(i.operands[2]), *which = warp.read(i.operands[3]);
  const uint64_t *clamp = warp.read(i.operands[4]), *members = warp.read(i.operands[5]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    if (uint32_t(members[l]) != lanes) fail(warp, i, "a warp diverged before a shuffle");
    const int segment = int(clamp[l] >> 8 & 31), limit = int(clamp[l] & 31);
    const int last = (l & segment) | (limit & ~segment), first = l & segment;
    const int b = int(which[l] & 31);
    const int source = kButterfly ? l ^ b : first | (b & ~segment);
    there[l] = source <= last;
    const int taken = there[l] ? source : l;
    if (!(lanes >> taken & 1)) fail(warp, i, "a shuffle reads a lane that is not there");
    result[l] = from[taken];
  }
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    warp.write(i.operands[0])[l] = result[l];
    warp.write(i.operands[1])[l] = there[l];
  }
}

float half(uint32_t pair, int slot) {
  return half_value(uint16_t(pair >> 16 * slot));
}
float bfloat16(uint32_t pair, int slot) {
  return bfloat16_value(uint16_t(pair >> 16 * slot));
}

// The PTX ISA's fragments of m16n8k16: groupID = lane >> 2, threadID_in_group = lane % 4.
//   A, element e of 8: row groupID for e in {0, 1, 4, 5}, else + 8; column 2 t + (e & 1), + 8 from e = 4
//   B, element e of 4: row 2 t + (e & 1), + 8 from e = 2; column groupID
//   C, D, element e of 4: row groupID, + 8 from e = 2; column 2 t + (e & 1)
// Hardware cuts sums off where this one rounds once.
template <float (*kValue)(uint32_t, int)>
void mma(Warp& warp, const Instruction& i, uint32_t lanes) {
  need_all(warp, i, lanes);
  float a[16][16], b[16][8];
  for (int l = 0; l < kLanes; ++l) {
    const int group = l >> 2, t = l % 4;
    for (int e = 0; e < 8; ++e) {
      const bool upper = e < 2 || (e >= 4 && e < 6);
      const int row = upper ? group : group + 8, column = 2 * t + (e & 1) + (e >= 4 ? 8 : 0);
      a[row][column] = kValue(uint32_t(warp.read(i.operands[4 + e / 2])[l]), e & 1);
    }
    for (int e = 0; e < 4; ++e) {
      const int row = 2 * t + (e & 1) + (e >= 2 ? 8 : 0);
      b[row][group] = kValue(uint32_t(warp.read(i.operands[8 + e / 2])[l]), e & 1);
    }
  }
  float d[kLanes][4];
  for (int l = 0; l < kLanes; ++l)
    for (int e = 0; e < 4; ++e) {
      const int row = (l >> 2) + (e >= 2 ? 8 : 0), column = 2 * (l % 4) + (e & 1);
      double sum = get<float>(warp.read(i.operands[10 + e])[l]);
      for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
      d[l][e] = canonical(approximation == 0 ? float(sum) : toward_zero(sum));
    }
  for (int l = 0; l < kLanes; ++l)
    for (int e = 0; e < 4; ++e) warp.write(i.operands[e])[l] = bits_of(d[l][e]);
}

// Lanes 8 m to 8 m + 7 give the addresses of matrix m's rows; lane l gets row l / 4, columns
// 2 (l % 4) and the next, or of the transposed matrix.
template <bool kTransposed>
void load_matrices(Warp& warp, const Instruction& i, uint32_t lanes) {
  need_all(warp, i, lanes);
  uint16_t matrix[4][8][8];
  const uint64_t* base = warp.read(i.operands[4]);
  for (int l = 0; l < kLanes; ++l)
    std::memcpy(
        matrix[l / 8][l % 8], address<Space::kShared, false>(warp, i, base[l], i.offset, 16), 16);
  for (int m = 0; m < 4; ++m)
    for (int l = 0; l < kLanes; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      const uint32_t low = kTransposed ? matrix[m][c][r] : matrix[m][r][c];
      const uint32_t high = kTransposed ? matrix[m][c + 1][r] : matrix[m][r][c + 1];
      warp.write(i.operands[m])[l] = high << 16 | low;
    }
}

void transpose_matrix(Warp& warp, const Instruction& i, uint32_t lanes) {
  need_all(warp, i, lanes);
  uint16_t matrix[8][8];
  const uint64_t* from = warp.read(i.operands[1]);
  for (int l = 0; l < kLanes; ++l)
    for (int h = 0; h < 2; ++h) matrix[l / 4][l % 4 * 2 + h] = uint16_t(from[l] >> 16 * h);
  for (int l = 0; l < kLanes; ++l)
    warp.write(i.operands[0])[l] =
        uint32_t(matrix[l % 4 * 2 + 1][l / 4]) << 16 | matrix[l % 4 * 2][l / 4];
}

// ---- asynchronous copies -----------------------------------------------------------------------

// Bytes beyond the source's are zeros. What was there before is gone at once.
void begin_copy(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint64_t *to = warp.read(i.operands[0]), *from = warp.read(i.operands[1]);
  const uint64_t *bytes = warp.read(i.operands[2]), *taken = warp.read(i.operands[3]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    if (bytes[l] != 16 || (uint32_t(taken[l]) != 16 && uint32_t(taken[l]) != 0))
      fail(warp, i, "a copy of other than 16 or 0 of 16 bytes");
    char* there = address<Space::kShared, true>(warp, i, to[l], 0, 16);
    const char* source = uint32_t(taken[l])
                             ? address<Space::kGlobal, false>(warp, i, from[l], i.offset, 16)
                             : nullptr;
    std::memset(there, 0xff, 16);
    warp.begun[l].push_back({uint32_t(there - warp.shared), source});
  }
}

void finish_copies(Warp& warp, const Instruction&, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    for (const Copy& copy : warp.begun[l])
      copy.from ? std::memcpy(warp.shared + copy.to, copy.from, 16)
                : std::memset(warp.shared + copy.to, 0, 16);
    warp.begun[l].clear();
  }
}

}  // namespace

thread_local std::vector<Tensor> tensors;

void add_tensor(Tensor added) {
  const auto overlaps = [&](const Tensor& t) { return t.begin < added.end && added.begin < t.end; };
  for (const Tensor& t : tensors)
    added.writable |= t.writable && t.begin == added.begin && t.end == added.end;
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), overlaps), tensors.end());
  tensors.push_back(added);
}

void add_memory(Table& t) {
  for (const char* space : {"global", "global.cs", "global.nc"})
    add_types<Space::kGlobal>(t, space);
  add_types<Space::kShared>(t, "shared");
  add_types<Space::kParam>(t, "param");
  t["cp.async.cg.shared.global"] = {begin_copy, 4};
  t["cp.async.wait_all"] = {finish_copies, 0};
}

void add_warp(Table& t) {
  t["shfl.sync.bfly.b32"] = {shuffle<true>, 6};
  t["shfl.sync.idx.b32"] = {shuffle<false>, 6};
  const std::string product = "mma.sync.aligned.m16n8k16.row.col.f32.";
  t[product + "f16.f16.f32"] = {mma<half>, 14};
  t[product + "bf16.bf16.f32"] = {mma<bfloat16>, 14};
  t["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] = {load_matrices<false>, 5};
  t["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] = {load_matrices<true>, 5};
  t["movmatrix.sync.aligned.m8n8.trans.b16"] = {transpose_matrix, 2};
}

}  // namespace hostrun::ptx
