// The lane layouts of mma.sync and ldmatrix, each on its own and then together.
#include "device.h"

// Fragments as the PTX manual lays them out, read from memory element by element; no ldmatrix.
//   a [16, K], b [K, 8] of T (K = 16 for two-byte, 32 for one-byte types); d [16, 8] float32,
//   added to. One warp.
template <class T, class Mma>
__device__ void multiply_from_memory(const T* a, const T* b, float* d, Mma mma) {
  constexpr int kPacked = 4 / sizeof(T);
  constexpr int kDepth = 8 * kPacked;
  const int group = threadIdx.x / 4;
  const int member = threadIdx.x % 4;
  union Register {
    uint32_t bits;
    T element[kPacked];
  };
  uint32_t ra[4];
  uint32_t rb[2];
  float acc[4];
  for (int r = 0; r < 4; ++r) {
    uint32_t bits = 0;
    for (int e = 0; e < kPacked; ++e) {
      const int row = group + (r % 2) * 8;
      const int column = member * kPacked + e + (r / 2) * kDepth / 2;
      uint32_t element = 0;
      for (unsigned byte = 0; byte < sizeof(T); ++byte)
        element |= static_cast<uint32_t>(
                       reinterpret_cast<const unsigned char*>(a + row * kDepth + column)[byte])
                   << (8 * byte);
      bits |= element << (8 * sizeof(T) * e);
    }
    ra[r] = bits;
  }
  for (int r = 0; r < 2; ++r) {
    uint32_t bits = 0;
    for (int e = 0; e < kPacked; ++e) {
      const int row = member * kPacked + e + r * kDepth / 2;
      uint32_t element = 0;
      for (unsigned byte = 0; byte < sizeof(T); ++byte)
        element |= static_cast<uint32_t>(
                       reinterpret_cast<const unsigned char*>(b + row * 8 + group)[byte])
                   << (8 * byte);
      bits |= element << (8 * sizeof(T) * e);
    }
    rb[r] = bits;
  }
  for (int i = 0; i < 4; ++i) acc[i] = d[(group + i / 2 * 8) * 8 + member * 2 + i % 2];
  mma(acc, ra, rb);
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = acc[i];
}

struct MmaBf16 {
  __device__ void operator()(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16_16816(acc, a, b[0], b[1]);
  }
};
struct MmaFp16 {
  __device__ void operator()(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_fp16_16816(acc, a, b[0], b[1]);
  }
};

__global__ void mma_bf16_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  multiply_from_memory(a, b, d, MmaBf16{});
}
__global__ void mma_fp16_kernel(const __half* a, const __half* b, float* d) {
  multiply_from_memory(a, b, d, MmaFp16{});
}

ML_EXPORT int launch_mma_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d,
                              void* stream) {
  return ML_LAUNCH(mma_bf16_kernel, 1, 32, 0, stream, a, b, d);
}
ML_EXPORT int launch_mma_fp16(const __half* a, const __half* b, float* d, void* stream) {
  return ML_LAUNCH(mma_fp16_kernel, 1, 32, 0, stream, a, b, d);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
struct MmaE4m3 {
  __device__ void operator()(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_e4m3_16832(acc, a, b[0], b[1]);
  }
};
#endif

__global__ void mma_e4m3_kernel(const __nv_fp8_e4m3* a, const __nv_fp8_e4m3* b, float* d) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  multiply_from_memory(a, b, d, MmaE4m3{});
#endif
}

ML_EXPORT int launch_mma_e4m3(const __nv_fp8_e4m3* a, const __nv_fp8_e4m3* b, float* d,
                              void* stream) {
  return ML_LAUNCH(mma_e4m3_kernel, 1, 32, 0, stream, a, b, d);
}

// in [32, 8] uint16: four 8x8 matrices -> out [32, 4] uint32: the registers of every lane.
template <bool kTransposed>
__global__ void dump_ldmatrix(const uint16_t* in, uint32_t* out, int count) {
  ML_SHARED(uint16_t, rows, 32, 8);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) rows[lane][i] = in[lane * 8 + i];
  __syncwarp();
  uint32_t r[4] = {0, 0, 0, 0};
  if (count == 4) ldmatrix_x4<kTransposed>(r, rows[lane]);
  if (count == 2) {
    uint32_t two[2];
    ldmatrix_x2<kTransposed>(two, rows[lane % 16]);
    r[0] = two[0];
    r[1] = two[1];
  }
  if (count == 1) ldmatrix_x1<kTransposed>(r[0], rows[lane % 8]);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = r[i];
}

ML_EXPORT int launch_dump_ldmatrix(const uint16_t* in, uint32_t* out, int64_t count,
                                   int64_t transposed, void* stream) {
  const int n = static_cast<int>(count);
  if (transposed != 0) return ML_LAUNCH(dump_ldmatrix<true>, 1, 32, 0, stream, in, out, n);
  return ML_LAUNCH(dump_ldmatrix<false>, 1, 32, 0, stream, in, out, n);
}

// d [M, N] float32 = a [M, K] bf16 * b [K, N] bf16, row-major; M, N, K multiples of 16.
//
// One warp makes a 16x16 tile; tiles of a and b come by cp.async, the next while this one is
// used. kPad elements are added to each row in shared memory: 8 of them avoid bank conflicts.
template <int kPad>
__global__ void matmul(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d, int64_t columns,
                       int64_t depth) {
  ML_SHARED(__nv_bfloat16, tile_a, 2, 16, 16 + kPad);
  ML_SHARED(__nv_bfloat16, tile_b, 2, 16, 16 + kPad);
  const int lane = threadIdx.x;
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * 16;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * 16;
  const int row = lane / 2;
  const int part = lane % 2 * 8;
  auto fetch = [&](int stage, int64_t k0) {
    cp_async16(&tile_a[stage][row][part], a + (row0 + row) * depth + k0 + part);
    cp_async16(&tile_b[stage][row][part], b + (k0 + row) * columns + column0 + part);
    cp_commit();
  };
  float acc[2][4] = {};
  fetch(0, 0);
  for (int64_t k0 = 0; k0 < depth; k0 += 16) {
    const int stage = static_cast<int>(k0 / 16 % 2);
    if (k0 + 16 < depth) {
      fetch(1 - stage, k0 + 16);
      cp_wait<1>();
    } else {
      cp_wait<0>();
    }
    __syncwarp();
    uint32_t ra[4];
    uint32_t rb[4];
    ldmatrix_x4(ra, &tile_a[stage][lane % 16][lane / 16 * 8]);
    ldmatrix_x4<true>(rb, &tile_b[stage][lane % 16][lane / 16 * 8]);
    mma_bf16_16816(acc[0], ra, rb[0], rb[1]);
    mma_bf16_16816(acc[1], ra, rb[2], rb[3]);
    __syncwarp();
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 2; ++i) {
      const int64_t to = (row0 + lane / 4 + 8 * i) * columns + column0 + half * 8 + lane % 4 * 2;
      store_global(reinterpret_cast<float2*>(d + to),
                   make_float2(acc[half][2 * i], acc[half][2 * i + 1]));
    }
}

ML_EXPORT int launch_matmul(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d, int64_t rows,
                            int64_t columns, int64_t depth, int64_t padded, void* stream) {
  const dim3 grid(static_cast<unsigned>(columns / 16), static_cast<unsigned>(rows / 16));
  if (padded != 0) return ML_LAUNCH(matmul<8>, grid, 32, 0, stream, a, b, d, columns, depth);
  return ML_LAUNCH(matmul<0>, grid, 32, 0, stream, a, b, d, columns, depth);
}
