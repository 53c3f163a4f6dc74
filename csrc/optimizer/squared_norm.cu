// Sum of squares and number of non-finite elements of a flat range, in two stages.
//
//   x          [n]       T (fp32, bf16 or fp16)
//   workspace  [2, 1056] fp64: sum and count of each block
//   out        [2]       fp64, set or added to (`accumulate`: ranges one after the other)
//
// Squares are formed and summed in fp64: no square of a finite fp32 overflows, and the result
// is good to fp64 whatever n is. Non-finite elements are in the sum too, as inf or NaN.
// Threads stride over vectors; the number of blocks depends on n only, sums are in a fixed
// order and without atomics: bitwise repeatable on any device.
// Memory-bound: traffic = n * sizeof(T). Limits: a pointer that is not aligned to 16 bytes is
// read by single elements.
#include "vectors.cuh"

namespace ml {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 1056;  // eight for each of 132 multiprocessors

struct Totals {
  double squares, bad;
};

__device__ inline void take(Totals& totals, float value) {
  totals.squares += static_cast<double>(value) * static_cast<double>(value);
  if ((__float_as_uint(value) & 0x7f800000u) == 0x7f800000u) totals.bad += 1.0;
}

// Over a block of kThreads; the result is thread 0's.
__device__ inline Totals sum_over_block(Totals totals) {
  ML_SHARED(double, partial, 2, kThreads / 32);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    totals.squares += __shfl_xor_sync(0xffffffffu, totals.squares, offset);
    totals.bad += __shfl_xor_sync(0xffffffffu, totals.bad, offset);
  }
  if (threadIdx.x % 32 == 0) {
    partial[0][threadIdx.x / 32] = totals.squares;
    partial[1][threadIdx.x / 32] = totals.bad;
  }
  __syncthreads();
  totals = {0.0, 0.0};
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    totals.squares += partial[0][warp];
    totals.bad += partial[1][warp];
  }
  return totals;
}

template <class T, bool Vector>
__global__ void __launch_bounds__(kThreads) square_blocks(const T* x, int64_t n,
                                                          double* workspace) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t whole = Vector ? n / width<T> * width<T> : 0;
  Totals totals{0.0, 0.0};
  for (int64_t i = thread * width<T>; i < whole; i += threads * width<T>) {
    float values[width<T>];
    load_vector(x + i, values);
#pragma unroll
    for (int j = 0; j < width<T>; ++j) take(totals, values[j]);
  }
  for (int64_t i = whole + thread; i < n; i += threads) take(totals, to_float(load_global(x + i)));
  totals = sum_over_block(totals);
  if (threadIdx.x != 0) return;
  store_global(workspace + blockIdx.x, totals.squares);
  store_global(workspace + kMostBlocks + blockIdx.x, totals.bad);
}

__global__ void __launch_bounds__(kThreads) add_blocks(const double* workspace, int blocks,
                                                       double* out, bool accumulate) {
  Totals totals{0.0, 0.0};
  for (int i = static_cast<int>(threadIdx.x); i < blocks; i += kThreads) {
    totals.squares += load_global(workspace + i);
    totals.bad += load_global(workspace + kMostBlocks + i);
  }
  totals = sum_over_block(totals);
  if (threadIdx.x != 0) return;
  store_global(out, accumulate ? load_global(out) + totals.squares : totals.squares);
  store_global(out + 1, accumulate ? load_global(out + 1) + totals.bad : totals.bad);
}

}  // namespace
}  // namespace ml

ML_EXPORT int64_t squared_norm_workspace() { return 2 * ml::kMostBlocks; }

ML_EXPORT int launch_squared_norm(int64_t dtype, const void* x, int64_t n, double* workspace,
                                  double* out, int64_t accumulate, void* stream) {
  if (n < 0) return ml::kInvalidValue;
  unsigned blocks = 0;
  const int error = ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* values = static_cast<const T*>(x);
    blocks = ml::grid_size(ml::ceil_div(n, 4 * ml::width<T> * ml::kThreads), ml::kMostBlocks);
    return ml::vectorizable(values, 0)
               ? ML_LAUNCH((ml::square_blocks<T, true>), blocks, ml::kThreads, 0, stream, values,
                           n, workspace)
               : ML_LAUNCH((ml::square_blocks<T, false>), blocks, ml::kThreads, 0, stream, values,
                           n, workspace);
  });
  if (error != 0) return error;
  return ML_LAUNCH(ml::add_blocks, 1, ml::kThreads, 0, stream, workspace,
                   static_cast<int>(blocks), out, accumulate != 0);
}
