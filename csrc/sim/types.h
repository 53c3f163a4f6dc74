// CUDA's own types under a host compiler, and the keywords of kernel code.
//
// float4, uint4, dim3, __nv_bfloat16, __half and the fp8 types come from the CUDA
// toolkit's headers, which carry full host versions of their arithmetic. Keywords that
// have a meaning on the CPU are defined; those that would be silently ignored
// (__shared__, __constant__, __managed__) are taken away, so that using one is an error.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#undef __global__
#undef __device__
#undef __host__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__    // write ML_SHARED or ML_DYN_SMEM
#undef __constant__  // pass a pointer, or use a constexpr table
#undef __managed__
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)

namespace sim {

// A place in the source; every operation that can wait or fail carries one.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

inline bool operator==(Site a, Site b) { return a.line == b.line && a.file == b.file; }

struct BlockIndices {
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
};

struct ThreadIndices {
  uint3 thread;
  const BlockIndices* block;
};

// The CUDA thread that this OS thread executes now. One pointer only: a loaded library may
// take little of the static thread-local storage, which makes the fastest access possible.
extern __thread ThreadIndices* current __attribute__((tls_model("initial-exec")));

#if defined(__SANITIZE_THREAD__) || defined(ML_SIM_TSAN)
const ThreadIndices& indices();  // in the runtime: no access of the kernel's
#else
inline const ThreadIndices& indices() { return *current; }
#endif

}  // namespace sim

#define threadIdx (::sim::indices().thread)
#define blockIdx (::sim::indices().block->block)
#define blockDim (::sim::indices().block->block_size)
#define gridDim (::sim::indices().block->grid_size)
constexpr int warpSize = 32;
