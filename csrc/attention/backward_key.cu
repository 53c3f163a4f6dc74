// Attention backward for the keys and values:
//   dv = p^T dout,   dk = scale * ds^T q   with ds = p * (dout v^T - delta),
// summed over the query heads that share a key head.
//
//   q, k, v, lse: see problem.cuh; dout as out, dk as k, dv as v, each with its own strides
//   delta  [batch, heads, q_len]  float32: rowsum(dout * out) - dlse (delta.cu)
//
// One block of 4 warps owns 64 key rows of one key head and runs through the queries of every
// head of its group; the next tile of queries arrives while this one is used. Scores are made
// with keys as rows, so that a warp owns 16 of them, keeps both sums in registers and needs no
// other warp. Dims above 128 make dk and dv one after the other: both do not fit.
// Compute-bound: 4 * (dim + value_dim) FLOPs per visited pair and query head (above 128: 2 * dim
// more), rounded up to tiles. Bytes read: k and v once, q, dout, lse, delta once per block;
// written: dk and dv once.
// No atomics, one fixed order of sums: repeatable to the bit. Limits as forward.cu.
#include "attention/backward.cuh"

namespace attention {

template <int kDim, int kValueDim>
struct KeyShape {
  static constexpr int kKeys = 16 * kWarps;
  static constexpr int kQueries = kDim == 64 ? 64 : 32;
  static constexpr bool kTogether = kDim <= 128;
  // lse and delta come first: they need little alignment, the tiles keep theirs.
  static constexpr int kRowBytes = 2 * 2 * kQueries * static_cast<int>(sizeof(float));
  static constexpr int kStage = kQueries * (kDim + kValueDim + 2 * kPad);
  static constexpr int kBytes =
      kRowBytes + 2 * (kKeys * (kDim + kValueDim + 2 * kPad) + 2 * kStage);
};

// With keys as rows and queries as columns: scores become p, and dp becomes ds (if wanted).
// With a cap, scores come as tanh(). row_values: lse of the tile's queries, then delta.
template <int kQueries, bool kWithGradient, bool kExtras>
__device__ __forceinline__ void probabilities(float (&scores)[1][kQueries / 8][4],
                                              float (&dp)[1][kQueries / 8][4],
                                              const float* row_values, float scale2,
                                              const Mask& mask, int key0, int query0, int q_len,
                                              bool masked, bool capped) {
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
  int begin[2];
  int end[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    begin[half] = masked ? mask.first_query(key0 + half * 8) : 0;
    end[half] = masked ? mask.last_query(key0 + half * 8, q_len) : q_len;
  }
#pragma unroll
  for (int n = 0; n < kQueries / 8; ++n) {
    const float2 lse = load_shared(reinterpret_cast<const float2*>(row_values + column + n * 8));
    const float2 delta =
        load_shared(reinterpret_cast<const float2*>(row_values + kQueries + column + n * 8));
    const float exponents[2] = {exponent_of(lse.x), exponent_of(lse.y)};
    const float deltas[2] = {delta.x, delta.y};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = query0 + column + n * 8 + i;
        float& p = scores[0][n][2 * half + i];
        const float score = p;
        p = fast_exp2(fmaf(p, scale2, exponents[i]));
        p = query >= begin[half] && query < end[half] ? p : 0.0f;
        if constexpr (kWithGradient) {
          float& at = dp[0][n][2 * half + i];
          at = p * (at - deltas[i]);
          if constexpr (kExtras) at = capped ? at * fmaf(-score, score, 1.0f) : at;
        }
      }
  }
}

// Starts the copies of a tile: q, then dout; lse, then delta.
template <int kDim, int kValueDim, class T>
__device__ __forceinline__ void fetch_queries(const BackwardArguments<T>& a, const Span& span,
                                              int64_t head, int query0, T* to, float* values) {
  constexpr int kQueries = KeyShape<kDim, kValueDim>::kQueries;
  const Problem& p = a.problem;
  const int64_t row = span.q_start + query0;
  const int left = span.q_len - query0;
  load_tile<kQueries, kDim>(to, row_of(a.q, p.q, span.batch, row, head), p.q.row, left,
                            static_cast<int>(p.dim));
  load_tile<kQueries, kValueDim>(to + kQueries * (kDim + kPad),
                                 row_of(a.dout, p.dout, span.batch, row, head), p.dout.row, left,
                                 static_cast<int>(p.value_dim));
  const int i = static_cast<int>(threadIdx.x);
  if (i < 2 * kQueries) {
    const int64_t lse_row = (span.batch * p.heads + head) * p.q_len + row;
    const float* const from = (i < kQueries ? a.lse : a.delta) + lse_row;
    const bool valid = i % kQueries < left;
    cp_async4(values + i, valid ? from + i % kQueries : from, valid ? 4 : 0);
  }
  cp_commit();
}

