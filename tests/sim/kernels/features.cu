// One small kernel for each thing that the simulation offers; the tests compare with NumPy.
#include "device.h"

// out [blocks, threads, 7] int32: threadIdx, blockIdx and the block's size, flattened.
__global__ void write_indices(int* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  int* row = out + (static_cast<int64_t>(block) * threads + thread) * 7;
  row[0] = threadIdx.x;
  row[1] = threadIdx.y;
  row[2] = threadIdx.z;
  row[3] = blockIdx.x;
  row[4] = blockIdx.y;
  row[5] = blockIdx.z;
  row[6] = threads;
}

ML_EXPORT int launch_indices(int* out, int64_t gx, int64_t gy, int64_t gz, int64_t bx, int64_t by,
                             int64_t bz, void* stream) {
  return ML_LAUNCH(write_indices, dim3(gx, gy, gz), dim3(bx, by, bz), 0, stream, out);
}

// in [32] int32 -> out [4, 32]: index, up, down and xor shuffles. One warp.
__global__ void shuffle(const int* in, int* out, int width, int parameter) {
  const int lane = threadIdx.x;
  const int value = in[lane];
  out[lane] = __shfl_sync(0xffffffffu, value, parameter, width);
  out[32 + lane] = __shfl_up_sync(0xffffffffu, value, parameter, width);
  out[64 + lane] = __shfl_down_sync(0xffffffffu, value, parameter, width);
  out[96 + lane] = __shfl_xor_sync(0xffffffffu, value, parameter, width);
}

ML_EXPORT int launch_shuffle(const int* in, int* out, int64_t width, int64_t parameter,
                             void* stream) {
  return ML_LAUNCH(shuffle, 1, 32, 0, stream, in, out, static_cast<int>(width),
                   static_cast<int>(parameter));
}

// Other operand types, each rotated by one lane. out [32] float64: the sum of all of them.
__global__ void shuffle_types(double* out) {
  const int lane = threadIdx.x;
  const int next = (lane + 1) % 32;
  double sum = __shfl_sync(0xffffffffu, static_cast<double>(lane), next);
  sum += __shfl_sync(0xffffffffu, static_cast<float>(lane), next);
  sum += static_cast<double>(__shfl_sync(0xffffffffu, static_cast<long long>(lane) << 33, next));
  sum += __bfloat162float(__shfl_sync(0xffffffffu, __float2bfloat16(lane), next));
  sum += __half2float(__shfl_sync(0xffffffffu, __float2half(lane), next));
  out[lane] = sum;
}

ML_EXPORT int launch_shuffle_types(double* out, void* stream) {
  return ML_LAUNCH(shuffle_types, 1, 32, 0, stream, out);
}

// in [32] int32 -> out [10, 32]. The two halves of the warp meet apart from each other.
__global__ void vote(const int* in, int* out) {
  const int lane = threadIdx.x;
  const int value = in[lane];
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  int all = 0;
  out[0 * 32 + lane] = __ballot_sync(half, value & 1);
  out[1 * 32 + lane] = __any_sync(half, value > 6);
  out[2 * 32 + lane] = __all_sync(half, value > 1);
  out[3 * 32 + lane] = __match_any_sync(half, value);
  out[4 * 32 + lane] = __match_all_sync(half, value / 8, &all);
  out[5 * 32 + lane] = all;
  out[6 * 32 + lane] = __reduce_add_sync(half, value);
  out[7 * 32 + lane] = __reduce_min_sync(half, value - 4);
  out[8 * 32 + lane] = __reduce_max_sync(half, static_cast<unsigned>(value));
  if (lane < 16)
    out[9 * 32 + lane] = __reduce_xor_sync(0x0000ffffu, static_cast<unsigned>(value));
  else
    out[9 * 32 + lane] = __shfl_xor_sync(0xffff0000u, value, 1);
}

ML_EXPORT int launch_vote(const int* in, int* out, void* stream) {
  return ML_LAUNCH(vote, 1, 32, 0, stream, in, out);
}

// in [threads] int32 -> out [3, threads]: how many, any, all are positive in the block.
__global__ void count_in_block(const int* in, int* out) {
  const int i = threadIdx.x;
  out[i] = __syncthreads_count(in[i] > 0);
  out[blockDim.x + i] = __syncthreads_or(in[i] > 0);
  out[2 * blockDim.x + i] = __syncthreads_and(in[i] > 0);
}

ML_EXPORT int launch_count_in_block(const int* in, int* out, int64_t threads, void* stream) {
  return ML_LAUNCH(count_in_block, 1, static_cast<unsigned>(threads), 0, stream, in, out);
}

