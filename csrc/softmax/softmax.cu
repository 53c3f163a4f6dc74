// softmax(scale * x) over the last dim, with a causal or a given boolean mask, and its gradient.
//
//   x, out, grad  [b, n, queries, keys]  T, rows of keys at one stride; out, grad_x dense or not
//   visible       [b, n, queries, keys]  bytes, 0 hides; strides of b, n, queries may be 0; null:
//                                        everything is visible
//
// T is fp32, bf16 or fp16; arithmetic is fp32, each result is rounded once. causal: query q sees
// the keys up to q + keys - queries (bottom-right). A row without visible keys gives 0. Backward
// takes the stored output y: grad_x = scale * y * (grad - sum(grad * y)).
// One warp (keys <= 1024, fp32 768) or one block of up to 512 threads makes a row; each thread
// keeps up to 32 (fp32 24) values in registers. Memory-bound: traffic = 2 * rows * keys *
// sizeof(T), + rows * keys with a mask; what is hidden causally is not read; backward
// 3 * rows * keys * sizeof(T). No atomics and fixed orders of summation: bitwise repeatable.
// Limits: keys > 16384 (fp32 12288), or rows or masks that whole vectors cannot use, take a path
// of single elements that reads x three times. Offsets are 64-bit.
#include "norm/rows.cuh"

namespace ml {
namespace {

template <class T>
constexpr int kValues = sizeof(T) == 4 ? 24 : 32;  // per thread in registers

constexpr float kNothing = -INFINITY;

template <class T>
struct SoftmaxArguments {
  const T *x, *grad, *y;
  T* out;
  const uint8_t* visible;
  int64_t x_stride, grad_stride, out_stride;  // y's rows are x_stride apart in the backward
  int64_t mask_b, mask_n, mask_q, rows, n, queries, keys;
  float scale;
  bool causal;
};

// What a row may see: the first `count` keys, of them those whose byte is set.
struct Sight {
  const uint8_t* visible;
  int64_t count;
};

template <class T>
__device__ inline Sight sight_of(const SoftmaxArguments<T>& a, int64_t row) {
  const int64_t q = row % a.queries, head = row / a.queries;
  Sight sight{nullptr, a.keys};
  if (a.visible != nullptr)
    sight.visible = a.visible + (head / a.n) * a.mask_b + (head % a.n) * a.mask_n + q * a.mask_q;
  if (a.causal) {
    const int64_t count = q + a.keys - a.queries + 1;
    sight.count = count < 0 ? 0 : count;
  }
  return sight;
}

__device__ inline float row_max(float value) {
  return blockDim.x == 32 ? warp_max(value) : max_over_row(value);
}

// Bit j of the result: element j of the vector at i is visible.
template <int W>
__device__ inline unsigned vector_mask(const Sight& sight, int64_t i) {
  unsigned bits = 0;
  if (sight.visible == nullptr) {
    bits = (1u << W) - 1;
  } else {
#pragma unroll
    for (int word = 0; word < W; word += 4) {
      const uint32_t bytes =
          load_readonly(reinterpret_cast<const uint32_t*>(sight.visible + i + word));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if ((bytes >> (8 * j) & 0xffu) != 0) bits |= 1u << (word + j);
    }
  }
  const int64_t left = sight.count - i;
  return left >= W ? bits : bits & ((1u << left) - 1);
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) masked_softmax(SoftmaxArguments<T> a) {
  constexpr int W = width<T>, P = kValues<T> / W;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    const Sight sight = sight_of(a, row);
    float v[P][W];
    float most = kNothing;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      const unsigned mask = i < sight.count && i < a.keys ? vector_mask<W>(sight, i) : 0;
#pragma unroll
      for (int j = 0; j < W; ++j) v[p][j] = 0.0f;
      if (mask != 0) load_vector(a.x + row * a.x_stride + i, v[p]);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        v[p][j] = (mask >> j & 1) != 0 ? v[p][j] * a.scale : kNothing;
        most = fmaxf(most, v[p][j]);
      }
    }
    most = row_max(most);
    if (most == kNothing) most = 0.0f;
    float sum[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int j = 0; j < W; ++j) {
        v[p][j] = expf(v[p][j] - most);
        sum[0] += v[p][j];
      }
    sum_over_row(sum);
    const float inverse = sum[0] == 0.0f ? 0.0f : 1.0f / sum[0];
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.keys) continue;
#pragma unroll
      for (int j = 0; j < W; ++j) v[p][j] *= inverse;
      store_vector(a.out + row * a.out_stride + i, v[p]);
    }
  }
}

