// dropout(x + bias) + residual and its gradients; the mask is recomputed from its key.
//
//   x, residual, out  [s, b, h]  T, token rows at any stride; residual null: none
//   bias              [h]        T or null
//   positions         [s] int64  logical position of each row of the sequence
//   sample_ids        [b] int64  consumed-sample index
//   workspace         [parts, h] fp32 -> grad_bias [h] fp32, set or added to
//
// Backward: grad_x = mask * scale * grad (the residual's gradient is grad itself), and the bias
// gradient sums the unrounded grad_x. Decision of an element: position * h + channel, with
// c2 = sample (see philox.cuh): the same in every layout and in recomputation.
// A block is 32 vectors wide and 4 tokens high and strides over tokens.
// Memory-bound: traffic = (2 or, with a residual, 3) * s * b * h * sizeof(T); backward
// 2 * s * b * h * sizeof(T) + 8 * parts * h, parts <= 528. One Philox block of ten rounds per
// four elements. Tensor T is fp32, bf16 or fp16; arithmetic is fp32.
// No atomics, parts depend on sizes only: bitwise repeatable.
// Limits: p < 1. Without 16-byte alignment of every row, or with h not a multiple of a vector,
// single elements are moved, each with its own Philox block.
#include "column_sums.cuh"
#include "dropout/philox.cuh"

namespace ml {
namespace {

constexpr int kMostRowBlocks = 132;

template <class T>
struct DropoutArguments {
  const T *x, *bias, *residual;
  T* out;
  const int64_t *positions, *sample_ids;
  float* workspace;  // null: no bias gradient
  int64_t x_stride, residual_stride, out_stride, tokens, b, h;
  DropoutKey key;
};

template <class T, int N>
__global__ void __launch_bounds__(128) bias_dropout_residual(DropoutArguments<T> a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * N;
  if (i >= a.h) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * 4 + threadIdx.y;
  float bias[N] = {}, sum[N] = {};
  if (a.bias != nullptr) load_elements<N>(a.bias + i, bias);
  for (int64_t token = first; token < a.tokens; token += 4 * static_cast<int64_t>(gridDim.y)) {
    float value[N], residual[N] = {};
    load_elements<N>(a.x + token * a.x_stride + i, value);
    if (a.residual != nullptr)
      load_elements<N>(a.residual + token * a.residual_stride + i, residual);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] += bias[j];
    if (a.key.threshold != 0) {
      const uint64_t position = static_cast<uint64_t>(load_readonly(a.positions + token / a.b));
      const uint32_t c2 = static_cast<uint32_t>(load_readonly(a.sample_ids + token % a.b));
      drop<N>(value, a.key, position * static_cast<uint64_t>(a.h) + static_cast<uint64_t>(i), c2);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum[j] += value[j];
      value[j] += residual[j];
    }
    store_elements<N>(a.out + token * a.out_stride + i, value);
  }
  if (a.workspace == nullptr) return;
#pragma unroll
  for (int j = 0; j < N; ++j) store_global(a.workspace + first * a.h + i + j, sum[j]);
}

unsigned row_blocks(int64_t tokens, bool summed) {
  return grid_size(ceil_div(tokens, 4), summed ? kMostRowBlocks : 65535);
}

template <class T>
int run(const DropoutArguments<T>& a, void* stream) {
  const bool fits = vectorizable(a.x, a.x_stride) && vectorizable(a.out, a.out_stride) &&
                    (a.bias == nullptr || vectorizable(a.bias, a.h)) &&
                    (a.residual == nullptr || vectorizable(a.residual, a.residual_stride)) &&
                    a.h % width<T> == 0;
  const unsigned rows = row_blocks(a.tokens, a.workspace != nullptr);
  const int columns = 32 * (fits ? width<T> : 1);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.h, columns)), rows);
  return fits ? ML_LAUNCH((bias_dropout_residual<T, width<T>>), grid, dim3(32, 4), 0, stream, a)
              : ML_LAUNCH((bias_dropout_residual<T, 1>), grid, dim3(32, 4), 0, stream, a);
}

// out [blocks, 4] uint32: the words of consecutive blocks.
__global__ void philox_words(uint32_t* out, uint64_t first, int64_t blocks, uint32_t c2,
                             DropoutKey key) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= blocks) return;
  store_global(reinterpret_cast<uint4*>(out) + i,
               dropout_words(key, first + static_cast<uint64_t>(i), c2));
}

bool legal(double p, int64_t b, int64_t h) { return p >= 0.0 && p < 1.0 && b > 0 && h > 0; }

}  // namespace
}  // namespace ml

ML_EXPORT int launch_philox_words(uint32_t* out, int64_t first_block, int64_t blocks, int64_t c2,
                                  int64_t c3, int64_t seed, void* stream) {
  const ml::DropoutKey key =
      ml::dropout_key(0.0, static_cast<uint32_t>(c3), static_cast<uint64_t>(seed));
  return ML_LAUNCH(ml::philox_words, ml::grid_size(ml::ceil_div(blocks, 128)), 128, 0, stream, out,
                   static_cast<uint64_t>(first_block), blocks, static_cast<uint32_t>(c2), key);
}

// With p = 0 neither positions nor sample_ids are read.
ML_EXPORT int launch_bias_dropout_residual_forward(
    int64_t dtype, const void* x, int64_t x_stride, const void* bias, const void* residual,
    int64_t residual_stride, void* out, int64_t out_stride, const int64_t* positions,
    const int64_t* sample_ids, int64_t s, int64_t b, int64_t h, double p, int64_t c3,
    int64_t seed, void* stream) {
  if (!ml::legal(p, b, h)) return ml::kInvalidValue;
  const ml::DropoutKey key =
      ml::dropout_key(p, static_cast<uint32_t>(c3), static_cast<uint64_t>(seed));
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return ml::run<T>({static_cast<const T*>(x), static_cast<const T*>(bias),
                       static_cast<const T*>(residual), static_cast<T*>(out), positions,
                       sample_ids, nullptr, x_stride, residual_stride, out_stride, s * b, b, h,
                       key},
                      stream);
  });
}

// fp32 elements of the workspace of the bias gradient.
ML_EXPORT int64_t bias_dropout_residual_workspace(int64_t s, int64_t b, int64_t h) {
  return 4 * static_cast<int64_t>(ml::row_blocks(s * b, true)) * h;
}

// grad_bias and workspace null: no bias.
ML_EXPORT int launch_bias_dropout_residual_backward(
    int64_t dtype, const void* grad, int64_t grad_stride, void* grad_x, int64_t grad_x_stride,
    float* grad_bias, float* workspace, const int64_t* positions, const int64_t* sample_ids,
    int64_t s, int64_t b, int64_t h, double p, int64_t c3, int64_t seed, int64_t accumulate,
    void* stream) {
  if (!ml::legal(p, b, h) || (grad_bias == nullptr) != (workspace == nullptr))
    return ml::kInvalidValue;
  const ml::DropoutKey key =
      ml::dropout_key(p, static_cast<uint32_t>(c3), static_cast<uint64_t>(seed));
  const int error = ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    return ml::run<T>({static_cast<const T*>(grad), nullptr, nullptr, static_cast<T*>(grad_x),
                       positions, sample_ids, workspace, grad_stride, 0, grad_x_stride, s * b, b,
                       h, key},
                      stream);
  });
  if (error != 0 || grad_bias == nullptr) return error;
  const int64_t parts = 4 * static_cast<int64_t>(ml::row_blocks(s * b, true));
  return ml::launch_sum_parts(workspace, parts, h, grad_bias, nullptr, accumulate != 0, stream);
}