// in [n] int32 -> integers [8], reals [2] float32/float64 as accumulators.
__global__ void accumulate(const int* in, int64_t n, int* ints, unsigned long long* big,
                           float* real, double* real64) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int v = in[i];
  atomicAdd(&ints[0], v);
  atomicMax(&ints[1], v);
  atomicMin(&ints[2], v);
  atomicOr(&ints[3], v);
  atomicAnd(&ints[4], v);
  atomicXor(&ints[5], v);
  atomicInc(reinterpret_cast<unsigned*>(&ints[6]), 6);
  int seen = 0;  // ints[7] counts through compare and swap
  for (;;) {
    const int old = atomicCAS(&ints[7], seen, seen + 1);
    if (old == seen) break;
    seen = old;
  }
  atomicAdd(big, 1ull << 33);
  atomicAdd(real, static_cast<float>(v));
  atomicAdd(real64, static_cast<double>(v));
}

ML_EXPORT int launch_accumulate(const int* in, int64_t n, int* ints, unsigned long long* big,
                                float* real, double* real64, void* stream) {
  return ML_LAUNCH(accumulate, static_cast<unsigned>((n + 63) / 64), 64, 0, stream, in, n, ints,
                   big, real, real64);
}

// Transpose in [32, 32] float32 through a padded static tile, then reverse each row through
// dynamic shared memory.
__global__ void transpose_and_reverse(const float* in, float* out) {
  ML_SHARED(float, tile, 32, 33);
  ML_DYN_SMEM(float, line);
  const int x = threadIdx.x;
  const int y = threadIdx.y;
  store_shared(&tile[y][x], load_global(in + y * 32 + x));
  __syncthreads();
  store_shared(line + y * 32 + 31 - x, load_shared(&tile[x][y]));
  __syncthreads();
  store_global(out + y * 32 + x, load_shared(line + y * 32 + x));
}

ML_EXPORT int launch_transpose_and_reverse(const float* in, float* out, void* stream) {
  return ML_LAUNCH(transpose_and_reverse, 1, dim3(32, 32), 32 * 32 * sizeof(float), stream, in,
                   out);
}

// Unpadded and strided shared accesses: stride in words, width of one access 4 or 16 bytes.
template <class T>
__global__ void strided_shared(float* out, int stride) {
  ML_DYN_SMEM(T, memory);
  const int lane = threadIdx.x;
  store_shared(memory + lane * stride, T{});
  __syncthreads();
  const T value = load_shared(memory + lane * stride);
  out[lane] = *reinterpret_cast<const float*>(&value);
}

ML_EXPORT int launch_strided_shared(float* out, int64_t stride, int64_t bytes, void* stream) {
  const size_t smem = static_cast<size_t>(31 * stride + 1) * bytes;
  const int s = static_cast<int>(stride);
  if (bytes == 16) return ML_LAUNCH(strided_shared<float4>, 1, 32, smem, stream, out, s);
  return ML_LAUNCH(strided_shared<float>, 1, 32, smem, stream, out, s);
}

// out [n] = 2 * in [n] float32, four at a time; n % 4 == 0. Both are 16-byte aligned.
__global__ void double_vectors(const float4* in, float4* out, int64_t vectors) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const float4 v = load_readonly(in + i);
  store_streaming(out + i, make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w));
}

ML_EXPORT int launch_double_vectors(const float4* in, float4* out, int64_t vectors, void* stream) {
  return ML_LAUNCH(double_vectors, static_cast<unsigned>((vectors + 63) / 64), 64, 0, stream, in,
                   out, vectors);
}

// in [n] float32 -> out [4, n]: rounded to bf16, fp16, E4M3 and E5M2 and back.
__global__ void round_trip(const float* in, float* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = __bfloat162float(__float2bfloat16_rn(in[i]));
  out[n + i] = __half2float(__float2half_rn(in[i]));
  out[2 * n + i] = static_cast<float>(__nv_fp8_e4m3(in[i]));
  out[3 * n + i] = static_cast<float>(__nv_fp8_e5m2(in[i]));
}

ML_EXPORT int launch_round_trip(const float* in, float* out, int64_t n, void* stream) {
  return ML_LAUNCH(round_trip, static_cast<unsigned>((n + 127) / 128), 128, 0, stream, in, out, n);
}

// Copy in [n] bytes to out through shared memory with asynchronous copies of kBytes each, the
// bytes beyond `valid` as zeros. Two groups are in flight. One block of 64 threads.
template <int kBytes>
__global__ void copy_async(const char* in, char* out, int64_t valid) {
  ML_DYN_SMEM(char, memory);
  constexpr int kStage = 64 * kBytes;
  for (int stage = 0; stage < 2; ++stage) {
    const int at = stage * kStage + threadIdx.x * kBytes;
    const int left = static_cast<int>(min(max(valid - at, int64_t{0}), int64_t{kBytes}));
    if constexpr (kBytes == 4) cp_async4(memory + at, in + at, left);
    if constexpr (kBytes == 8) cp_async8(memory + at, in + at, left);
    if constexpr (kBytes == 16) cp_async16(memory + at, in + at, left);
    cp_commit();
  }
  cp_wait<1>();
  __syncthreads();
  for (int i = threadIdx.x; i < kStage; i += 64) out[i] = memory[i];
  cp_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kStage; i += 64) out[kStage + i] = memory[kStage + i];
}

