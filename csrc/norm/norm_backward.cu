// Gradients of RMSNorm and LayerNorm; the weight's and the bias's in two stages.
//
//   grad         [rows, h]  T, gradient of the output
//   x            [rows, h]  T, what was normalised (x + residual where one was added)
//   grad_sum     [rows, h]  T or null: gradient that reaches x + residual beside the norm
//   grad_x       [rows, h]  T, also the gradient of the residual
//   weight       [h]        T; mean, inverse [rows] fp32 of the forward pass (no mean: RMSNorm)
//   workspace    [kinds, parts, h] fp32: sums of a part's rows; kinds = 1 (RMS) or 2 (Layer)
//   grad_weight, grad_bias [h] fp32, set or added to (`accumulate`)
//
// Stage 1: `parts` rows of threads (one warp or one block each, as in the forward pass) take
// every parts-th row and keep their sums of grad * normalised (and grad) in registers.
// Stage 2: a block adds the parts of 32 columns in a fixed order.
// Memory-bound: traffic = 3 * rows * h * sizeof(T) (4 * with grad_sum) + 4 * rows * kinds
// + 8 * kinds * parts * h; parts <= 264 (1056 of single warps), whatever the device.
// No atomics; the number of parts depends on the sizes only: bitwise repeatable.
// Limits: h > 16384 (LayerNorm 12288, fp32 8192) or what 16-byte vectors cannot read take a path of single
// elements that sums in the workspace. rows * stride < 2^63.
#include "column_sums.cuh"
#include "norm/rows.cuh"

namespace ml {
namespace {

template <class T, bool Layer>
constexpr int kValues = sizeof(T) == 4 ? 16 : Layer ? 24 : 32;  // per thread in registers
constexpr int kMostBlocks = 264;                   // two for each of 132 multiprocessors

template <class T>
struct BackwardArguments {
  const T *grad, *x, *grad_sum, *weight;
  const float *mean, *inverse;
  T* grad_x;
  float* workspace;
  int64_t grad_stride, x_stride, grad_sum_stride, grad_x_stride, rows, h;
  float weight_offset;
};

struct RowStatistics {
  float mean, inverse;
};

template <class T, bool Layer>
__device__ inline RowStatistics statistics(const BackwardArguments<T>& a, int64_t row) {
  return {Layer ? load_global(a.mean + row) : 0.0f, load_global(a.inverse + row)};
}

template <class T, bool Layer>
__global__ void __launch_bounds__(kMostThreads) norm_backward(BackwardArguments<T> a) {
  constexpr int W = width<T>, P = kValues<T, Layer> / W;
  const int64_t parts = static_cast<int64_t>(gridDim.x) * blockDim.y;
  float weight_sum[P][W] = {}, bias_sum[Layer ? P : 1][W] = {};
  for (int64_t row = first_row(); row < a.rows; row += parts) {
    const RowStatistics s = statistics<T, Layer>(a, row);
    uint4 x_bits[P], grad_bits[P];
    float sums[2] = {0.0f, 0.0f};  // of w g * normalised, of w g
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.h) continue;
      x_bits[p] = load_bits(a.x + row * a.x_stride + i);
      grad_bits[p] = load_bits(a.grad + row * a.grad_stride + i);
      float x[W], g[W], w[W];
      unpack<T>(x_bits[p], x);
      unpack<T>(grad_bits[p], g);
      load_shared_by_rows(a.weight + i, w);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const float normalised = (x[j] - s.mean) * s.inverse;
        const float weighted = g[j] * (w[j] + a.weight_offset);
        sums[0] += weighted * normalised;
        sums[1] += weighted;
        weight_sum[p][j] += g[j] * normalised;
        if constexpr (Layer) bias_sum[p][j] += g[j];
      }
    }
    sum_over_row(sums);
    const float along = sums[0] / static_cast<float>(a.h);
    const float common = Layer ? sums[1] / static_cast<float>(a.h) : 0.0f;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.h) continue;
      float x[W], g[W], w[W], beside[W] = {};
      unpack<T>(x_bits[p], x);
      unpack<T>(grad_bits[p], g);
      load_shared_by_rows(a.weight + i, w);
      if (a.grad_sum != nullptr) load_vector(a.grad_sum + row * a.grad_sum_stride + i, beside);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const float normalised = (x[j] - s.mean) * s.inverse;
        const float weighted = g[j] * (w[j] + a.weight_offset);
        g[j] = (weighted - common - normalised * along) * s.inverse + beside[j];
      }
      store_vector(a.grad_x + row * a.grad_x_stride + i, g);
    }
  }
  float* part = a.workspace + first_row() * a.h;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int64_t i = column<W>(p);
    if (i >= a.h) continue;
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      const float(&ws)[W] = weight_sum[p];
      store_global(reinterpret_cast<float4*>(part + i + j),
                   make_float4(ws[j], ws[j + 1], ws[j + 2], ws[j + 3]));
      if constexpr (Layer) {
        const float(&bs)[W] = bias_sum[p];
        store_global(reinterpret_cast<float4*>(part + parts * a.h + i + j),
                     make_float4(bs[j], bs[j + 1], bs[j + 2], bs[j + 3]));
      }
    }
  }
}

