// Amax of a tensor, scales from amax, and the update of delayed scaling.
//
//   x          [rows, cols]     fp32, bf16 or fp16, rows `stride` elements apart
//   partial    [num_partials]   uint32, bits of |x|: workspace
//   amax       [1] or [n]       fp32; NaN if any element is NaN (one canonical NaN)
//   scale      [n]              fp32, what x is multiplied with; scale_inv [n] its inverse
//   history    [length, n]      fp32; row 0 is the amax of this step, row 1 the oldest
//
// amax: each thread takes 16-byte vectors of a grid-stride loop over rows x vectors, a block
// writes one partial, one block reduces these. Memory-bound: rows * cols * sizeof(x) bytes read.
// Scales: one thread per tensor, (3 resp. 2 * length + 4) * 4 bytes each.
// A maximum of integers: bitwise repeatable in any order. Limits: sizes < 2^63; vectors need
// 16-byte aligned rows, other inputs are read element by element.
#include "fp8/rounding.cuh"

namespace ml::fp8 {

constexpr int kThreads = 256;

__device__ inline uint32_t max_over_block(uint32_t value) {
  ML_SHARED(uint32_t, warps, kThreads / 32);
  value = max_over_lanes<1, 32>(value);
  if (threadIdx.x % 32 == 0) store_shared(&warps[threadIdx.x / 32], value);
  __syncthreads();
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) most = max(most, load_shared(&warps[i]));
  return most;
}

// kWidth elements per access: those of 16 bytes, or one.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    amax_partial(const T* x, int64_t rows, int64_t cols, int64_t stride, uint32_t* partial) {
  const int64_t per_row = (cols + kWidth - 1) / kWidth;
  const int64_t total = rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t most = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / per_row;
    const int64_t col = (i - row * per_row) * kWidth;
    const T* source = x + row * stride + col;
    if constexpr (kWidth == 1) {
      most = max(most, magnitude(to_float(load_global(source))));
    } else if (col + kWidth <= cols) {
      float values[width<T>];
      load_vector(source, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) most = max(most, magnitude(values[j]));
    } else {
      for (int j = 0; col + j < cols; ++j)
        most = max(most, magnitude(to_float(load_global(source + j))));
    }
  }
  most = max_over_block(most);
  if (threadIdx.x == 0) store_global(partial + blockIdx.x, most);
}

__global__ void __launch_bounds__(kThreads)
    amax_finish(const uint32_t* partial, int64_t num_partials, float* amax) {
  uint32_t most = 0;
  for (int64_t i = threadIdx.x; i < num_partials; i += kThreads)
    most = max(most, load_global(partial + i));
  most = max_over_block(most);
  if (most > kInfinity) most = 0x7fc00000u;
  if (threadIdx.x == 0) store_global(amax, __uint_as_float(most));
}

__global__ void scales_from_amax(const float* amax, float* scale, float* scale_inv, int64_t n,
                                 ScaleRule rule) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float value = scale_from_amax(magnitude(load_global(amax + i)), rule);
  store_global(scale + i, value);
  store_global(scale_inv + i, inverse_scale(value));
}

// The largest finite amax of the history (or the last one) gives the next scale, times
// 2^-margin; without a finite one above 0 the old scale stays. Then row 1 is forgotten: rows
// move up by one, row 0 becomes the newest of the past and 0 waits for the next step.
__global__ void delayed_update(float* history, float* scale, float* scale_inv, int64_t length,
                               int64_t n, bool most_recent, float margin_factor, ScaleRule rule) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float newest = load_global(history + i);
  uint32_t most = magnitude(newest) < kInfinity ? magnitude(newest) : 0;
  for (int64_t row = 1; row < length; ++row) {
    const float past = load_global(history + row * n + i);
    if (!most_recent && magnitude(past) < kInfinity) most = max(most, magnitude(past));
    if (row > 1) store_global(history + (row - 1) * n + i, past);
  }
  if (length > 1) store_global(history + (length - 1) * n + i, newest);
  store_global(history + i, 0.0f);
  float value = load_global(scale + i);
  if (most != 0) {
    value = __fmul_rn(scale_from_amax(most, rule), margin_factor);
    // A large margin must not leave the range in which the inverse is finite.
    value = fminf(fmaxf(value, __uint_as_float(0x00800000u)), __uint_as_float(kLargestFloat));
  }
  store_global(scale + i, value);
  store_global(scale_inv + i, inverse_scale(value));
}

inline ScaleRule rule_of(int64_t e5m2, float epsilon, int64_t power_of_two) {
  return {e5m2 != 0 ? 57344.0f : 448.0f, epsilon, power_of_two != 0};
}

}  // namespace ml::fp8

// partial [num_partials]: any number >= 1 of them, one per block; 0 elements give amax 0.
ML_EXPORT int launch_fp8_amax(const void* x, int64_t dtype, uint32_t* partial,
                              int64_t num_partials, float* amax, int64_t rows, int64_t cols,
                              int64_t stride, void* stream) {
  using namespace ml;
  if (num_partials < 1 || num_partials > 0x7fffffff || rows < 0 || cols < 0) return kInvalidValue;
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* values = static_cast<const T*>(x);
    const bool vectors = vectorizable(values, stride);
    const int64_t items = rows * (vectors ? ceil_div(cols, width<T>) : cols);
    const unsigned blocks = grid_size(ceil_div(items, fp8::kThreads), num_partials);
    const auto kernel = vectors ? fp8::amax_partial<T, width<T>> : fp8::amax_partial<T, 1>;
    const int error = ML_LAUNCH(kernel, blocks, fp8::kThreads, 0, stream, values, rows, cols,
                                stride, partial);
    if (error != 0) return error;
    return ML_LAUNCH(fp8::amax_finish, 1, fp8::kThreads, 0, stream, partial,
                     static_cast<int64_t>(blocks), amax);
  });
}

// amax of partials that a quantization left behind.
ML_EXPORT int launch_fp8_amax_finish(const uint32_t* partial, int64_t num_partials, float* amax,
                                     void* stream) {
  using namespace ml;
  return ML_LAUNCH(fp8::amax_finish, 1, fp8::kThreads, 0, stream, partial, num_partials, amax);
}

ML_EXPORT int launch_fp8_scales(const float* amax, float* scale, float* scale_inv, int64_t n,
                                int64_t e5m2, float epsilon, int64_t power_of_two, void* stream) {
  using namespace ml;
  return ML_LAUNCH(fp8::scales_from_amax, grid_size(ceil_div(n, 128)), 128, 0, stream, amax,
                   scale, scale_inv, n, fp8::rule_of(e5m2, epsilon, power_of_two));
}

ML_EXPORT int launch_fp8_delayed_update(float* history, float* scale, float* scale_inv,
                                        int64_t length, int64_t n, int64_t most_recent,
                                        float margin_factor, int64_t e5m2, float epsilon,
                                        int64_t power_of_two, void* stream) {
  using namespace ml;
  if (length < 1) return kInvalidValue;
  return ML_LAUNCH(fp8::delayed_update, grid_size(ceil_div(n, 128)), 128, 0, stream, history,
                   scale, scale_inv, length, n, most_recent != 0, margin_factor,
                   fp8::rule_of(e5m2, epsilon, power_of_two));
}
