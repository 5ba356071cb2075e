// Rows of random numbers, vectorised over their index.
#pragma once
#include "../philox.h"

namespace bnuq {

// out[c] = vector_normal(sub, c, replica) for c < C.
void vector_normals(float* out, Key sub, uint64_t replica, int64_t C);

// out[t] = snapshot_at(seed[0], seed[1] + t, B) for t < T.
void snapshots(int64_t* out, const int64_t* seed, int64_t B, int64_t T);

}  // namespace bnuq
