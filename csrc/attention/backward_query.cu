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

// What a lane's two rows take from memory; rows that do not exist get probability 0.
struct RowValues {
  float exponent[2], delta[2];
};

__device__ __forceinline__ RowValues row_values(const float* lse, const float* delta, int row,
                                                int rows) {
  RowValues values;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * 8;
    values.exponent[half] = at < rows ? exponent_of(load_readonly(lse + at)) : -INFINITY;
    values.delta[half] = at < rows ? load_readonly(delta + at) : 0.0f;
  }
  return values;
}

// dp becomes ds; with a cap, scores are tanh(). key0: the tile's first key; query0: the lane's
// first row.
template <int kKeys, bool kExtras>
__device__ __forceinline__ void score_gradient(const float (&scores)[1][kKeys / 8][4],
                                               float (&dp)[1][kKeys / 8][4],
                                               const RowValues& values,
                                               float scale2, const Mask& mask, int query0, int key0,
                                               bool masked, bool capped) {
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
            fast_exp2(fmaf(scores[0][n][2 * half + i], scale2, values.exponent[half]));
        float& at = dp[0][n][2 * half + i];
        at = key >= begin && key < end ? p * (at - values.delta[half]) : 0.0f;
        if constexpr (kExtras) {
          const float score = scores[0][n][2 * half + i];
          at = capped ? at * fmaf(-score, score, 1.0f) : at;
        }
      }
  }
}

template <class T, int kDim, int kValueDim, bool kExtras>
__global__ void __launch_bounds__(kThreads, 2)
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
  const T* const k = row_of(a.k, p.k, span.batch, span.k_start, kv_head);
  const T* const v = row_of(a.v, p.v, span.batch, span.k_start, kv_head);
  const auto fetch = [&](int key0, int stage) {
    T* const to = stages + stage * Shape::kStage;
    load_tile<kKeys, kDim>(to, k + key0 * p.k.row, p.k.row, span.k_len - key0, dim);
    load_tile<kKeys, kValueDim>(to + kKeys * (kDim + kPad), v + key0 * p.v.row, p.v.row,
                                span.k_len - key0, value_dim);
    cp_commit();
  };

  const Range keys = mask.keys_of(span.first, span.first + rows - 1, kKeys);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  const int64_t lse_row = (span.batch * p.heads + head) * p.q_len + row0;
  const RowValues values = row_values(a.lse + lse_row, a.delta + lse_row, lane_row, rows);
  float dq[1][kDim / 8][4];
  clear(dq);

  if (keys.begin < keys.end) {
    load_tile<kQueries, kDim>(q_tile, row_of(a.q, p.q, span.batch, row0, head), p.q.row, rows,
                              dim);
    load_tile<kQueries, kValueDim>(dout_tile, row_of(a.dout, p.dout, span.batch, row0, head),
                                   p.dout.row, rows, value_dim);
    fetch(keys.begin, 0);
  }
  const bool capped = kExtras && a.extras.cap > 0.0f;
  const float scale = capped ? a.extras.cap : a.scale;
  int stage = 0;
  for (int key0 = keys.begin; key0 < keys.end; key0 += kKeys) {
    cp_wait<0>();
    __syncthreads();  // this tile is here, the other stage is used
    if (key0 + kKeys < keys.end) fetch(key0 + kKeys, 1 - stage);
    const T* const k_tile = stages + stage * Shape::kStage;
    const T* const v_tile = k_tile + kKeys * (kDim + kPad);
    float scores[1][kKeys / 8][4];
    float dp[1][kKeys / 8][4];
    clear(scores);
    clear(dp);
    multiply_transposed<1, kKeys, kDim>(scores, q_tile + warp_row * (kDim + kPad), k_tile);
    multiply_transposed<1, kKeys, kValueDim>(dp, dout_tile + warp_row * (kValueDim + kPad),
                                             v_tile);
    if constexpr (kExtras) {
      if (capped) cap_scores<kKeys>(scores, a.scale / a.extras.cap);
      drop_keys<kKeys>(dp, a.extras, span.batch, head, row0 + lane_row,
                       span.k_start + key0 + threadIdx.x % 4 * 2);
    }
    score_gradient<kKeys, kExtras>(scores, dp, values, scale * kLog2e, mask,
                                   span.first + lane_row, key0, keys.masked(key0, kKeys),
                                   capped);
    multiply_registers<1, kKeys, kDim>(dq, dp, k_tile);
    stage = 1 - stage;
  }

  const float factor[1][2] = {{a.scale, a.scale}};
  T* const to = row_of(a.dq, p.dq, span.batch, row0 + warp_row, head);
  store_rows<1, kDim>(q_tile + warp_row * (kDim + kPad), dq, factor, to, p.dq.row,
                      rows - warp_row, dim);
}

struct LaunchQuery {
  BackwardPointers from;
  void* dq;

  template <class T, int kDim, int kValueDim>
  int run() const {
    if (!from.extras.wanted()) return run<T, kDim, kValueDim, false>();
    if constexpr (kExtrasCompiled<kDim>) return run<T, kDim, kValueDim, true>();
    return kInvalidValue;
  }

  template <class T, int kDim, int kValueDim, bool kExtras>
  int run() const {
    using Shape = QueryShape<kDim, kValueDim>;
    const Problem& p = from.problem;
    const int64_t blocks = tiles_of(p, p.q_len, Shape::kQueries) * p.heads;
    if (blocks >= int64_t{1} << 31) return kInvalidValue;
    return ML_LAUNCH((attention_backward_query<T, kDim, kValueDim, kExtras>),
                     static_cast<unsigned>(blocks), kThreads, Shape::kBytes, from.stream,
                     from.typed<T>(dq, nullptr, nullptr));
  }
};

}  // namespace attention

// Arguments as launch_attention_forward; lse and delta [batch, heads, q_len].
ML_EXPORT int launch_attention_backward_query(
    const void* q, const void* k, const void* v, const void* dout, const float* lse,
    const float* delta, void* dq, const int32_t* q_starts, const int32_t* k_starts,
    const int64_t* problem, int64_t dtype, double scale, double softcap, double dropout,
    const int64_t* decisions, const uint32_t* samples, void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  if (!extras_valid(softcap, dropout, decisions, samples)) return kInvalidValue;
  const BackwardPointers from{q, k, v, dout, lse, delta, q_starts, k_starts, p,
                              static_cast<float>(scale),
                              make_extras(softcap, dropout, decisions, samples), stream};
  if (!from.valid() || !rows_aligned(dq, p.dq)) return kInvalidValue;
  if (p.batch == 0 || p.q_len == 0) return 0;
  return by_type(p, dtype, LaunchQuery{from, dq});
}
