// How the norms' kernels lay threads over rows: (threads of a row, rows side by side).
#pragma once

#include "vectors.cuh"

namespace ml {

constexpr int kMostThreads = 512;

__device__ inline int64_t first_row() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

// First column of vector `p` of this thread; neighbours in a warp read neighbouring vectors.
template <int W>
__device__ inline int64_t column(int p) {
  return (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * W;
}

// One warp a row and four rows a block while a warp's registers hold a row, else one row.
inline dim3 row_block(int64_t h, int values_per_thread) {
  int64_t threads = ceil_div(h, static_cast<int64_t>(values_per_thread) * 32) * 32;
  if (threads > kMostThreads) threads = kMostThreads;
  return dim3(static_cast<unsigned>(threads), threads == 32 ? 4 : 1);
}

}  // namespace ml