ML_EXPORT int launch_copy_async(const char* in, char* out, int64_t bytes, int64_t valid,
                                void* stream) {
  const size_t smem = 2 * 64 * static_cast<size_t>(bytes);
  if (bytes == 4) return ML_LAUNCH(copy_async<4>, 1, 64, smem, stream, in, out, valid);
  if (bytes == 8) return ML_LAUNCH(copy_async<8>, 1, 64, smem, stream, in, out, valid);
  return ML_LAUNCH(copy_async<16>, 1, 64, smem, stream, in, out, valid);
}

// in [n] uint32 -> out [8, n] int32.
__global__ void integer_intrinsics(const unsigned* in, unsigned* out, int64_t n) {
  const int64_t i = threadIdx.x;
  if (i >= n) return;
  const unsigned v = in[i];
  out[i] = __popc(v);
  out[n + i] = __clz(static_cast<int>(v));
  out[2 * n + i] = __ffs(static_cast<int>(v));
  out[3 * n + i] = __brev(v);
  out[4 * n + i] = __umulhi(v, 0x9e3779b9u);
  out[5 * n + i] = __byte_perm(v, ~v, 0x7210);
  out[6 * n + i] = __funnelshift_l(v, ~v, 5);
  out[7 * n + i] = static_cast<unsigned>(__float2int_rn(__uint_as_float(v)));
}

ML_EXPORT int launch_integer_intrinsics(const unsigned* in, unsigned* out, int64_t n,
                                        void* stream) {
  return ML_LAUNCH(integer_intrinsics, 1, 64, 0, stream, in, out, n);
}

// Two groups of 64 threads, each with a barrier of its own: out [128] = value of the thread
// opposite in the group.
__global__ void two_groups(const float* in, float* out) {
  ML_SHARED(float, values, 128);
  const int i = threadIdx.x;
  const int group = i / 64;
  values[i] = in[i];
  if (group == 0)
    named_barrier_sync(1, 64);
  else
    named_barrier_sync(2, 64);
  out[i] = values[group * 64 + 63 - i % 64];
}

ML_EXPORT int launch_two_groups(const float* in, float* out, void* stream) {
  return ML_LAUNCH(two_groups, 1, 128, 0, stream, in, out);
}

// total [1] float32: blocks leave partial sums, the last one to arrive adds them up in order.
__global__ void sum_by_last_block(const float* in, float* partial, unsigned* arrived,
                                  float* total) {
  ML_SHARED(int, is_last, 1);
  float sum = in[static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    __threadfence();
    is_last[0] = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last[0] == 0) return;
  if (threadIdx.x == 0) {
    __threadfence();
    float all = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) all += partial[b];
    total[0] = all;
  }
}

ML_EXPORT int launch_sum_by_last_block(const float* in, float* partial, unsigned* arrived,
                                       float* total, int64_t blocks, void* stream) {
  return ML_LAUNCH(sum_by_last_block, static_cast<unsigned>(blocks), 32, 0, stream, in, partial,
                   arrived, total);
}

// Marks the first byte of rows of `row_bytes`: offsets go beyond 2^31. One thread per row.
__global__ void mark_rows(unsigned char* memory, int64_t rows, int64_t row_bytes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) memory[row * row_bytes] = static_cast<unsigned char>(row % 251 + 1);
}

ML_EXPORT int launch_mark_rows(unsigned char* memory, int64_t rows, int64_t row_bytes,
                               void* stream) {
  return ML_LAUNCH(mark_rows, static_cast<unsigned>((rows + 31) / 32), 32, 0, stream, memory, rows,
                   row_bytes);
}

// A thread with large arrays and deep calls: out [n] = sum of 2048 terms kept on the stack.
__global__ void use_the_stack(float* out) {
  float values[2048];
  for (int i = 0; i < 2048; ++i) values[i] = static_cast<float>(i % 7 + threadIdx.x);
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 2048; ++i) sum += values[2047 - i];
  out[threadIdx.x] = sum;
}

ML_EXPORT int launch_use_the_stack(float* out, int64_t threads, void* stream) {
  return ML_LAUNCH(use_the_stack, 1, static_cast<unsigned>(threads), 0, stream, out);
}
