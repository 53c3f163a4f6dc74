// From a top-k routing map to an expert-major order of rows, without sorting.
//
//   ids      [assignments]       int32, assignment a = token * k + slot; not in [0, experts):
//                                dropped (-1 by convention)
//   counts   [experts]           int64, assignments per expert
//   offsets  [experts + 1]       int64, first row of each expert; multiples of `align`
//   chunks   [experts, chunks]   int32 workspace, chunks = ceil(assignments / 512)
//   row_of   [assignments]       int32, row of an assignment, -1 when dropped
//   source   [rows]              int32, assignment of a row, -1 for padding; rows must hold the
//                                worst case, assignments + min(experts, assignments) * (align - 1)
//   splits   [ranks]             int64, rows for each rank of an all-to-all (align = 1)
//
// Stable counting: a warp takes a chunk of 512 assignments, 32 at a time; lanes with the same
// expert find each other (match_any), the lowest adds their number to the warp's histogram in
// shared memory. Exclusive sums over chunks (a block per expert), then over experts (one
// block), give the row at which each chunk's share of an expert starts; a second walk over the
// chunk gives each assignment the next one. So rows of an expert keep the order of tokens, and
// no atomics are involved: bitwise repeatable. Memory-bound and small: 12 * assignments + 4 *
// rows + 24 * experts * chunks + 48 * experts bytes. Limits: rows < 2^31, experts <= 8192.
#include "vectors.cuh"

namespace ml::moe {

constexpr int kChunk = 512;
constexpr int kWarps = 4;  // chunks of a block
constexpr int kThreads = 256;
constexpr int64_t kMostExperts = 8192;
constexpr int64_t kMostAlign = 1 << 20;
constexpr int64_t kMostRows = 0x7fffffff;
constexpr unsigned kAll = 0xffffffffu;

// The warp's histogram moves on by 32 assignments; each lane's rank within its expert so far.
__device__ inline int next_rank(int32_t id, bool valid, int* histogram) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned equal = __match_any_sync(kAll, valid ? id : -1);
  const int before = __popc(equal & ((1u << lane) - 1u));
  int rank = 0;
  if (valid) rank = load_shared(histogram + id) + before;
  __syncwarp();
  if (valid && before == 0) store_shared(histogram + id, rank + __popc(equal));
  __syncwarp();
  return rank;
}

template <bool kPlace>
__global__ void __launch_bounds__(32 * kWarps)
    walk_chunks(const int32_t* ids, int64_t assignments, int64_t experts, int64_t num_chunks,
                const int64_t* offsets, int32_t* chunks, int32_t* row_of, int32_t* source) {
  ML_DYN_SMEM(int, histograms);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (chunk >= num_chunks) return;  // whole warps; no barrier of the block follows
  int* histogram = histograms + warp * experts;
  for (int64_t e = lane; e < experts; e += 32) {
    int start = 0;
    if constexpr (kPlace)
      start = static_cast<int>(load_global(offsets + e)) +
              load_global(chunks + e * num_chunks + chunk);
    store_shared(histogram + e, start);
  }
  __syncwarp();
  const int64_t first = chunk * kChunk;
  for (int64_t base = first; base < min(first + kChunk, assignments); base += 32) {
    const int64_t a = base + lane;
    const int32_t id = a < assignments ? load_global(ids + a) : -1;
    const bool valid = id >= 0 && id < experts;
    const int rank = next_rank(id, valid, histogram);
    if constexpr (kPlace) {
      if (a < assignments) store_global(row_of + a, valid ? rank : -1);
      if (valid) store_global(source + rank, static_cast<int32_t>(a));
    }
  }
  if constexpr (!kPlace)
    for (int64_t e = lane; e < experts; e += 32)
      store_global(chunks + e * num_chunks + chunk, load_shared(histogram + e));
}

// Exclusive sum over the block's threads of one value each; `total` of all of them.
__device__ inline int64_t exclusive_sum(int64_t value, int64_t& total) {
  ML_SHARED(int64_t, sums, kThreads / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int64_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t left = __shfl_up_sync(kAll, inclusive, step);
    if (lane >= step) inclusive += left;
  }
  __syncthreads();  // the sums of the call before have been read
  if (lane == 31) store_shared(&sums[warp], inclusive);
  __syncthreads();
  int64_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const int64_t sum = load_shared(&sums[i]);
    if (i < warp) before += sum;
    total += sum;
  }
  return before + inclusive - value;
}

