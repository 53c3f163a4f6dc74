// Pieces of vocabulary-parallel cross-entropy over one rank's shard of the logits.
//
//   logits  [t, v_stored]  T (fp32, bf16, fp16), rows at any stride; columns [v, v_stored) are
//                          padding: never read, their gradient is written as 0
//   target  [t] int64      column of the label in this shard; outside [0, v): held elsewhere
//   peak    [t] fp32       row maximum; the caller reduces it over the ranks (MAX)
//   sums    [2, t] fp32    sum of exp(logit - peak), and the target's logit - peak (0 where it
//                          is held elsewhere); the caller reduces it over the ranks (SUM)
//   scale   [t] fp32       gradient of the total with respect to each token's loss
//   loss    [t] fp32       log(sums[0]) - sums[1]
//
// 1. row_max; 2. exponential_sums; 3. loss_and_gradient: logits become
// (exp(logit - peak) / sums[0] - [column == target]) * scale in place, rounded once, from fp32.
// A row whose scale is 0 gets a gradient of 0 whatever its logits are, also NaN.
// One block of up to 512 threads makes a row, each thread strides over 16-byte vectors and the
// block over the ragged end. Memory-bound: traffic = (1 + 1 + 2) * t * v * sizeof(T).
// No atomics, fixed order of sums: bitwise repeatable.
// Limits: rows not aligned to 16 bytes are read by single elements. A row of -inf only, on all
// ranks, has a loss of NaN. t * stride < 2^63.
#include "vectors.cuh"

