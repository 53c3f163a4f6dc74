// RMSNorm and LayerNorm over rows, with an optional residual added first.
//
//   x, residual  [rows, h]  T, rows at any stride (elements); residual may be null
//   sum          [rows, h]  T, x + residual rounded to T; what is normalised and saved
//   weight, bias [h]        T; bias null for RMSNorm; one_plus: the stored weight is w - 1
//   out          [rows, h]  T
//   mean, inverse [rows]    fp32; mean of LayerNorm only
//
// T is fp32, bf16 or fp16; statistics and arithmetic are fp32, the variance is of two passes
// (mean first), so a large common offset does not cancel it.
// One warp (h <= 1024, fp32 768) or one block of up to 512 threads makes a row; each thread
// keeps up to 32 (fp32 24) of its values in registers. Memory-bound: traffic = 2 * rows * h * sizeof(T) (4 * with a
// residual) + 4 * rows per statistic; the weight comes from the caches after the first row.
// No atomics and fixed orders of summation: bitwise repeatable.
// Limits: h > 16384 (fp32 12288), h or a stride not a multiple of 16 bytes, or a pointer not
// aligned to 16 bytes take a path of single elements that reads x up to 3 times. rows * stride < 2^63.
#include "norm/rows.cuh"

namespace ml {
namespace {

template <class T>
constexpr int kValues = sizeof(T) == 4 ? 24 : 32;  // per thread in registers

template <class T>
struct ForwardArguments {
  const T *x, *residual, *weight, *bias;
  T *sum, *out;
  float *mean, *inverse;
  int64_t x_stride, residual_stride, sum_stride, out_stride, rows, h;
  float eps, weight_offset;
};

template <class T, bool Layer>
__device__ inline void write_statistics(const ForwardArguments<T>& a, int64_t row, float mean,
                                        float inverse) {
  if (threadIdx.x != 0) return;
  if (Layer) store_global(a.mean + row, mean);
  store_global(a.inverse + row, inverse);
}

template <class T, bool Layer>
__global__ void __launch_bounds__(kMostThreads, 1) norm_forward(ForwardArguments<T> a) {
  constexpr int W = width<T>, P = kValues<T> / W;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    float v[P][W];
    float sum[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.h) continue;
      load_vector(a.x + row * a.x_stride + i, v[p]);
      if (a.residual != nullptr) {
        float r[W];
        load_vector(a.residual + row * a.residual_stride + i, r);
        for (int j = 0; j < W; ++j) v[p][j] = to_float(from_float<T>(v[p][j] + r[j]));
        store_vector(a.sum + row * a.sum_stride + i, v[p]);
      }
      for (int j = 0; j < W; ++j) sum[0] += Layer ? v[p][j] : v[p][j] * v[p][j];
    }
    sum_over_row(sum);
    float mean = 0.0f;
    if (Layer) {
      mean = sum[0] / static_cast<float>(a.h);
      sum[0] = 0.0f;
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (column<W>(p) < a.h)
          for (int j = 0; j < W; ++j) sum[0] += (v[p][j] - mean) * (v[p][j] - mean);
      sum_over_row(sum);
    }
    const float inverse = rsqrtf(sum[0] / static_cast<float>(a.h) + a.eps);
    write_statistics<T, Layer>(a, row, mean, inverse);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.h) continue;
      float w[W], b[W];
      load_shared_by_rows(a.weight + i, w);
      if (Layer) load_shared_by_rows(a.bias + i, b);
      for (int j = 0; j < W; ++j) {
        v[p][j] = (v[p][j] - mean) * inverse * (w[j] + a.weight_offset);
        if (Layer) v[p][j] += b[j];
      }
      store_vector(a.out + row * a.out_stride + i, v[p]);
    }
  }
}

// Any alignment, any h: one element at a time, read again for each pass.
template <class T, bool Layer>
__global__ void __launch_bounds__(kMostThreads) norm_forward_scalar(ForwardArguments<T> a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    const T* x = a.x + row * a.x_stride;
    float sum[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
      float value = to_float(load_global(x + i));
      if (a.residual != nullptr) {
        const float r = to_float(load_global(a.residual + row * a.residual_stride + i));
        const T rounded = from_float<T>(value + r);
        store_global(a.sum + row * a.sum_stride + i, rounded);
        value = to_float(rounded);
      }
      sum[0] += Layer ? value : value * value;
    }
    // The passes below read what this very thread has written.
    if (a.residual != nullptr) x = a.sum + row * a.sum_stride;
    sum_over_row(sum);
    float mean = 0.0f;
    if (Layer) {
      mean = sum[0] / static_cast<float>(a.h);
      sum[0] = 0.0f;
      for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
        const float centred = to_float(load_global(x + i)) - mean;
        sum[0] += centred * centred;
      }
      sum_over_row(sum);
    }
    const float inverse = rsqrtf(sum[0] / static_cast<float>(a.h) + a.eps);
    write_statistics<T, Layer>(a, row, mean, inverse);
    for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
      const float w = to_float(load_readonly(a.weight + i)) + a.weight_offset;
      float value = (to_float(load_global(x + i)) - mean) * inverse * w;
      if (Layer) value += to_float(load_readonly(a.bias + i));
      store_global(a.out + row * a.out_stride + i, from_float<T>(value));
    }
  }
}

template <class T>
bool can_vectorize(const ForwardArguments<T>& a) {
  const bool extra = a.residual == nullptr || (vectorizable(a.residual, a.residual_stride) &&
                                               vectorizable(a.sum, a.sum_stride));
  return extra && a.h <= static_cast<int64_t>(kValues<T>) * kMostThreads &&
         vectorizable(a.x, a.x_stride) && vectorizable(a.out, a.out_stride) &&
         vectorizable(a.weight, a.h) && (a.bias == nullptr || vectorizable(a.bias, a.h));
}

template <class T>
int run_forward(const ForwardArguments<T>& a, void* stream) {
  if (a.h <= 0 || (a.residual != nullptr && a.sum == nullptr)) return kInvalidValue;
  const dim3 block = row_block(a.h, kValues<T>);
  const unsigned grid = grid_size(ceil_div(a.rows, block.y));
  const bool layer = a.bias != nullptr;
  if (can_vectorize(a))
    return layer ? ML_LAUNCH((norm_forward<T, true>), grid, block, 0, stream, a)
                 : ML_LAUNCH((norm_forward<T, false>), grid, block, 0, stream, a);
  return layer ? ML_LAUNCH((norm_forward_scalar<T, true>), grid, block, 0, stream, a)
               : ML_LAUNCH((norm_forward_scalar<T, false>), grid, block, 0, stream, a);
}

}  // namespace
}  // namespace ml

// LayerNorm if `bias` is given, else RMSNorm.
ML_EXPORT int launch_norm_forward(int64_t dtype, const void* x, int64_t x_stride,
                                  const void* residual, int64_t residual_stride, void* sum,
                                  int64_t sum_stride, const void* weight, const void* bias,
                                  void* out, int64_t out_stride, float* mean, float* inverse,
                                  int64_t rows, int64_t h, float eps, int64_t one_plus,
                                  void* stream) {
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const ml::ForwardArguments<T> a{
        static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
        static_cast<const T*>(bias), static_cast<T*>(sum), static_cast<T*>(out), mean, inverse,
        x_stride, residual_stride, sum_stride, out_stride, rows, h, eps,
        one_plus != 0 ? 1.0f : 0.0f};
    return ml::run_forward(a, stream);
  });
}
