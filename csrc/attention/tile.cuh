// Tiles in shared memory and products of them on tensor cores.
//
// A tile is row-major with rows padded by 8 elements: as dims are multiples of 32, eight rows
// then start in eight different groups of four banks, and no ldmatrix meets a conflict.
// One warp owns 16 * kTiles rows of a product. A lane holds, of each 16x8 accumulator, columns
// lane % 4 * 2 + {0, 1} of row lane / 4 in [0], [1] and of row lane / 4 + 8 in [2], [3].
#pragma once

#include "device.h"

namespace attention {

constexpr int kPad = 8;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ void multiply(const __nv_bfloat16*, float (&acc)[4],
                                         const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bf16_16816(acc, a, b0, b1);
}
__device__ __forceinline__ void multiply(const __half*, float (&acc)[4], const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1) {
  mma_fp16_16816(acc, a, b0, b1);
}
// Two values, the first in the low half.
__device__ __forceinline__ uint32_t pack(const __nv_bfloat16*, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack(const __half*, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// Starts the copy of [kRows, kDim] from rows `stride` apart; rows from `rows` on and columns
// from `columns` on become 0.
template <int kRows, int kDim, class T>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int64_t stride, int rows,
                                          int columns) {
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int column = i % kChunks * 8;
    const bool valid = row < rows && column < columns;
    cp_async16(tile + row * (kDim + kPad) + column,
               valid ? from + row * stride + column : from, valid ? 16 : 0);
  }
}

// acc [16 * kTiles, kColumns] += a [16 * kTiles, kDim] * b [kColumns, kDim]^T, both in shared
// memory; `a` begins at the warp's first row.
template <int kTiles, int kColumns, int kDim, class T>
__device__ __forceinline__ void multiply_transposed(float (&acc)[kTiles][kColumns / 8][4],
                                                    const T* a, const T* b) {
  constexpr int kStride = kDim + kPad;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* a_row = a + lane % 16 * kStride + lane / 16 * 8;
  const T* b_row = b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t ra[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ldmatrix_x4(ra[m], a_row + m * 16 * kStride + k);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t rb[4];
      ldmatrix_x4(rb, b_row + n * 16 * kStride + k);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply(a, acc[m][2 * n], ra[m], rb[0], rb[1]);
        multiply(a, acc[m][2 * n + 1], ra[m], rb[2], rb[3]);
      }
    }
  }
}

// acc [16 * kTiles, kDim] += a [16 * kTiles, kDepth] * b [kDepth, kDim]: a are the values of
// another product's accumulators, rounded to T; b is in shared memory.
template <int kTiles, int kDepth, int kDim, class T>
__device__ __forceinline__ void multiply_registers(float (&acc)[kTiles][kDim / 8][4],
                                                   const float (&a)[kTiles][kDepth / 8][4],
                                                   const T* b) {
  constexpr int kStride = kDim + kPad;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* b_row = b + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    uint32_t ra[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&from)[4] = a[m][2 * k + r / 2];
        ra[m][r] = pack(b, from[r % 2 * 2], from[r % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t rb[4];
      ldmatrix_x4<true>(rb, b_row + k * 16 * kStride + n * 16);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply(b, acc[m][2 * n], ra[m], rb[0], rb[1]);
        multiply(b, acc[m][2 * n + 1], ra[m], rb[2], rb[3]);
      }
    }
  }
}

// Writes the warp's accumulators, each row times a factor, by 16-byte stores. `tile` is memory
// of this warp alone, [16 * kTiles, kDim].
template <int kTiles, int kDim, class T>
__device__ __forceinline__ void store_rows(T* tile, const float (&acc)[kTiles][kDim / 8][4],
                                           const float (&factor)[kTiles][2], T* to, int64_t stride,
                                           int rows, int columns) {
  constexpr int kStride = kDim + kPad;
  constexpr int kChunks = kDim / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncwarp();  // the other lanes have read what was here
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* at = tile + (m * 16 + half * 8 + lane / 4) * kStride + n * 8 + lane % 4 * 2;
        store_shared(reinterpret_cast<uint32_t*>(at),
                     pack(to, acc[m][n][2 * half] * factor[m][half],
                          acc[m][n][2 * half + 1] * factor[m][half]));
      }
  __syncwarp();
  for (int i = lane; i < 16 * kTiles * kChunks; i += 32) {
    const int row = i / kChunks;
    const int column = i % kChunks * 8;
    if (row < rows && column < columns)
      store_global(reinterpret_cast<uint4*>(to + row * stride + column),
                   load_shared(reinterpret_cast<const uint4*>(tile + row * kStride + column)));
  }
}

template <int kTiles, int kSteps>
__device__ __forceinline__ void clear(float (&acc)[kTiles][kSteps][4]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

}  // namespace attention