namespace ml {
namespace {

constexpr int kMostThreads = 512;

struct Rows {
  int64_t t, v, v_stored, stride;
  bool vectors;
};

// Calls body(column) for each whole vector, then tail(column) for each element that is left.
template <class T, class Body, class Tail>
__device__ inline void over_row(const Rows& rows, Body body, Tail tail) {
  const int64_t whole = rows.vectors ? rows.v / width<T> * width<T> : 0;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * width<T>; i < whole;
       i += static_cast<int64_t>(blockDim.x) * width<T>)
    body(i);
  for (int64_t i = whole + threadIdx.x; i < rows.v; i += blockDim.x) tail(i);
}

template <class T>
__global__ void __launch_bounds__(kMostThreads) row_max(const T* logits, float* peak, Rows rows) {
  for (int64_t row = blockIdx.x; row < rows.t; row += gridDim.x) {
    const T* x = logits + row * rows.stride;
    float most = -INFINITY;
    over_row<T>(
        rows,
        [&](int64_t i) {
          float values[width<T>];
          load_vector(x + i, values);
#pragma unroll
          for (int j = 0; j < width<T>; ++j) most = fmaxf(most, values[j]);
        },
        [&](int64_t i) { most = fmaxf(most, to_float(load_global(x + i))); });
    most = max_over_row(most);
    if (threadIdx.x == 0) store_global(peak + row, most);
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    exponential_sums(const T* logits, const int64_t* target, const float* peak, float* sums,
                     Rows rows) {
  for (int64_t row = blockIdx.x; row < rows.t; row += gridDim.x) {
    const T* x = logits + row * rows.stride;
    const float top = load_global(peak + row);
    float sum[1] = {0.0f};
    over_row<T>(
        rows,
        [&](int64_t i) {
          float values[width<T>];
          load_vector(x + i, values);
#pragma unroll
          for (int j = 0; j < width<T>; ++j) sum[0] += __expf(values[j] - top);
        },
        [&](int64_t i) { sum[0] += __expf(to_float(load_global(x + i)) - top); });
    sum_over_row(sum);
    if (threadIdx.x != 0) continue;
    const int64_t label = load_global(target + row);
    const bool held = label >= 0 && label < rows.v;
    store_global(sums + row, sum[0]);
    store_global(sums + rows.t + row, held ? to_float(load_global(x + label)) - top : 0.0f);
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    loss_and_gradient(T* logits, const int64_t* target, const float* peak, const float* sums,
                      const float* scale, float* loss, Rows rows) {
  for (int64_t row = blockIdx.x; row < rows.t; row += gridDim.x) {
    T* x = logits + row * rows.stride;
    const float top = load_global(peak + row), total = load_global(sums + row);
    const float factor = load_global(scale + row), share = factor / total;
    const int64_t label = load_global(target + row);
    if (threadIdx.x == 0)
      store_global(loss + row, logf(total) - load_global(sums + rows.t + row));
    const auto gradient = [&](float logit, int64_t column) {
      const float softmax = __expf(logit - top) * share;
      return column == label ? softmax - factor : softmax;
    };
    over_row<T>(
        rows,
        [&](int64_t i) {
          float values[width<T>] = {};
          if (factor != 0.0f) {
            load_vector(x + i, values);
#pragma unroll
            for (int j = 0; j < width<T>; ++j) values[j] = gradient(values[j], i + j);
          }
          store_vector(x + i, values);
        },
        [&](int64_t i) {
          const float value = factor != 0.0f ? gradient(to_float(load_global(x + i)), i) : 0.0f;
          store_global(x + i, from_float<T>(value));
        });
    for (int64_t i = rows.v + threadIdx.x; i < rows.v_stored; i += blockDim.x)
      store_global(x + i, from_float<T>(0.0f));
  }
}

__global__ void losses(const float* sums, float* loss, int64_t t) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < t) store_global(loss + i, logf(load_global(sums + i)) - load_global(sums + t + i));
}

template <class T>
Rows rows_of(const T* logits, int64_t t, int64_t v, int64_t v_stored, int64_t stride) {
  return {t, v, v_stored, stride, vectorizable(logits, stride)};
}

template <class T>
unsigned threads_of(const Rows& rows) {
  const int64_t threads = ceil_div(rows.v_stored, rows.vectors ? 32 * width<T> : 32) * 32;
  return static_cast<unsigned>(threads < 32 ? 32 : threads > kMostThreads ? kMostThreads : threads);
}

bool legal(int64_t v, int64_t v_stored) { return v >= 0 && v <= v_stored; }

}  // namespace
}  // namespace ml

// A shard without real columns (v = 0) gives -inf.
ML_EXPORT int launch_row_max(int64_t dtype, const void* logits, int64_t stride, float* peak,
                             int64_t t, int64_t v, void* stream) {
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(logits);
    const ml::Rows rows = ml::rows_of(x, t, v, v, stride);
    return ML_LAUNCH((ml::row_max<T>), ml::grid_size(t), ml::threads_of<T>(rows), 0, stream, x,
                     peak, rows);
  });
}

ML_EXPORT int launch_exponential_sums(int64_t dtype, const void* logits, int64_t stride,
                                      const int64_t* target, const float* peak, float* sums,
                                      int64_t t, int64_t v, void* stream) {
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(logits);
    const ml::Rows rows = ml::rows_of(x, t, v, v, stride);
    return ML_LAUNCH((ml::exponential_sums<T>), ml::grid_size(t), ml::threads_of<T>(rows), 0,
                     stream, x, target, peak, sums, rows);
  });
}

// scale null: the loss only (evaluation), logits are not touched.
ML_EXPORT int launch_loss_and_gradient(int64_t dtype, void* logits, int64_t stride,
                                       const int64_t* target, const float* peak,
                                       const float* sums, const float* scale, float* loss,
                                       int64_t t, int64_t v, int64_t v_stored, void* stream) {
  if (!ml::legal(v, v_stored)) return ml::kInvalidValue;
  if (scale == nullptr)
    return ML_LAUNCH(ml::losses, ml::grid_size(ml::ceil_div(t, 256)), 256, 0, stream, sums, loss,
                     t);
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* x = static_cast<T*>(logits);
    const ml::Rows rows = ml::rows_of(x, t, v, v_stored, stride);
    return ML_LAUNCH((ml::loss_and_gradient<T>), ml::grid_size(t), ml::threads_of<T>(rows), 0,
                     stream, x, target, peak, sums, scale, loss, rows);
  });
}