// Any alignment, any number of keys: one element at a time, read again for each pass.
template <class T>
__global__ void __launch_bounds__(kMostThreads) masked_softmax_scalar(SoftmaxArguments<T> a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    const Sight sight = sight_of(a, row);
    const T* x = a.x + row * a.x_stride;
    const auto value = [&](int64_t i) {
      const bool seen =
          i < sight.count && (sight.visible == nullptr || load_readonly(sight.visible + i) != 0);
      return seen ? to_float(load_global(x + i)) * a.scale : kNothing;
    };
    float most = kNothing;
    for (int64_t i = threadIdx.x; i < a.keys; i += blockDim.x) most = fmaxf(most, value(i));
    most = row_max(most);
    if (most == kNothing) most = 0.0f;
    float sum[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < a.keys; i += blockDim.x) sum[0] += expf(value(i) - most);
    sum_over_row(sum);
    const float inverse = sum[0] == 0.0f ? 0.0f : 1.0f / sum[0];
    for (int64_t i = threadIdx.x; i < a.keys; i += blockDim.x)
      store_global(a.out + row * a.out_stride + i, from_float<T>(expf(value(i) - most) * inverse));
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) masked_softmax_backward(SoftmaxArguments<T> a) {
  constexpr int W = width<T>, P = kValues<T> / W;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    float g[P][W], y[P][W];
    float sum[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.keys) continue;
      load_vector(a.grad + row * a.grad_stride + i, g[p]);
      load_vector(a.y + row * a.x_stride + i, y[p]);
#pragma unroll
      for (int j = 0; j < W; ++j) sum[0] += g[p][j] * y[p][j];
    }
    sum_over_row(sum);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int64_t i = column<W>(p);
      if (i >= a.keys) continue;
#pragma unroll
      for (int j = 0; j < W; ++j) g[p][j] = a.scale * y[p][j] * (g[p][j] - sum[0]);
      store_vector(a.out + row * a.out_stride + i, g[p]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    masked_softmax_backward_scalar(SoftmaxArguments<T> a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = first_row(); row < a.rows; row += step) {
    const T *grad = a.grad + row * a.grad_stride, *y = a.y + row * a.x_stride;
    float sum[1] = {0.0f};
    for (int64_t i = threadIdx.x; i < a.keys; i += blockDim.x)
      sum[0] += to_float(load_global(grad + i)) * to_float(load_global(y + i));
    sum_over_row(sum);
    for (int64_t i = threadIdx.x; i < a.keys; i += blockDim.x) {
      const float value = to_float(load_global(grad + i)) - sum[0];
      store_global(a.out + row * a.out_stride + i,
                   from_float<T>(a.scale * to_float(load_global(y + i)) * value));
    }
  }
}

template <class T>
bool mask_fits(const SoftmaxArguments<T>& a) {
  constexpr int W = width<T>;
  return a.visible == nullptr ||
         (reinterpret_cast<uintptr_t>(a.visible) % 4 == 0 && a.mask_b % 4 == 0 &&
          a.mask_n % 4 == 0 && a.mask_q % 4 == 0 && W % 4 == 0);
}

template <class T, bool Backward>
int run_softmax(const SoftmaxArguments<T>& a, void* stream) {
  if (a.keys == 0) return 0;
  const T* rows = Backward ? a.y : a.x;
  const bool fits = vectorizable(rows, a.x_stride) && vectorizable(a.out, a.out_stride) &&
                    (!Backward || vectorizable(a.grad, a.grad_stride)) &&
                    a.keys % width<T> == 0 && mask_fits(a) &&
                    a.keys <= static_cast<int64_t>(kValues<T>) * kMostThreads;
  const dim3 block = row_block(a.keys, kValues<T>);
  const unsigned grid = grid_size(ceil_div(a.rows, block.y));
  if constexpr (Backward)
    return fits ? ML_LAUNCH(masked_softmax_backward<T>, grid, block, 0, stream, a)
                : ML_LAUNCH(masked_softmax_backward_scalar<T>, grid, block, 0, stream, a);
  else
    return fits ? ML_LAUNCH(masked_softmax<T>, grid, block, 0, stream, a)
                : ML_LAUNCH(masked_softmax_scalar<T>, grid, block, 0, stream, a);
}

}  // namespace
}  // namespace ml

ML_EXPORT int launch_masked_softmax_forward(int64_t dtype, const void* x, int64_t x_stride,
                                            const uint8_t* visible, int64_t mask_b, int64_t mask_n,
                                            int64_t mask_q, int64_t causal, float scale, void* out,
                                            int64_t out_stride, int64_t b, int64_t n,
                                            int64_t queries, int64_t keys, void* stream) {
  if (b < 0 || n < 0 || queries < 0 || keys < 0) return ml::kInvalidValue;
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return ml::run_softmax<T, false>(
        {static_cast<const T*>(x), nullptr, nullptr, static_cast<T*>(out), visible, x_stride, 0,
         out_stride, mask_b, mask_n, mask_q, b * n * queries, n, queries, keys, scale,
         causal != 0},
        stream);
  });
}

ML_EXPORT int launch_masked_softmax_backward(int64_t dtype, const void* grad, int64_t grad_stride,
                                             const void* y, int64_t y_stride, float scale,
                                             void* grad_x, int64_t grad_x_stride, int64_t rows,
                                             int64_t keys, void* stream) {
  if (rows < 0 || keys < 0) return ml::kInvalidValue;
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return ml::run_softmax<T, true>(
        {nullptr, static_cast<const T*>(grad), static_cast<const T*>(y), static_cast<T*>(grad_x),
         nullptr, y_stride, grad_stride, grad_x_stride, 0, 0, 0, rows, 1, 1, keys, scale, false},
        stream);
  });
}
