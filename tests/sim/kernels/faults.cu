// Kernels with a planted fault: `broken` = 0 runs the correct twin of the same code.
//
// Each shows a mistake that a GPU may forgive on most days; the tests name what catches it.
#include "device.h"

// out [64] = in reversed, through shared memory. Fault: no barrier between write and read.
__global__ void removed_barrier(const float* in, float* out, int broken) {
  ML_SHARED(float, values, 64);
  const int i = threadIdx.x;
  values[i] = in[i];
  if (!broken) __syncthreads();
  out[i] = values[63 - i];
}

// out [128] = in [128], two stages of 64 in flight. Fault: the second wait allows one group.
__global__ void wrong_wait_count(const float* in, float* out, int broken) {
  ML_SHARED(float, values, 128);
  const int i = threadIdx.x;
  cp_async4(values + i, in + i);
  cp_commit();
  cp_async4(values + 64 + i, in + 64 + i);
  cp_commit();
  cp_wait<1>();
  __syncthreads();
  out[i] = values[63 - i];
  if (broken)
    cp_wait<1>();
  else
    cp_wait<0>();
  __syncthreads();
  out[64 + i] = values[64 + 63 - i];
}

// As above with one stage. Fault: no barrier after the wait, though others' copies are read.
__global__ void unsynchronised_copy(const float* in, float* out, int broken) {
  ML_SHARED(float, values, 64);
  const int i = threadIdx.x;
  cp_async4(values + i, in + i);
  cp_commit();
  cp_wait<0>();
  if (!broken) __syncthreads();
  out[i] = values[63 - i];
}

// out [64] = neighbour's value. Fault: the last thread reads one element beyond the array.
__global__ void shared_off_by_one(const float* in, float* out, int broken) {
  ML_DYN_SMEM(float, values);
  const int i = threadIdx.x;
  values[i] = in[i];
  __syncthreads();
  out[i] = values[broken ? i + 1 : (i + 1) % 64];
}

// out [n] = in [n] + 1, four per thread. Fault: the tail that is no multiple of 4 is dropped.
__global__ void unwritten_tail(const float* in, float* out, int64_t n, int broken) {
  const int64_t first = threadIdx.x * 4;
  if (first + 4 <= n || !broken)
    for (int64_t i = first; i < min(first + 4, n); ++i) out[i] = in[i] + 1;
}

// out [n] = 2 * in [n]. Fault: threads beyond n do not stay away.
__global__ void missing_guard(const float* in, float* out, int64_t n, int broken) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n || broken) out[i] = 2 * in[i];
}

// out [rows] = log-sum-exp of the unmasked. Fault: a fully masked row gives NaN.
__global__ void masked_row(const float* in, float* out, int broken) {
  const float* row = in + threadIdx.x * 4;
  float most = -INFINITY;
  for (int i = 0; i < 4; ++i) most = fmaxf(most, row[i]);
  const float shift = most == -INFINITY && !broken ? 0.0f : most;
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += expf(row[i] - shift);
  out[threadIdx.x] = logf(sum) + shift;
}

// Fault: the warps meet in barriers at different lines.
__global__ void divergent_barrier(float* out, int broken) {
  const int i = threadIdx.x;
  if (i < 32 || !broken)
    __syncthreads();  // first line
  else
    __syncthreads();  // second line
  out[i] = static_cast<float>(i);
}

// Fault: half of the block leaves before the barrier.
__global__ void barrier_after_return(float* out, int broken) {
  const int i = threadIdx.x;
  if (broken && i >= 32) return;
  __syncthreads();
  out[i] = static_cast<float>(i);
}

// Fault: lanes 16-31 have exited when the others shuffle with the whole warp.
__global__ void shuffle_after_exit(float* out, int broken) {
  const int lane = threadIdx.x;
  if (broken && lane >= 16) return;
  out[lane] = __shfl_xor_sync(0xffffffffu, static_cast<float>(lane), 16);
}

// Fault: a lane passes a mask without itself.
__global__ void lane_outside_mask(float* out, int broken) {
  const int lane = threadIdx.x;
  const unsigned mask = broken ? 0x7fffffffu : 0xffffffffu;
  out[lane] = static_cast<float>(__ballot_sync(mask, lane % 2) != 0);
}

// Fault: the shuffle reads a lane that does not take part.
__global__ void read_outside_mask(float* out, int broken) {
  const int lane = threadIdx.x;
  if (lane < 16) out[lane] = __shfl_xor_sync(0x0000ffffu, static_cast<float>(lane), broken ? 16 : 8);
}

// Fault: half of the warp waits in a shuffle, the other half in a barrier.
__global__ void deadlock(float* out, int broken) {
  const int lane = threadIdx.x;
  float value = static_cast<float>(lane);
  if (!broken || lane < 16) value = __shfl_xor_sync(0xffffffffu, value, 16);  // waits here
  __syncthreads();                                                           // and here
  out[lane] = value;
}

