// 16-byte vectors of fp32, bf16 or fp16 elements as fp32 registers, and sums over threads.
//
//   DType                 code of an element type in a launcher's arguments
//   width<T>              elements of one 16-byte vector: 4 or 8
//   load_vector / store_vector   one 128-bit access; rounding to nearest even on the way out
//   to_float / from_float        one element
//   load_elements / store_elements<N>  N = width<T>: a vector; N = 1: one element
//   sum_over_row<N>       N sums over the threads (., y) of a block, in a fixed order
//   vectorizable(...)     may rows of this pointer and stride be read in vectors?
//
// Memory-bound kernels differ in arithmetic, not in access: one place says how bytes move.
#pragma once

#include <type_traits>

#include "device.h"

namespace ml {

enum class DType : int64_t { fp32 = 0, bf16 = 1, fp16 = 2 };

constexpr int kInvalidValue = 1;  // the code of cudaErrorInvalidValue

template <class T>
constexpr int width = 16 / static_cast<int>(sizeof(T));

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// One 32-bit word: one fp32 or two 16-bit elements.
template <class T>
__device__ inline void unpack_word(uint32_t word, float* values) {
  if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
}

template <class T>
__device__ inline uint32_t pack_word(const float* values) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(values[0]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(values[0], values[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class T>
__device__ inline void unpack(uint4 bits, float (&values)[width<T>]) {
  constexpr int step = width<T> / 4;
  unpack_word<T>(bits.x, values);
  unpack_word<T>(bits.y, values + step);
  unpack_word<T>(bits.z, values + 2 * step);
  unpack_word<T>(bits.w, values + 3 * step);
}

template <class T>
__device__ inline uint4 pack(const float (&values)[width<T>]) {
  constexpr int step = width<T> / 4;
  return make_uint4(pack_word<T>(values), pack_word<T>(values + step),
                    pack_word<T>(values + 2 * step), pack_word<T>(values + 3 * step));
}

template <class T>
__device__ inline uint4 load_bits(const T* address) {
  return load_global(reinterpret_cast<const uint4*>(address));
}
template <class T>
__device__ inline void load_vector(const T* address, float (&values)[width<T>]) {
  unpack<T>(load_bits(address), values);
}
// Of data that no thread of the launch writes and other rows read again: weights, tables.
template <class T>
__device__ inline void load_shared_by_rows(const T* address, float (&values)[width<T>]) {
  unpack<T>(load_readonly(reinterpret_cast<const uint4*>(address)), values);
}
// One store of uint4 or uint2. nvcc splits a plain assignment into words where these come out of
// conversions. Not marked as a change of memory, so that loads move freely around it: no thread
// may load what it has stored this way.
#ifdef __CUDACC__
__device__ inline void store_bits(uint4* address, const uint4& bits) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
               "r"(bits.y), "r"(bits.z), "r"(bits.w));
}
__device__ inline void store_bits(uint2* address, const uint2& bits) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(bits.x), "r"(bits.y));
}
#else
template <class Bits>
inline void store_bits(Bits* address, const Bits& bits) {
  store_global(address, bits);
}
#endif
template <class T>
__device__ inline void store_vector(T* address, const float (&values)[width<T>]) {
  store_bits(reinterpret_cast<uint4*>(address), pack<T>(values));
}
// M consecutive fp32 of a table that several rows read, aligned to M (at most 4) elements.
template <int M>
__device__ inline void load_table(const float* address, float (&values)[M]) {
  if constexpr (M == 1) {
    values[0] = load_readonly(address);
  } else if constexpr (M == 2) {
    const float2 pair = load_readonly(reinterpret_cast<const float2*>(address));
    values[0] = pair.x;
    values[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < M; i += 4) {
      const float4 four = load_readonly(reinterpret_cast<const float4*>(address + i));
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
}

// N elements: one vector, or one element where vectors cannot be used.
template <int N, class T>
__device__ inline void load_elements(const T* address, float (&values)[N]) {
  static_assert(N == 1 || N == width<T>, "a vector or one element");
  if constexpr (N == 1)
    values[0] = to_float(load_global(address));
  else
    load_vector(address, values);
}
template <int N, class T>
__device__ inline void store_elements(T* address, const float (&values)[N]) {
  if constexpr (N == 1)
    store_global(address, from_float<T>(values[0]));
  else
    store_vector(address, values);
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Sums over threadIdx.x, the same bits in every thread. A row is one warp (then blockDim.y
// rows run side by side, without barriers) or the whole block (blockDim.y == 1).
template <int N>
__device__ inline void sum_over_row(float (&values)[N]) {
  ML_SHARED(float, partial, N, 32);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = warp_sum(values[i]);
  if (blockDim.x == 32) return;
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();  // the array may still be read for the sums before
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (threadIdx.x % 32 == 0) partial[i][threadIdx.x / 32] = values[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float sum = 0.0f;
    for (int warp = 0; warp < warps; ++warp) sum += partial[i][warp];
    values[i] = sum;
  }
}

// The maximum over a block of one row (blockDim.y == 1), the same in every thread.
__device__ inline float max_over_row(float value) {
  ML_SHARED(float, partial, 32);
  value = warp_max(value);
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();  // the array may still be read for the maximum before
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < warps; ++warp) value = fmaxf(value, partial[warp]);
  return value;
}

// ---- host side -------------------------------------------------------------------------
template <class T>
inline bool vectorizable(const T* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % width<T> == 0;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a grid-stride loop: all of them up to what a grid holds.
inline unsigned grid_size(int64_t wanted, int64_t most = 0x7fffffff) {
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

// Calls `body` with a value of the element type that `dtype` stands for.
template <class Body>
inline int with_dtype(int64_t dtype, Body body) {
  switch (static_cast<DType>(dtype)) {
    case DType::fp32: return body(float{});
    case DType::bf16: return body(__nv_bfloat16{});
    case DType::fp16: return body(__half{});
  }
  return kInvalidValue;
}

}  // namespace ml