template <int kColumns, int kDim, class T>
__device__ __forceinline__ void product(float (&acc)[1][kColumns / 8][4], const T* a, const T* b) {
  clear(acc);
  multiply_transposed<1, kColumns, kDim>(acc, a, b);
}

template <int kDim, class T>
__device__ __forceinline__ void store_gradient(T* to, int64_t stride, T* tile,
                                               const float (&acc)[1][kDim / 8][4], float scale,
                                               int rows, int columns) {
  const float factor[1][2] = {{scale, scale}};
  store_rows<1, kDim>(tile, acc, factor, to, stride, rows, columns);
}

// Soft cap and dropout of a tile: scores become tanh(), dp is dropped; what else is dropped.
template <int kQueries, bool kWithGradient>
__device__ __forceinline__ uint32_t apply_extras(float (&scores)[1][kQueries / 8][4],
                                                 float (&dp)[1][kQueries / 8][4],
                                                 const Extras& extras, float scale,
                                                 int64_t batch, int64_t head, int64_t query,
                                                 int64_t key) {
  if (extras.cap > 0.0f) cap_scores<kQueries>(scores, scale / extras.cap);
  if (extras.key.threshold == 0) return 0xffffffffu;
  const int64_t first = decision_of(extras, head, query, key);
  const uint32_t keep =
      kept<kQueries, false>(extras, load_readonly(extras.samples + batch), first);
  if constexpr (kWithGradient) drop_values<kQueries>(dp, keep, extras.key.scale);
  return keep;
}

template <class T, int kDim, int kValueDim, bool kMakeKey, bool kMakeValue, bool kExtras>
__global__ void __launch_bounds__(kThreads, 2)
    attention_backward_key(const BackwardArguments<T> a) {
  using Shape = KeyShape<kDim, kValueDim>;
  constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries;
  ML_DYN_SMEM(unsigned char, shared);
  float* const row_values = reinterpret_cast<float*>(shared);
  T* const k_tile = reinterpret_cast<T*>(shared + Shape::kRowBytes);
  T* const v_tile = k_tile + kKeys * (kDim + kPad);
  T* const stages = v_tile + kKeys * (kValueDim + kPad);

  const Problem& p = a.problem;
  const int64_t kv_head = blockIdx.x % p.kv_heads;
  const Span span =
      find_span(p, a.q_starts, a.k_starts, blockIdx.x / p.kv_heads, kKeys, false);
  if (span.first >= span.k_len) return;
  const Mask mask = span.mask(p);
  const int group = static_cast<int>(p.heads / p.kv_heads);
  const int rows = min(kKeys, span.k_len - span.first);
  const int dim = static_cast<int>(p.dim), value_dim = static_cast<int>(p.value_dim);
  const int64_t row0 = span.k_start + span.first;

  const Range queries = mask.queries_of(span.first, span.first + rows - 1, span.q_len, kQueries);
  const int tiles = max(0, queries.end - queries.begin + kQueries - 1) / kQueries;
  const auto fetch = [&](int step, int stage) {
    fetch_queries<kDim, kValueDim>(a, span, kv_head * group + step / tiles,
                                   queries.begin + step % tiles * kQueries,
                                   stages + stage * Shape::kStage,
                                   row_values + stage * 2 * kQueries);
  };

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int key0 = span.first + warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  T* const k_rows = k_tile + warp_row * (kDim + kPad);
  T* const v_rows = v_tile + warp_row * (kValueDim + kPad);
  float dk[1][kMakeKey ? kDim / 8 : 1][4];
  float dv[1][kMakeValue ? kValueDim / 8 : 1][4];
  clear(dk);
  clear(dv);
  if (tiles > 0) {
    const T* const k = row_of(a.k, p.k, span.batch, row0, kv_head);
    const T* const v = row_of(a.v, p.v, span.batch, row0, kv_head);
    load_tile<kKeys, kDim>(k_tile, k, p.k.row, rows, dim);
    load_tile<kKeys, kValueDim>(v_tile, v, p.v.row, rows, value_dim);
    fetch(0, 0);
  }
  const bool capped = kExtras && a.extras.cap > 0.0f;
  const float scale = capped ? a.extras.cap : a.scale;
  for (int step = 0; step < group * tiles; ++step) {
    const int stage = step % 2;
    cp_wait<0>();
    __syncthreads();  // this tile is here, the other stage is used
    if (step + 1 < group * tiles) fetch(step + 1, 1 - stage);
    const T* const query_tile = stages + stage * Shape::kStage;
    const T* const dout_tile = query_tile + kQueries * (kDim + kPad);
    const int query0 = queries.begin + step % tiles * kQueries;
    float scores[1][kQueries / 8][4], dp[1][kQueries / 8][4];
    product<kQueries, kDim>(scores, k_rows, query_tile);
    if constexpr (kMakeKey) product<kQueries, kValueDim>(dp, v_rows, dout_tile);
    [[maybe_unused]] uint32_t keep = 0xffffffffu;
    if constexpr (kExtras)
      keep = apply_extras<kQueries, kMakeKey>(
          scores, dp, a.extras, a.scale, span.batch, kv_head * group + step / tiles,
          span.q_start + query0 + threadIdx.x % 4 * 2, span.k_start + key0);
    probabilities<kQueries, kMakeKey, kExtras>(scores, dp, row_values + stage * 2 * kQueries,
                                               scale * kLog2e, mask, key0, query0, span.q_len,
                                               queries.masked(query0, kQueries), capped);
    if (kExtras && a.extras.key.threshold != 0)
      drop_values<kQueries>(scores, keep, a.extras.key.scale);
    if constexpr (kMakeValue) multiply_registers<1, kQueries, kValueDim>(dv, scores, dout_tile);
    if constexpr (kMakeKey) multiply_registers<1, kQueries, kDim>(dk, dp, query_tile);
  }

  if constexpr (kMakeKey)
    store_gradient<kDim>(row_of(a.dk, p.dk, span.batch, row0 + warp_row, kv_head), p.dk.row,
                         k_rows, dk, a.scale, rows - warp_row, dim);
  if constexpr (kMakeValue)
    store_gradient<kValueDim>(row_of(a.dv, p.dv, span.batch, row0 + warp_row, kv_head), p.dv.row,
                              v_rows, dv, 1.0f, rows - warp_row, value_dim);
}