// Fault: two threads write the same element of shared memory.
__global__ void shared_race(float* out, int broken) {
  ML_SHARED(float, values, 64);
  const int i = threadIdx.x;
  values[i] = static_cast<float>(i);
  __syncthreads();
  if (broken) values[(i + 1) % 64] += 1.0f;  // racing write
  out[i] = values[i];                        // racing read
}

// Fault: blocks write the same element of global memory, without an atomic.
__global__ void global_race(int* out, int broken) {
  if (threadIdx.x != 0) return;
  if (broken)
    *out += 1;  // racing update
  else
    atomicAdd(out, 1);
}

// Fault: the last block to write decides.
__global__ void order_dependence(int* out, int broken) {
  if (broken)
    out[0] = static_cast<int>(blockIdx.x);
  else
    atomicMax(out, static_cast<int>(blockIdx.x));
}

// Fault: the rows of ldmatrix are 8 bytes off.
__global__ void misaligned_ldmatrix(uint32_t* out, int broken) {
  ML_SHARED(uint16_t, rows, 33, 8);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) rows[lane][i] = static_cast<uint16_t>(lane);
  if (lane == 0)
    for (int i = 0; i < 8; ++i) rows[32][i] = 32;
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4(r, &rows[lane][broken ? 4 : 0]);
  out[lane] = r[0];
}

// Fault: a 16-byte copy from an address that is 4-byte aligned.
__global__ void misaligned_copy(const float* in, float* out, int broken) {
  ML_SHARED(float, values, 128);
  const int i = threadIdx.x;
  cp_async16(values + 4 * i, in + 4 * i + (broken ? 1 : 0));
  cp_wait_all();
  out[i] = values[4 * i];
}

// out [n] = 1 where bits of a table say so. Fault: the index is computed in 32 bits.
__global__ void narrow_index(unsigned char* out, int64_t rows, int64_t row_bytes, int broken) {
  const int row = static_cast<int>(rows) - 1;
  const int bytes = static_cast<int>(row_bytes);
  const int64_t offset = broken ? row * bytes : row * row_bytes;
  if (offset >= 0) out[offset] = 1;
}

#define LAUNCHER(kernel, blocks, threads, smem)                                          \
  ML_EXPORT int launch_##kernel(const float* in, float* out, int64_t broken, void* stream) { \
    return ML_LAUNCH(kernel, blocks, threads, smem, stream, in, out, static_cast<int>(broken)); \
  }
#define LAUNCHER_OF_OUTPUT(T, kernel, blocks, threads)                                   \
  ML_EXPORT int launch_##kernel(T* out, int64_t broken, void* stream) {                  \
    return ML_LAUNCH(kernel, blocks, threads, 0, stream, out, static_cast<int>(broken)); \
  }
LAUNCHER(removed_barrier, 1, 64, 0)
LAUNCHER(wrong_wait_count, 1, 64, 0)
LAUNCHER(unsynchronised_copy, 1, 64, 0)
LAUNCHER(shared_off_by_one, 1, 64, 64 * sizeof(float))
LAUNCHER(masked_row, 1, 8, 0)
LAUNCHER(misaligned_copy, 1, 32, 0)
LAUNCHER_OF_OUTPUT(float, divergent_barrier, 1, 64)
LAUNCHER_OF_OUTPUT(float, barrier_after_return, 1, 64)
LAUNCHER_OF_OUTPUT(float, shuffle_after_exit, 1, 32)
LAUNCHER_OF_OUTPUT(float, lane_outside_mask, 1, 32)
LAUNCHER_OF_OUTPUT(float, read_outside_mask, 1, 32)
LAUNCHER_OF_OUTPUT(float, deadlock, 1, 32)
LAUNCHER_OF_OUTPUT(float, shared_race, 1, 64)
LAUNCHER_OF_OUTPUT(int, global_race, 3, 32)
LAUNCHER_OF_OUTPUT(int, order_dependence, 7, 1)
LAUNCHER_OF_OUTPUT(uint32_t, misaligned_ldmatrix, 1, 32)

ML_EXPORT int launch_unwritten_tail(const float* in, float* out, int64_t n, int64_t broken,
                                    void* stream) {
  return ML_LAUNCH(unwritten_tail, 1, 32, 0, stream, in, out, n, static_cast<int>(broken));
}
ML_EXPORT int launch_missing_guard(const float* in, float* out, int64_t n, int64_t broken,
                                   void* stream) {
  return ML_LAUNCH(missing_guard, static_cast<unsigned>((n + 31) / 32), 32, 0, stream, in, out, n,
                   static_cast<int>(broken));
}
ML_EXPORT int launch_narrow_index(unsigned char* out, int64_t rows, int64_t row_bytes,
                                  int64_t broken, void* stream) {
  return ML_LAUNCH(narrow_index, 1, 1, 0, stream, out, rows, row_bytes, static_cast<int>(broken));
}
