// Attention backward for the queries: dq = scale * ds k with ds = p * (dout v^T - delta).
//
//   q, k, v, lse: see problem.cuh; dout as out, dq as q, each with strides of its own
//   delta  [batch, heads, q_len]  float32: rowsum(dout * out) - dlse (delta.cu)
//
// lse and delta may be those of a softmax over more keys than these (ring attention): p then
// are this part's probabilities, and dq its contribution.
//
// One block of 4 warps owns 64 query rows of one head and runs through the keys; the next tile
// of keys and values arrives while this one is used. A warp owns 16 rows and needs no other.
// Compute-bound: 2 * (2 * dim + value_dim) FLOPs per visited pair, rounded up to tiles. Bytes
// read: q, dout, lse, delta once, k and v once per block; written: dq once.
// No atomics, one fixed order of sums: repeatable to the bit. Limits as forward.cu.
#include "attention/backward.cuh"

namespace attention {

template <int kDim, int kValueDim>
struct QueryShape {
  static constexpr int kQueries = 16 * kWarps;
  static constexpr int kKeys = kDim <= 64 ? 64 : 32;
  static constexpr int kStage = kKeys * (kDim + kValueDim + 2 * kPad);
  static constexpr int kBytes = 2 * (kQueries * (kDim + kValueDim + 2 * kPad) + 2 * kStage);
};

// dp becomes ds. key0: the tile's first key; query0: the lane's first row.
template <int kKeys>
__device__ __forceinline__ void score_gradient(const float (&scores)[1][kKeys / 8][4],
                                               float (&dp)[1][kKeys / 8][4],
                                               const float (&exponent)[2], const float (&delta)[2],
                                               float scale2, const Mask& mask, int query0, int key0,
                                               bool masked) {
  const int column = key0 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = masked ? mask.begin(query0 + half * 8) : 0;
    const int end = masked ? mask.end(query0 + half * 8) : mask.k_len;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = column + n * 8 + i;
        const float p =
            fast_exp2(fmaf(scores[0][n][2 * half + i], scale2, exponent[half]));
        float& at = dp[0][n][2 * half + i];
        at = key >= begin && key < end ? p * (at - delta[half]) : 0.0f;
      }
  }
}