// One block per expert: the counts of its chunks become exclusive sums.
__global__ void __launch_bounds__(kThreads)
    scan_chunks(int32_t* chunks, int64_t num_chunks, int64_t* counts) {
  int32_t* row = chunks + static_cast<int64_t>(blockIdx.x) * num_chunks;
  int64_t before = 0;
  for (int64_t base = 0; base < num_chunks; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t count = i < num_chunks ? load_global(row + i) : 0;
    int64_t total;
    const int64_t sum = before + exclusive_sum(count, total);
    if (i < num_chunks) store_global(row + i, static_cast<int32_t>(sum));
    before += total;
  }
  if (threadIdx.x == 0) store_global(counts + blockIdx.x, before);
}

__global__ void __launch_bounds__(kThreads)
    scan_experts(const int64_t* counts, int64_t experts, int64_t align, int64_t* offsets) {
  int64_t before = 0;
  for (int64_t base = 0; base < experts; base += kThreads) {
    const int64_t e = base + threadIdx.x;
    const int64_t count = e < experts ? load_global(counts + e) : 0;
    int64_t total;
    const int64_t sum = before + exclusive_sum((count + align - 1) / align * align, total);
    if (e < experts) store_global(offsets + e, sum);
    before += total;
  }
  if (threadIdx.x == 0) store_global(offsets + experts, before);
}

// Block e marks the padding behind expert e; block `experts` all rows behind the last expert.
__global__ void __launch_bounds__(kThreads)
    mark_padding(const int64_t* counts, const int64_t* offsets, int64_t experts, int64_t rows,
                 int32_t* source) {
  ML_SHARED(int64_t, bounds, 2);
  if (threadIdx.x == 0) {
    const int64_t e = blockIdx.x;
    const bool tail = e == experts;
    store_shared(&bounds[0], load_global(offsets + e) + (tail ? 0 : load_global(counts + e)));
    store_shared(&bounds[1], tail ? rows : load_global(offsets + e + 1));
  }
  __syncthreads();
  const int64_t end = load_shared(&bounds[1]);
  for (int64_t row = load_shared(&bounds[0]) + threadIdx.x; row < end; row += kThreads)
    store_global(source + row, -1);
}

// Rank r holds the experts [r * experts / ranks, (r + 1) * experts / ranks): one warp each.
__global__ void split_sizes(const int64_t* counts, int64_t per_rank, int64_t* splits) {
  const int64_t* own = counts + static_cast<int64_t>(blockIdx.x) * per_rank;
  int64_t sum = 0;
  for (int64_t e = threadIdx.x; e < per_rank; e += 32) sum += load_global(own + e);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
  if (threadIdx.x == 0) store_global(splits + blockIdx.x, sum);
}

}  // namespace ml::moe

ML_EXPORT int launch_moe_route(const int32_t* ids, int64_t assignments, int64_t experts,
                               int64_t align, int64_t rows, int64_t* counts, int64_t* offsets,
                               int32_t* chunks, int32_t* row_of, int32_t* source, void* stream) {
  using namespace ml;
  using namespace ml::moe;
  if (experts < 1 || experts > kMostExperts || align < 1 || align > kMostAlign ||
      assignments < 0 || rows > kMostRows ||
      rows - assignments < min(experts, assignments) * (align - 1))
    return kInvalidValue;
  const int64_t num_chunks = ceil_div(assignments, kChunk);
  const unsigned walkers = grid_size(ceil_div(num_chunks, kWarps));
  const size_t histograms = static_cast<size_t>(kWarps * experts) * sizeof(int);
  int error = ML_LAUNCH(walk_chunks<false>, walkers, 32 * kWarps, histograms, stream, ids,
                        assignments, experts, num_chunks, nullptr, chunks, nullptr, nullptr);
  if (error != 0) return error;
  error = ML_LAUNCH(scan_chunks, static_cast<unsigned>(experts), kThreads, 0, stream, chunks,
                    num_chunks, counts);
  if (error != 0) return error;
  error = ML_LAUNCH(scan_experts, 1, kThreads, 0, stream, counts, experts, align, offsets);
  if (error != 0) return error;
  error = ML_LAUNCH(mark_padding, static_cast<unsigned>(experts) + 1, kThreads, 0, stream, counts,
                    offsets, experts, rows, source);
  if (error != 0) return error;
  return ML_LAUNCH(walk_chunks<true>, walkers, 32 * kWarps, histograms, stream, ids, assignments,
                   experts, num_chunks, offsets, chunks, row_of, source);
}

// ranks must divide experts.
ML_EXPORT int launch_moe_splits(const int64_t* counts, int64_t experts, int64_t ranks,
                                int64_t* splits, void* stream) {
  using namespace ml;
  if (ranks < 1 || experts % ranks != 0) return kInvalidValue;
  return ML_LAUNCH(moe::split_sizes, static_cast<unsigned>(ranks), 32, 0, stream, counts,
                   experts / ranks, splits);
}
