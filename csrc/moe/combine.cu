// Weighted sums of expert rows per token, and their gradients.
//
//   packed     [rows, h]    fp32, bf16 or fp16: outputs of the experts, expert-major
//   row_of     [tokens, k]  int32, row of an assignment; -1: dropped, contributes nothing
//   probs      [tokens, k]  fp32, or null for weights of 1
//   out        [tokens, h]  like packed: sum over slots of probs * packed[row]
//   d_out      [tokens, h];  d_packed [rows, h], padding rows +0;  d_probs [tokens, k] fp32, 0
//              for dropped assignments
//   source     [rows]       int32, < 0 marks padding
//
// One warp per token, 16 bytes per lane; lane j holds row and weight of slot j (mod 32).
// Memory-bound: forward e * h * (assignments + tokens) + 8 * assignments bytes for e bytes per
// element; backward e * h * (2 * assignments + tokens + padding) + 12 * assignments + 4 * rows,
// d_out read once per 8 slots. Sums in fp32, slots ascending, channels in a fixed tree; no
// atomics: bitwise repeatable. combine without weights is the backward of gather. Limits: rows
// < 2^31, offsets 64-bit. Rows that are no multiples of 16 bytes: element by element.
#include "vectors.cuh"

namespace ml::moe {

constexpr int kWarps = 4;
constexpr int kSlots = 8;  // of a pass of the backward
constexpr unsigned kAll = 0xffffffffu;

// kVector: 16 bytes at a time, or one element.
template <class T, bool kVector>
constexpr int step = kVector ? width<T> : 1;

template <class T, bool kVector>
__device__ inline void load_some(const T* at, float (&values)[step<T, kVector>]) {
  if constexpr (kVector)
    load_vector(at, values);
  else
    values[0] = to_float(load_global(at));
}

template <class T, bool kVector>
__device__ inline void store_some(T* at, const float (&values)[step<T, kVector>]) {
  if constexpr (kVector)
    store_vector(at, values);
  else
    store_global(at, from_float<T>(values[0]));
}

// Row and weight of slot first + lane of a token.
struct Slot {
  int32_t row;
  float weight;
};

__device__ inline Slot slot_of_lane(const int32_t* row_of, const float* probs, int64_t token,
                                    int64_t first, int64_t k) {
  const int64_t slot = first + threadIdx.x % 32;
  Slot mine{-1, 1.0f};
  if (slot < k) {
    mine.row = load_global(row_of + token * k + slot);
    if (probs != nullptr) mine.weight = load_global(probs + token * k + slot);
  }
  return mine;
}

template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    combine(const T* packed, const int32_t* row_of, const float* probs, T* out, int64_t tokens,
            int64_t h, int64_t k) {
  constexpr int n = step<T, kVector>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  Slot mine = slot_of_lane(row_of, probs, token, 0, k);
  for (int64_t base = 0; base < h; base += 32 * n) {
    const int64_t channel = base + lane * n;
    float sum[n] = {};
    for (int64_t slot = 0; slot < k; ++slot) {
      if (k > 32 && slot % 32 == 0) mine = slot_of_lane(row_of, probs, token, slot, k);
      const int32_t row = __shfl_sync(kAll, mine.row, static_cast<int>(slot % 32));
      const float weight = __shfl_sync(kAll, mine.weight, static_cast<int>(slot % 32));
      if (row < 0 || channel >= h) continue;
      float values[n];
      load_some<T, kVector>(packed + row * h + channel, values);
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] = fmaf(weight, values[i], sum[i]);
    }
    if (channel < h) store_some<T, kVector>(out + token * h + channel, sum);
  }
}

// kSlots slots of a token at a time: d_packed = weight * d_out, d_probs = packed . d_out.
template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    combine_backward(const T* packed, const int32_t* row_of, const float* probs, const T* d_out,
                     T* d_packed, float* d_probs, int64_t tokens, int64_t h, int64_t k) {
  constexpr int n = step<T, kVector>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  for (int64_t first = 0; first < k; first += kSlots) {
    const Slot mine = slot_of_lane(row_of, probs, token, first, k);
    int32_t row[kSlots];
    float weight[kSlots];
    float dot[kSlots] = {};
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      row[j] = __shfl_sync(kAll, mine.row, j);
      weight[j] = __shfl_sync(kAll, mine.weight, j);
    }
    for (int64_t channel = lane * n; channel < h; channel += 32 * n) {
      float d[n];
      load_some<T, kVector>(d_out + token * h + channel, d);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (row[j] < 0) continue;
        float values[n];
        if (d_probs != nullptr) {
          load_some<T, kVector>(packed + row[j] * h + channel, values);
#pragma unroll
          for (int i = 0; i < n; ++i) dot[j] = fmaf(values[i], d[i], dot[j]);
        }
#pragma unroll
        for (int i = 0; i < n; ++i) values[i] = __fmul_rn(weight[j], d[i]);
        store_some<T, kVector>(d_packed + row[j] * h + channel, values);
      }
    }
    if (d_probs == nullptr) continue;
    float own = 0.0f;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const float sum = warp_sum(dot[j]);
      if (lane == j) own = sum;
    }
    if (lane < kSlots && first + lane < k) store_global(d_probs + token * k + first + lane, own);
  }
}