// Any alignment, any h. Each thread owns its columns of the workspace.
template <class T, bool Layer>
__global__ void __launch_bounds__(kMostThreads) norm_backward_scalar(BackwardArguments<T> a) {
  const int64_t parts = static_cast<int64_t>(gridDim.x) * blockDim.y;
  float* weight_part = a.workspace + first_row() * a.h;
  float* bias_part = weight_part + parts * a.h;
  for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
    store_global(weight_part + i, 0.0f);
    if (Layer) store_global(bias_part + i, 0.0f);
  }
  for (int64_t row = first_row(); row < a.rows; row += parts) {
    const RowStatistics s = statistics<T, Layer>(a, row);
    float sums[2] = {0.0f, 0.0f};
    for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
      const float x = to_float(load_global(a.x + row * a.x_stride + i));
      const float g = to_float(load_global(a.grad + row * a.grad_stride + i));
      const float w = to_float(load_readonly(a.weight + i)) + a.weight_offset;
      const float normalised = (x - s.mean) * s.inverse;
      sums[0] += g * w * normalised;
      sums[1] += g * w;
      store_global(weight_part + i, load_global(weight_part + i) + g * normalised);
      if (Layer) store_global(bias_part + i, load_global(bias_part + i) + g);
    }
    sum_over_row(sums);
    const float along = sums[0] / static_cast<float>(a.h);
    const float common = Layer ? sums[1] / static_cast<float>(a.h) : 0.0f;
    for (int64_t i = threadIdx.x; i < a.h; i += blockDim.x) {
      const float x = to_float(load_global(a.x + row * a.x_stride + i));
      const float g = to_float(load_global(a.grad + row * a.grad_stride + i));
      const float w = to_float(load_readonly(a.weight + i)) + a.weight_offset;
      const float normalised = (x - s.mean) * s.inverse;
      float out = (g * w - common - normalised * along) * s.inverse;
      if (a.grad_sum != nullptr)
        out += to_float(load_global(a.grad_sum + row * a.grad_sum_stride + i));
      store_global(a.grad_x + row * a.grad_x_stride + i, from_float<T>(out));
    }
  }
}

template <class T, bool Layer>
dim3 block_of(int64_t h) {
  return row_block(h, kValues<T, Layer>);
}

template <class T, bool Layer>
int64_t parts_of(int64_t rows, int64_t h) {
  const dim3 block = block_of<T, Layer>(h);
  return static_cast<int64_t>(grid_size(ceil_div(rows, block.y), kMostBlocks)) * block.y;
}

template <class T, bool Layer>
bool can_vectorize(const BackwardArguments<T>& a) {
  return a.h <= static_cast<int64_t>(kValues<T, Layer>) * kMostThreads &&
         vectorizable(a.x, a.x_stride) && vectorizable(a.grad, a.grad_stride) &&
         vectorizable(a.grad_x, a.grad_x_stride) && vectorizable(a.weight, a.h) &&
         vectorizable(a.workspace, a.h) &&
         (a.grad_sum == nullptr || vectorizable(a.grad_sum, a.grad_sum_stride));
}

template <class T, bool Layer>
int run_backward(const BackwardArguments<T>& a, float* grad_weight, float* grad_bias,
                 bool accumulate, void* stream) {
  if (a.h <= 0) return kInvalidValue;
  const dim3 block = block_of<T, Layer>(a.h);
  const int64_t parts = parts_of<T, Layer>(a.rows, a.h);
  const unsigned grid = static_cast<unsigned>(parts / block.y);
  const int error =
      can_vectorize<T, Layer>(a)
          ? ML_LAUNCH((norm_backward<T, Layer>), grid, block, 0, stream, a)
          : ML_LAUNCH((norm_backward_scalar<T, Layer>), grid, block, 0, stream, a);
  if (error != 0) return error;
  return launch_sum_parts(a.workspace, parts, a.h, grad_weight, Layer ? grad_bias : nullptr,
                          accumulate, stream);
}

}  // namespace
}  // namespace ml

// fp32 elements of the workspace.
ML_EXPORT int64_t norm_backward_workspace(int64_t dtype, int64_t rows, int64_t h, int64_t layer) {
  const bool wide = dtype == static_cast<int64_t>(ml::DType::fp32);
  if (layer != 0)
    return 2 * h * (wide ? ml::parts_of<float, true>(rows, h) : ml::parts_of<__half, true>(rows, h));
  return h * (wide ? ml::parts_of<float, false>(rows, h) : ml::parts_of<__half, false>(rows, h));
}

// LayerNorm if `mean` is given, else RMSNorm (grad_bias is then not touched).
ML_EXPORT int launch_norm_backward(int64_t dtype, const void* grad, int64_t grad_stride,
                                   const void* x, int64_t x_stride, const void* grad_sum,
                                   int64_t grad_sum_stride, const void* weight, const float* mean,
                                   const float* inverse, void* grad_x, int64_t grad_x_stride,
                                   float* grad_weight, float* grad_bias, float* workspace,
                                   int64_t rows, int64_t h, int64_t one_plus, int64_t accumulate,
                                   void* stream) {
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const ml::BackwardArguments<T> a{
        static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(grad_sum),
        static_cast<const T*>(weight), mean, inverse, static_cast<T*>(grad_x), workspace,
        grad_stride, x_stride, grad_sum_stride, grad_x_stride, rows, h,
        one_plus != 0 ? 1.0f : 0.0f};
    const bool add = accumulate != 0;
    return mean != nullptr
               ? ml::run_backward<T, true>(a, grad_weight, grad_bias, add, stream)
               : ml::run_backward<T, false>(a, grad_weight, grad_bias, add, stream);
  });
}
