// Second stage of a sum over rows: adds what a first stage left per part of the rows.
//
//   workspace  [kinds, parts, h]  fp32
//   first, second  [h] fp32, of kind 0 and 1 (second null: one kind); set or added to
//
// Slices of every eighth part are added in order, then the slices in order: no atomics, bitwise
// repeatable for a given number of parts. Traffic = 4 * kinds * (parts + 1) * h bytes.
#pragma once

#include "vectors.cuh"

namespace ml {
namespace {

// Block (32 columns, 8 slices of the parts); blockIdx.y is the kind.
__global__ void sum_parts(const float* workspace, int64_t parts, int64_t h, float* first,
                          float* second, bool accumulate) {
  ML_SHARED(float, slices, 8, 32);
  float* out = blockIdx.y == 0 ? first : second;
  const float* source = workspace + blockIdx.y * parts * h;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (i < h)
    for (int64_t part = threadIdx.y; part < parts; part += 8)
      sum += load_global(source + part * h + i);
  store_shared(&slices[threadIdx.y][threadIdx.x], sum);
  __syncthreads();
  if (threadIdx.y != 0 || i >= h) return;
  for (int slice = 1; slice < 8; ++slice) sum += load_shared(&slices[slice][threadIdx.x]);
  store_global(out + i, accumulate ? load_global(out + i) + sum : sum);
}

inline int launch_sum_parts(const float* workspace, int64_t parts, int64_t h, float* first,
                            float* second, bool accumulate, void* stream) {
  const dim3 columns(static_cast<unsigned>(ceil_div(h, 32)), second != nullptr ? 2 : 1);
  return ML_LAUNCH(sum_parts, columns, dim3(32, 8), 0, stream, workspace, parts, h, first,
                   second, accumulate);
}

}  // namespace
}  // namespace ml