// One warp per row: +0 where it is padding.
template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    clear_padding(const int32_t* source, T* packed, int64_t rows, int64_t h) {
  constexpr int n = step<T, kVector>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  int32_t assignment = 0;
  if (lane == 0) assignment = load_global(source + row);
  if (__shfl_sync(kAll, assignment, 0) >= 0) return;
  const float zeros[n] = {};
  for (int64_t channel = lane * n; channel < h; channel += 32 * n)
    store_some<T, kVector>(packed + row * h + channel, zeros);
}

template <class T, bool kVector>
int launch_combine(const T* packed, const int32_t* row_of, const float* probs, T* out,
                   int64_t tokens, int64_t h, int64_t k, void* stream) {
  return ML_LAUNCH((combine<T, kVector>), static_cast<unsigned>(ceil_div(tokens, kWarps)),
                   32 * kWarps, 0, stream, packed, row_of, probs, out, tokens, h, k);
}

template <class T, bool kVector>
int launch_backward(const T* packed, const int32_t* row_of, const int32_t* source,
                    const float* probs, const T* d_out, T* d_packed, float* d_probs,
                    int64_t tokens, int64_t rows, int64_t h, int64_t k, void* stream) {
  const int error =
      ML_LAUNCH((combine_backward<T, kVector>), static_cast<unsigned>(ceil_div(tokens, kWarps)),
                32 * kWarps, 0, stream, packed, row_of, probs, d_out, d_packed, d_probs, tokens,
                h, k);
  if (error != 0) return error;
  return ML_LAUNCH((clear_padding<T, kVector>), static_cast<unsigned>(ceil_div(rows, kWarps)),
                   32 * kWarps, 0, stream, source, d_packed, rows, h);
}

inline bool valid_sizes(int64_t tokens, int64_t rows, int64_t h, int64_t k) {
  return tokens >= 0 && tokens <= 0x7fffffff && rows >= 0 && rows <= 0x7fffffff && h >= 0 &&
         k >= 1;
}

}  // namespace ml::moe

// probs null: weights of 1.
ML_EXPORT int launch_moe_combine(const void* packed, int64_t dtype, const int32_t* row_of,
                                 const float* probs, void* out, int64_t tokens, int64_t h,
                                 int64_t k, void* stream) {
  using namespace ml;
  if (!moe::valid_sizes(tokens, 0, h, k)) return kInvalidValue;
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* rows = static_cast<const T*>(packed);
    auto* sums = static_cast<T*>(out);
    if (vectorizable(rows, h) && vectorizable(sums, h))
      return moe::launch_combine<T, true>(rows, row_of, probs, sums, tokens, h, k, stream);
    return moe::launch_combine<T, false>(rows, row_of, probs, sums, tokens, h, k, stream);
  });
}

// d_probs null: not wanted, then packed is not read and may be null.
ML_EXPORT int launch_moe_combine_backward(const void* packed, int64_t dtype,
                                          const int32_t* row_of, const int32_t* source,
                                          const float* probs, const void* d_out, void* d_packed,
                                          float* d_probs, int64_t tokens, int64_t rows, int64_t h,
                                          int64_t k, void* stream) {
  using namespace ml;
  if (!moe::valid_sizes(tokens, rows, h, k)) return kInvalidValue;
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto* y = static_cast<const T*>(packed);
    const auto* d = static_cast<const T*>(d_out);
    auto* d_y = static_cast<T*>(d_packed);
    const bool vectors = vectorizable(y, h) && vectorizable(d, h) && vectorizable(d_y, h);
    const auto run = vectors ? moe::launch_backward<T, true> : moe::launch_backward<T, false>;
    return run(y, row_of, source, probs, d, d_y, d_probs, tokens, rows, h, k, stream);
  });
}
