// Row sums for attention's backward: delta = rowsum(dout * out) - dlse.
//
//   out, dout  [batch, q_len, heads, value_dim]  T (bf16 or fp16), see problem.cuh
//   dlse       [batch, heads, q_len]  float32 or null: gradient of the log-sum-exp
//   delta      [batch, heads, q_len]  float32
//
// Eight lanes own a row and read it by 16 bytes each; rows with the same position follow each
// other by head, as [s, b, n, d] lies in memory. Memory-bound: traffic = rows * (2 * value_dim *
// 2 + 4) bytes (+ 4 with dlse). One fixed order of sums: repeatable to the bit.
// Limits: value_dim a multiple of 8; rows < 2^35.
#include "attention/problem.cuh"

namespace attention {

constexpr int kDeltaThreads = 256;
constexpr int kRowsPerBlock = kDeltaThreads / 8;

__device__ __forceinline__ float2 unpack(const __nv_bfloat16*, uint32_t two) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
}
__device__ __forceinline__ float2 unpack(const __half*, uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    attention_delta(const T* out, const T* dout, const float* dlse, float* delta,
                    const Problem p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 8;
  const bool exists = index < p.batch * p.q_len * p.heads;
  const int64_t head = index % p.heads;
  const int64_t row = index / p.heads % p.q_len;
  const int64_t batch = index / p.heads / p.q_len;
  float sum = 0.0f;
  if (exists) {
    const T* a = out + batch * p.out.batch + row * p.out.row + head * p.out.head;
    const T* b = dout + batch * p.dout.batch + row * p.dout.row + head * p.dout.head;
    for (int64_t column = threadIdx.x % 8 * 8; column < p.value_dim; column += 64) {
      const uint4 eight_a = load_global(reinterpret_cast<const uint4*>(a + column));
      const uint4 eight_b = load_global(reinterpret_cast<const uint4*>(b + column));
      const uint32_t words_a[4] = {eight_a.x, eight_a.y, eight_a.z, eight_a.w};
      const uint32_t words_b[4] = {eight_b.x, eight_b.y, eight_b.z, eight_b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(a, words_a[i]);
        const float2 y = unpack(b, words_b[i]);
        sum = fmaf(x.x, y.x, sum);
        sum = fmaf(x.y, y.y, sum);
      }
    }
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (exists && threadIdx.x % 8 == 0) {
    const int64_t to = (batch * p.heads + head) * p.q_len + row;
    store_global(delta + to, dlse == nullptr ? sum : sum - load_global(dlse + to));
  }
}

}  // namespace attention

// `problem` as launch_attention_forward takes it.
ML_EXPORT int launch_attention_delta(const void* out, const void* dout, const float* dlse,
                                     float* delta, const int64_t* problem, int64_t dtype,
                                     void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  if (p.batch < 0 || p.q_len < 0 || p.heads < 1 || p.value_dim < 8 || p.value_dim % 8 != 0)
    return kInvalidValue;
  if (dtype != 1 && dtype != 2) return kInvalidValue;
  if (!rows_aligned(out, p.out) || !rows_aligned(dout, p.dout)) return kInvalidValue;
  const int64_t rows = p.batch * p.q_len * p.heads;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  if (blocks >= int64_t{1} << 31) return kInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if (dtype == 2)
    return ML_LAUNCH(attention_delta<__half>, grid, kDeltaThreads, 0, stream,
                     static_cast<const __half*>(out), static_cast<const __half*>(dout), dlse,
                     delta, p);
  return ML_LAUNCH(attention_delta<__nv_bfloat16>, grid, kDeltaThreads, 0, stream,
                   static_cast<const __nv_bfloat16*>(out), static_cast<const __nv_bfloat16*>(dout),
                   dlse, delta, p);
}
