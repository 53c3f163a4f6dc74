// Move rows between token order and expert-major order.
//
//   x         [tokens, h]   any element type, rows `x_stride` bytes apart
//   source    [rows]        int32, assignment (token * k + slot) of a row; -1: padding, +0
//   row_of    [tokens * k]  int32, row of an assignment; -1: dropped
//   packed    [rows, h]     x gathered
//   probs     [tokens, k]   fp32; packed_probs [rows] the same gathered, 0 for padding
//
// gather: one warp copies one row, 16 bytes per lane. Memory-bound: 2 * rows * row_bytes + 4 *
// rows read and written (padding is not read), + 8 * rows with probabilities.
// Backward: of x, combine (combine.cu) without weights; of probs, scatter_probs: 4 + 4 + 4 bytes
// per assignment. No sums, no atomics: bitwise repeatable. Limits: rows < 2^31, row offsets are
// 64-bit. Rows that are no multiples of 16 bytes are copied byte by byte, in words where both
// are aligned to 4 bytes.
#include "vectors.cuh"

namespace ml::moe {

constexpr int kWarps = 8;

// Word: what a lane moves at a time; x_stride and row_words count words.
template <class Word>
__global__ void __launch_bounds__(32 * kWarps)
    gather_rows(const Word* x, int64_t x_stride, const int32_t* source, Word* packed,
                const float* probs, float* packed_probs, int64_t rows, int64_t row_words,
                int64_t k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  // One lane reads, all know.
  int32_t assignment = 0;
  if (lane == 0) assignment = load_global(source + row);
  assignment = __shfl_sync(0xffffffffu, assignment, 0);
  Word* to = packed + row * row_words;
  if (assignment < 0) {
    for (int64_t i = lane; i < row_words; i += 32) store_streaming(to + i, Word{});
  } else {
    const Word* from = x + assignment / k * x_stride;
    for (int64_t i = lane; i < row_words; i += 32) store_streaming(to + i, load_global(from + i));
  }
  if (packed_probs != nullptr && lane == 0)
    store_global(packed_probs + row, assignment < 0 ? 0.0f : load_global(probs + assignment));
}

__global__ void scatter_probs(const float* packed, const int32_t* row_of, float* probs,
                              int64_t assignments) {
  const int64_t a = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (a >= assignments) return;
  const int32_t row = load_global(row_of + a);
  store_global(probs + a, row < 0 ? 0.0f : load_global(packed + row));
}

template <class Word>
bool made_of(const void* x, const void* packed, int64_t x_stride, int64_t row_bytes) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(packed) |
                        static_cast<uintptr_t>(x_stride) | static_cast<uintptr_t>(row_bytes);
  return all % sizeof(Word) == 0;
}

template <class Word>
int gather(const void* x, int64_t x_stride, const int32_t* source, void* packed,
           const float* probs, float* packed_probs, int64_t rows, int64_t row_bytes, int64_t k,
           void* stream) {
  constexpr auto size = static_cast<int64_t>(sizeof(Word));
  return ML_LAUNCH(gather_rows<Word>, static_cast<unsigned>(ceil_div(rows, kWarps)), 32 * kWarps,
                   0, stream, static_cast<const Word*>(x), x_stride / size, source,
                   static_cast<Word*>(packed), probs, packed_probs, rows, row_bytes / size, k);
}

}  // namespace ml::moe

// x_stride and row_bytes in bytes; probs and packed_probs null, or both given.
ML_EXPORT int launch_moe_gather(const void* x, int64_t x_stride, const int32_t* source,
                                void* packed, const float* probs, float* packed_probs,
                                int64_t rows, int64_t row_bytes, int64_t k, void* stream) {
  using namespace ml;
  if (rows < 0 || rows > 0x7fffffff || k < 1 || row_bytes < 0) return kInvalidValue;
  const auto run = [&](auto word) {
    return moe::gather<decltype(word)>(x, x_stride, source, packed, probs, packed_probs, rows,
                                       row_bytes, k, stream);
  };
  if (moe::made_of<uint4>(x, packed, x_stride, row_bytes)) return run(uint4{});
  if (moe::made_of<uint32_t>(x, packed, x_stride, row_bytes)) return run(uint32_t{});
  return run(uint8_t{});
}

ML_EXPORT int launch_moe_scatter_probs(const float* packed, const int32_t* row_of, float* probs,
                                       int64_t assignments, void* stream) {
  using namespace ml;
  return ML_LAUNCH(moe::scatter_probs, grid_size(ceil_div(assignments, 256)), 256, 0, stream,
                   packed, row_of, probs, assignments);
}