struct LaunchKey {
  BackwardPointers from;
  void *dk, *dv;

  template <class T, int kDim, int kValueDim>
  int run() const {
    if (!from.extras.wanted()) return run<T, kDim, kValueDim, false>();
    if constexpr (kExtrasCompiled<kDim>) return run<T, kDim, kValueDim, true>();
    return kInvalidValue;
  }

  template <class T, int kDim, int kValueDim, bool kExtras>
  int run() const {
    if constexpr (KeyShape<kDim, kValueDim>::kTogether) {
      return start<T, kDim, kValueDim>(
          attention_backward_key<T, kDim, kValueDim, true, true, kExtras>);
    } else {
      const int error = start<T, kDim, kValueDim>(
          attention_backward_key<T, kDim, kValueDim, true, false, kExtras>);
      if (error != 0) return error;
      return start<T, kDim, kValueDim>(
          attention_backward_key<T, kDim, kValueDim, false, true, kExtras>);
    }
  }

  template <class T, int kDim, int kValueDim>
  int start(void (*kernel)(BackwardArguments<T>)) const {
    const int64_t tiles = tiles_of(from.problem, from.problem.k_len, 16 * kWarps);
    const int64_t blocks = tiles * from.problem.kv_heads;
    if (blocks >= int64_t{1} << 31) return kInvalidValue;
    return ML_LAUNCH(kernel, static_cast<unsigned>(blocks), kThreads,
                     (KeyShape<kDim, kValueDim>::kBytes), from.stream,
                     from.typed<T>(nullptr, dk, dv));
  }
};

}  // namespace attention

// Arguments as launch_attention_forward; lse and delta [batch, heads, q_len].
ML_EXPORT int launch_attention_backward_key(
    const void* q, const void* k, const void* v, const void* dout, const float* lse,
    const float* delta, void* dk, void* dv, const int32_t* q_starts,
    const int32_t* k_starts, const int64_t* problem, int64_t dtype, double scale,
    double softcap, double dropout, const int64_t* decisions, const uint32_t* samples,
    void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  if (!extras_valid(softcap, dropout, decisions, samples)) return kInvalidValue;
  const BackwardPointers from{q, k, v, dout, lse, delta, q_starts, k_starts, p,
                              static_cast<float>(scale),
                              make_extras(softcap, dropout, decisions, samples), stream};
  if (!from.valid() || !rows_aligned(dk, p.dk) || !rows_aligned(dv, p.dv)) return kInvalidValue;
  if (p.batch == 0 || p.k_len == 0) return 0;
  return by_type(p, dtype, LaunchKey{from, dk, dv});
}
