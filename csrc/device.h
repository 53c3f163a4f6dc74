// The only include of a kernel file: CUDA under nvcc, the simulation (sim/) elsewhere.
//
// Both sides give the same names. Differences from plain CUDA, all spelled so that one source
// serves both: ML_SHARED and ML_DYN_SMEM declare shared memory, ML_LAUNCH launches, and the
// functions below wrap the PTX that CUDA C++ has no name for.
//
//   ML_SHARED(T, name, extents...);       static shared array, 16-byte aligned
//   ML_DYN_SMEM(T, name);                 T* to the dynamic shared memory, 128-byte aligned
//   int error = ML_LAUNCH(kernel, grid, block, smem_bytes, stream, arguments...);
//       0 or an error code; no blocks is no launch. Parenthesise a kernel with commas:
//       ML_LAUNCH((copy<float, 4>), ...). Shared memory above 48 KiB is asked for.
//   ML_EXPORT int launch_copy(...)        extern "C", visible
//   load_global / store_global, load_shared / store_shared, load_readonly,
//   load_streaming / store_streaming      typed accesses: counted and checked in simulation
//   cp_async4/8/16(shared, global[, valid_bytes]), cp_commit, cp_wait<N>, cp_wait_all
//   ldmatrix_x1/x2/x4<Transposed>(registers, row), mma_bf16_16816, mma_fp16_16816,
//   mma_e4m3_16832 (sm_89 and later), named_barrier_sync(id, num_threads)
//   fast_exp2, fast_log2, fast_tanh, fast_rcp, ML_SIM_ASSERT(condition)
#pragma once

#define ML_EXPORT extern "C" __attribute__((visibility("default")))

#ifndef __CUDACC__

#include "sim/sim.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#define ML_DEVICE __device__ __forceinline__

// ---- launches ------------------------------------------------------------------------
namespace ml {

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
           void* stream, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  if (dynamic_shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(dynamic_shared_bytes));
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  kernel<<<grid, block, dynamic_shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<Parameters>(arguments)...);
  return static_cast<int>(cudaGetLastError());
}

template <class T, int... extents>
struct ArrayOf;
template <class T, int n>
struct ArrayOf<T, n> {
  using type = T[n];
};
template <class T, int n, int... rest>
struct ArrayOf<T, n, rest...> {
  using type = typename ArrayOf<T, rest...>::type[n];
};

}  // namespace ml

#define ML_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ::ml::launch(kernel, grid, block, smem, stream, ##__VA_ARGS__)

// ---- shared memory and accesses ------------------------------------------------------
#define ML_SHARED(T, name, ...) \
  __shared__ __align__(16) typename ::ml::ArrayOf<T, __VA_ARGS__>::type name

#define ML_DYN_SMEM(T, name)                                               \
  extern __shared__ __align__(128) unsigned char ml_dynamic_shared[];      \
  T* const name = reinterpret_cast<T*>(ml_dynamic_shared)

#define ML_SIM_ASSERT(condition) \
  do {                           \
  } while (0)

template <class T>
ML_DEVICE T load_global(const T* address) {
  return *address;
}
template <class T>
ML_DEVICE T load_readonly(const T* address) {
  return __ldg(address);
}
template <class T>
ML_DEVICE T load_streaming(const T* address) {
  return __ldcs(address);
}
template <class T>
ML_DEVICE void store_global(T* address, const T& value) {
  *address = value;
}
template <class T>
ML_DEVICE void store_streaming(T* address, const T& value) {
  __stcs(address, value);
}
template <class T>
ML_DEVICE T load_shared(const T* address) {
  return *address;
}
template <class T>
ML_DEVICE void store_shared(T* address, const T& value) {
  *address = value;
}

// ---- asynchronous copies -------------------------------------------------------------
ML_DEVICE uint32_t ml_shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
ML_DEVICE void cp_async4(void* shared, const void* global, int valid_bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(ml_shared_address(shared)),
               "l"(global), "r"(valid_bytes)
               : "memory");
}
ML_DEVICE void cp_async8(void* shared, const void* global, int valid_bytes = 8) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(ml_shared_address(shared)),
               "l"(global), "r"(valid_bytes)
               : "memory");
}
ML_DEVICE void cp_async16(void* shared, const void* global, int valid_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ml_shared_address(shared)),
               "l"(global), "r"(valid_bytes)
               : "memory");
}
ML_DEVICE void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
ML_DEVICE void cp_wait() {
  static_assert(N >= 0, "a count of groups");
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
ML_DEVICE void cp_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- tensor cores --------------------------------------------------------------------
#define ML_LDMATRIX(shape, list, outputs)                                                       \
  if constexpr (Transposed)                                                                     \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".trans.shared.b16 " list                  \
                 : outputs                                                                      \
                 : "r"(ml_shared_address(row))                                                  \
                 : "memory");                                                                   \
  else                                                                                          \
    asm volatile("ldmatrix.sync.aligned.m8n8." shape ".shared.b16 " list                        \
                 : outputs                                                                      \
                 : "r"(ml_shared_address(row))                                                  \
                 : "memory")
#define ML_COMMA ,
template <bool Transposed = false>
ML_DEVICE void ldmatrix_x1(uint32_t& r, const void* row) {
  ML_LDMATRIX("x1", "{%0}, [%1];", "=r"(r));
}
template <bool Transposed = false>
ML_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  ML_LDMATRIX("x2", "{%0,%1}, [%2];", "=r"(r[0]) ML_COMMA "=r"(r[1]));
}
template <bool Transposed = false>
ML_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  ML_LDMATRIX("x4", "{%0,%1,%2,%3}, [%4];",
              "=r"(r[0]) ML_COMMA "=r"(r[1]) ML_COMMA "=r"(r[2]) ML_COMMA "=r"(r[3]));
}
#undef ML_LDMATRIX
#undef ML_COMMA

#define ML_MMA(name, shape_and_types)                                                          \
  ML_DEVICE void name(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {     \
    asm volatile("mma.sync.aligned." shape_and_types                                           \
                 " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                      \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));              \
  }
ML_MMA(mma_bf16_16816, "m16n8k16.row.col.f32.bf16.bf16.f32")
ML_MMA(mma_fp16_16816, "m16n8k16.row.col.f32.f16.f16.f32")
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
ML_MMA(mma_e4m3_16832, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
#endif
#undef ML_MMA

// ---- the rest ------------------------------------------------------------------------
ML_DEVICE void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
ML_DEVICE float fast_exp2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
ML_DEVICE float fast_log2(float a) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
ML_DEVICE float fast_tanh(float a) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
ML_DEVICE float fast_rcp(float a) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

#endif
