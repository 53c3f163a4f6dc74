// Pieces of vocabulary-parallel cross-entropy over one rank's shard of the logits.
//
//   logits  [t, v_stored]  T (fp32, bf16, fp16), rows at any stride; columns [v, v_stored) are
//                          padding: never read, their gradient is written as 0
//   target  [t] int64      column of the label in this shard; outside [0, v): held elsewhere
//   peak    [t] fp32       row maximum m (-inf of no columns); over all shards for step 2
//   sums    [2 or 3, t] fp32   s = sum exp(x - m); p = x[target] - m (0 where held elsewhere);
//                          q = sum (x - m); over all shards for step 2
//   scale   [t] fp32       gradient of the total with respect to each token's loss
//   loss    [t] fp32       log s - (1 - e) p - e q / classes + z (m + log s)^2
//
// with label smoothing e and z-loss z. 1. shard_statistics (q only where it is asked for);
// 2. loss_and_gradient: logits become
// ((1 + 2 z (m + log s)) exp(x - m) / s - (1 - e) [column == target] - e / classes) * scale
// in place, rounded once, from fp32.
// A row whose scale is 0 gets a gradient of 0 whatever its logits are, also NaN.
// One block of up to 512 threads makes a row, each thread strides over 16-byte vectors and the
// block over the ragged end; maximum and sum run together, the sum rescaled where a thread's
// maximum grows. Memory-bound: traffic = (1 + 2) * t * v * sizeof(T).
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

// Exponents are relative to the maximum; -inf counts as 0, so that exp(-inf - base) is 0.
__device__ inline float base_of(float peak) { return peak == -INFINITY ? 0.0f : peak; }

template <class T, bool Totals>
__global__ void __launch_bounds__(kMostThreads)
    shard_statistics(const T* logits, const int64_t* target, float* peak, float* sums, Rows rows) {
  for (int64_t row = blockIdx.x; row < rows.t; row += gridDim.x) {
    const T* x = logits + row * rows.stride;
    // q is taken relative to a logit of the row, so that a common offset costs no digits.
    const float origin = Totals && rows.v > 0 ? base_of(to_float(load_global(x))) : 0.0f;
    float most = -INFINITY, sum[2] = {};
    const auto take = [&](const auto& values) {
      constexpr int n = sizeof values / sizeof(float);
      float top = values[0];
#pragma unroll
      for (int j = 1; j < n; ++j) top = fmaxf(top, values[j]);
      if (top > most) {
        sum[0] *= __expf(most - top);
        most = top;
      }
      const float base = base_of(most);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        sum[0] += __expf(values[j] - base);
        if (Totals) sum[1] += values[j] - origin;
      }
    };
    over_row<T>(
        rows,
        [&](int64_t i) {
          float values[width<T>];
          load_vector(x + i, values);
          take(values);
        },
        [&](int64_t i) {
          const float values[1] = {to_float(load_global(x + i))};
          take(values);
        });
    const float top = max_over_row(most), base = base_of(top);
    sum[0] *= __expf(most - base);
    sum_over_row(sum);
    if (threadIdx.x != 0) continue;
    const int64_t label = load_global(target + row);
    const bool held = label >= 0 && label < rows.v;
    store_global(peak + row, top);
    store_global(sums + row, sum[0]);
    store_global(sums + rows.t + row, held ? to_float(load_global(x + label)) - base : 0.0f);
    if (Totals)
      store_global(sums + 2 * rows.t + row, sum[1] + static_cast<float>(rows.v) * (origin - base));
  }
}

struct Terms {
  float label_smoothing, z_loss, classes;
};

__device__ inline float loss_of(const float* sums, int64_t t, int64_t row, float peak,
                                float log_sum, Terms terms) {
  float loss = log_sum - (1.0f - terms.label_smoothing) * load_global(sums + t + row);
  if (terms.label_smoothing != 0.0f)
    loss -= terms.label_smoothing * load_global(sums + 2 * t + row) / terms.classes;
  if (terms.z_loss != 0.0f) loss += terms.z_loss * (peak + log_sum) * (peak + log_sum);
  return loss;
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    loss_and_gradient(T* logits, const int64_t* target, const float* peak, const float* sums,
                      const float* scale, float* loss, Rows rows, Terms terms) {
  for (int64_t row = blockIdx.x; row < rows.t; row += gridDim.x) {
    T* x = logits + row * rows.stride;
    const float top = load_global(peak + row), total = load_global(sums + row);
    const float factor = load_global(scale + row), log_sum = logf(total);
    const float share = factor * (1.0f + 2.0f * terms.z_loss * (top + log_sum)) / total;
    const float spread = factor * terms.label_smoothing / terms.classes;
    const float hit = factor * (1.0f - terms.label_smoothing);
    const int64_t label = load_global(target + row);
    if (threadIdx.x == 0)
      store_global(loss + row, loss_of(sums, rows.t, row, top, log_sum, terms));
    const auto gradient = [&](float logit, int64_t column) {
      const float value = __expf(logit - top) * share - spread;
      return column == label ? value - hit : value;
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

__global__ void losses(const float* peak, const float* sums, float* loss, int64_t t, Terms terms) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < t)
    store_global(loss + i, loss_of(sums, t, i, load_global(peak + i), logf(load_global(sums + i)),
                                   terms));
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

// A shard without real columns (v = 0) gives a maximum of -inf and sums of 0.
ML_EXPORT int launch_cross_entropy_statistics(int64_t dtype, const void* logits, int64_t stride,
                                              const int64_t* target, float* peak, float* sums,
                                              int64_t t, int64_t v, int64_t totals,
                                              void* stream) {
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(logits);
    const ml::Rows rows = ml::rows_of(x, t, v, v, stride);
    if (totals != 0)
      return ML_LAUNCH((ml::shard_statistics<T, true>), ml::grid_size(t),
                       ml::threads_of<T>(rows), 0, stream, x, target, peak, sums, rows);
    return ML_LAUNCH((ml::shard_statistics<T, false>), ml::grid_size(t), ml::threads_of<T>(rows),
                     0, stream, x, target, peak, sums, rows);
  });
}

// scale null: the loss only (evaluation), logits are not touched.
ML_EXPORT int launch_cross_entropy_gradient(int64_t dtype, void* logits, int64_t stride,
                                            const int64_t* target, const float* peak,
                                            const float* sums, const float* scale, float* loss,
                                            int64_t t, int64_t v, int64_t v_stored,
                                            int64_t classes, float label_smoothing, float z_loss,
                                            void* stream) {
  if (!ml::legal(v, v_stored)) return ml::kInvalidValue;
  const ml::Terms terms{label_smoothing, z_loss, static_cast<float>(classes)};
  if (scale == nullptr)
    return ML_LAUNCH(ml::losses, ml::grid_size(ml::ceil_div(t, 256)), 256, 0, stream, peak, sums,
                     loss, t, terms);
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* x = static_cast<T*>(logits);
    const ml::Rows rows = ml::rows_of(x, t, v, v_stored, stride);
    return ML_LAUNCH((ml::loss_and_gradient<T>), ml::grid_size(t), ml::threads_of<T>(rows), 0,
                     stream, x, target, peak, sums, scale, loss, rows, terms);
  });
}