template <class T, int kDim, int kValueDim>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    attention_backward_query(const BackwardArguments<T> a) {
  using Shape = QueryShape<kDim, kValueDim>;
  constexpr int kQueries = Shape::kQueries;
  constexpr int kKeys = Shape::kKeys;
  ML_DYN_SMEM(T, q_tile);
  T* const dout_tile = q_tile + kQueries * (kDim + kPad);
  T* const stages = dout_tile + kQueries * (kValueDim + kPad);

  const Problem& p = a.problem;
  const int64_t head = blockIdx.x % p.heads;
  const int64_t tile = (gridDim.x - 1 - blockIdx.x) / p.heads;
  const Span span = find_span(p, a.q_starts, a.k_starts, tile, kQueries, true);
  if (span.first >= span.q_len) return;
  const Mask mask = span.mask(p);
  const int64_t kv_head = head / (p.heads / p.kv_heads);
  const int rows = min(kQueries, span.q_len - span.first);
  const int dim = static_cast<int>(p.dim);
  const int value_dim = static_cast<int>(p.value_dim);
  const int64_t row0 = span.q_start + span.first;
  const T* const k = a.k + span.batch * p.k.batch + kv_head * p.k.head + span.k_start * p.k.row;
  const T* const v = a.v + span.batch * p.v.batch + kv_head * p.v.head + span.k_start * p.v.row;
  const auto fetch = [&](int key0, int stage) {
    T* const to = stages + stage * Shape::kStage;
    load_tile<kKeys, kDim>(to, k + key0 * p.k.row, p.k.row, span.k_len - key0, dim);
    load_tile<kKeys, kValueDim>(to + kKeys * (kDim + kPad), v + key0 * p.v.row, p.v.row,
                                span.k_len - key0, value_dim);
    cp_commit();
  };

  const int last = span.first + rows - 1;
  const int begin = mask.begin(span.first) / kKeys * kKeys;
  const int end = mask.end(last);
  const int full_begin = mask.begin(last);
  const int full_end = mask.end(span.first);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  const int64_t lse_row = (span.batch * p.heads + head) * p.q_len + row0;
  float exponent[2];
  float delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + half * 8;
    exponent[half] = row < rows ? exponent_of(load_readonly(a.lse + lse_row + row)) : -INFINITY;
    delta[half] = row < rows ? load_readonly(a.delta + lse_row + row) : 0.0f;
  }
  float dq[1][kDim / 8][4];
  clear(dq);

  if (begin < end) {
    load_tile<kQueries, kDim>(
        q_tile, a.q + span.batch * p.q.batch + head * p.q.head + row0 * p.q.row, p.q.row, rows,
        dim);
    load_tile<kQueries, kValueDim>(
        dout_tile, a.dout + span.batch * p.dout.batch + head * p.dout.head + row0 * p.dout.row,
        p.dout.row, rows, value_dim);
    fetch(begin, 0);
  }
  int stage = 0;
  for (int key0 = begin; key0 < end; key0 += kKeys) {
    cp_wait<0>();
    __syncthreads();  // this tile is here, the other stage is used
    if (key0 + kKeys < end) fetch(key0 + kKeys, 1 - stage);
    const T* const k_tile = stages + stage * Shape::kStage;
    const T* const v_tile = k_tile + kKeys * (kDim + kPad);
    float scores[1][kKeys / 8][4];
    float dp[1][kKeys / 8][4];
    clear(scores);
    clear(dp);
    multiply_transposed<1, kKeys, kDim>(scores, q_tile + warp_row * (kDim + kPad), k_tile);
    multiply_transposed<1, kKeys, kValueDim>(dp, dout_tile + warp_row * (kValueDim + kPad),
                                             v_tile);
    const bool masked = key0 < full_begin || key0 + kKeys > full_end;
    score_gradient<kKeys>(scores, dp, exponent, delta, a.scale * kLog2e, mask,
                          span.first + lane_row, key0, masked);
    multiply_registers<1, kKeys, kDim>(dq, dp, k_tile);
    stage = 1 - stage;
  }

  const float factor[1][2] = {{a.scale, a.scale}};
  T* to = a.dq + span.batch * p.dq.batch + head * p.dq.head + (row0 + warp_row) * p.dq.row;
  store_rows<1, kDim>(q_tile + warp_row * (kDim + kPad), dq, factor, to, p.dq.row,
                      rows - warp_row, dim);
}

struct LaunchQuery {
  BackwardPointers from;
  void* dq;

  template <class T, int kDim, int kValueDim>
  int run() const {
    using Shape = QueryShape<kDim, kValueDim>;
    const Problem& p = from.problem;
    const int64_t blocks = tiles_of(p, p.q_len, Shape::kQueries) * p.heads;
    if (blocks >= int64_t{1} << 31) return kInvalidValue;
    return ML_LAUNCH((attention_backward_query<T, kDim, kValueDim>),
                     static_cast<unsigned>(blocks), kThreads, Shape::kBytes, from.stream,
                     from.typed<T>(dq, nullptr, nullptr));
  }
};

}  // namespace attention

// Arguments as launch_attention_forward; lse and delta [batch, heads, q_len].
ML_EXPORT int launch_attention_backward_query(const void* q, const void* k, const void* v,
                                              const void* dout, const float* lse,
                                              const float* delta, void* dq,
                                              const int32_t* q_starts, const int32_t* k_starts,
                                              const int64_t* problem, int64_t dtype,
                                              double scale, void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  const BackwardPointers from{q,        k,        v, dout, lse, delta,
                              q_starts, k_starts, p, static_cast<float>(scale), stream};
  if (!from.valid() || !rows_aligned(dq, p.dq)) return kInvalidValue;
  if (p.batch == 0 || p.q_len == 0) return 0;
  return by_type(p, dtype, LaunchQuery{from, dq});
}
