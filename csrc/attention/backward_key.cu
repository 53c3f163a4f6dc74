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
// row_values: lse of the tile's queries, then delta.
template <int kQueries, bool kWithGradient>
__device__ __forceinline__ void probabilities(float (&scores)[1][kQueries / 8][4],
                                              float (&dp)[1][kQueries / 8][4],
                                              const float* row_values, float scale2,
                                              const Mask& mask, int key0, int query0, int q_len,
                                              bool masked) {
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
        p = fast_exp2(fmaf(p, scale2, exponents[i]));
        p = query >= begin[half] && query < end[half] ? p : 0.0f;
        if constexpr (kWithGradient) {
          float& at = dp[0][n][2 * half + i];
          at = p * (at - deltas[i]);
        }
      }
  }
}

template <class T, int kDim, int kValueDim, bool kMakeKey, bool kMakeValue>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    attention_backward_key(const BackwardArguments<T> a) {
  using Shape = KeyShape<kDim, kValueDim>;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kQueries = Shape::kQueries;
  ML_DYN_SMEM(unsigned char, shared);
  float* const row_values = reinterpret_cast<float*>(shared);
  T* const k_tile = reinterpret_cast<T*>(shared + Shape::kRowBytes);
  T* const v_tile = k_tile + kKeys * (kDim + kPad);
  T* const stages = v_tile + kKeys * (kValueDim + kPad);

  const Problem& p = a.problem;
  const int64_t kv_head = blockIdx.x % p.kv_heads;
  const int64_t tile = blockIdx.x / p.kv_heads;
  const Span span = find_span(p, a.q_starts, a.k_starts, tile, kKeys, false);
  if (span.first >= span.k_len) return;
  const Mask mask = span.mask(p);
  const int group = static_cast<int>(p.heads / p.kv_heads);
  const int rows = min(kKeys, span.k_len - span.first);
  const int dim = static_cast<int>(p.dim);
  const int value_dim = static_cast<int>(p.value_dim);
  const int64_t row0 = span.k_start + span.first;

  // Queries that see any key of the block, and those that see all of them.
  const int last = span.first + rows - 1;
  const int begin = mask.first_query(span.first) / kQueries * kQueries;
  const int end = mask.last_query(last, span.q_len);
  const int full_begin = mask.first_query(last);
  const int full_end = mask.last_query(span.first, span.q_len);
  const int tiles = begin < end ? (end - begin + kQueries - 1) / kQueries : 0;

  const auto fetch = [&](int step, int stage) {
    const int64_t head = kv_head * group + step / tiles;
    const int query0 = begin + step % tiles * kQueries;
    const int64_t row = span.q_start + query0;
    const int left = span.q_len - query0;
    T* const to = stages + stage * Shape::kStage;
    load_tile<kQueries, kDim>(to, a.q + span.batch * p.q.batch + head * p.q.head + row * p.q.row,
                              p.q.row, left, dim);
    load_tile<kQueries, kValueDim>(
        to + kQueries * (kDim + kPad),
        a.dout + span.batch * p.dout.batch + head * p.dout.head + row * p.dout.row, p.dout.row,
        left, value_dim);
    const int i = static_cast<int>(threadIdx.x);
    if (i < 2 * kQueries) {
      const int64_t lse_row = (span.batch * p.heads + head) * p.q_len + row;
      const float* const from = (i < kQueries ? a.lse : a.delta) + lse_row;
      const bool valid = i % kQueries < left;
      cp_async4(row_values + stage * 2 * kQueries + i, valid ? from + i % kQueries : from,
                valid ? 4 : 0);
    }
    cp_commit();
  };

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int key0 = span.first + warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  float dk[1][kMakeKey ? kDim / 8 : 1][4];
  float dv[1][kMakeValue ? kValueDim / 8 : 1][4];
  clear(dk);
  clear(dv);

  if (tiles > 0) {
    load_tile<kKeys, kDim>(
        k_tile, a.k + span.batch * p.k.batch + kv_head * p.k.head + row0 * p.k.row, p.k.row, rows,
        dim);
    load_tile<kKeys, kValueDim>(
        v_tile, a.v + span.batch * p.v.batch + kv_head * p.v.head + row0 * p.v.row, p.v.row, rows,
        value_dim);
    fetch(0, 0);
  }
  for (int step = 0; step < group * tiles; ++step) {
    const int stage = step % 2;
    cp_wait<0>();
    __syncthreads();  // this tile is here, the other stage is used
    if (step + 1 < group * tiles) fetch(step + 1, 1 - stage);
    const T* const query_tile = stages + stage * Shape::kStage;
    const T* const dout_tile = query_tile + kQueries * (kDim + kPad);
    const int query0 = begin + step % tiles * kQueries;
    float scores[1][kQueries / 8][4];
    float dp[1][kQueries / 8][4];
    clear(scores);
    multiply_transposed<1, kQueries, kDim>(scores, k_tile + warp_row * (kDim + kPad), query_tile);
    if constexpr (kMakeKey) {
      clear(dp);
      multiply_transposed<1, kQueries, kValueDim>(dp, v_tile + warp_row * (kValueDim + kPad),
                                                  dout_tile);
    }
    const bool masked = query0 < full_begin || query0 + kQueries > full_end;
    probabilities<kQueries, kMakeKey>(scores, dp, row_values + stage * 2 * kQueries,
                                      a.scale * kLog2e, mask, key0, query0, span.q_len, masked);
    if constexpr (kMakeValue)
      multiply_registers<1, kQueries, kValueDim>(dv, scores, dout_tile);
    if constexpr (kMakeKey) multiply_registers<1, kQueries, kDim>(dk, dp, query_tile);
  }

  if constexpr (kMakeKey) {
    const float factor[1][2] = {{a.scale, a.scale}};
    T* to = a.dk + span.batch * p.dk.batch + kv_head * p.dk.head + (row0 + warp_row) * p.dk.row;
    store_rows<1, kDim>(k_tile + warp_row * (kDim + kPad), dk, factor, to, p.dk.row,
                        rows - warp_row, dim);
  }
  if constexpr (kMakeValue) {
    const float one[1][2] = {{1.0f, 1.0f}};
    T* to = a.dv + span.batch * p.dv.batch + kv_head * p.dv.head + (row0 + warp_row) * p.dv.row;
    store_rows<1, kValueDim>(v_tile + warp_row * (kValueDim + kPad), dv, one, to, p.dv.row,
                             rows - warp_row, value_dim);
  }
}

struct LaunchKey {
  BackwardPointers from;
  void *dk, *dv;

  template <class T, int kDim, int kValueDim>
  int run() const {
    using Shape = KeyShape<kDim, kValueDim>;
    const Problem& p = from.problem;
    const int64_t count = tiles_of(p, p.k_len, Shape::kKeys) * p.kv_heads;
    if (count >= int64_t{1} << 31) return kInvalidValue;
    const auto blocks = static_cast<unsigned>(count);
    const BackwardArguments<T> arguments = from.typed<T>(nullptr, dk, dv);
    if constexpr (Shape::kTogether) {
      return ML_LAUNCH((attention_backward_key<T, kDim, kValueDim, true, true>), blocks, kThreads,
                       Shape::kBytes, from.stream, arguments);
    } else {
      const int error =
          ML_LAUNCH((attention_backward_key<T, kDim, kValueDim, true, false>), blocks, kThreads,
                    Shape::kBytes, from.stream, arguments);
      if (error != 0) return error;
      return ML_LAUNCH((attention_backward_key<T, kDim, kValueDim, false, true>), blocks,
                       kThreads, Shape::kBytes, from.stream, arguments);
    }
  }
};

}  // namespace attention

// Arguments as launch_attention_forward; lse and delta [batch, heads, q_len].
ML_EXPORT int launch_attention_backward_key(const void* q, const void* k, const void* v,
                                            const void* dout, const float* lse,
                                            const float* delta, void* dk, void* dv,
                                            const int32_t* q_starts, const int32_t* k_starts,
                                            const int64_t* problem, int64_t dtype,
                                            double scale, void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  const BackwardPointers from{q,        k,        v, dout, lse, delta,
                              q_starts, k_starts, p, static_cast<float>(scale), stream};
  if (!from.valid() || !rows_aligned(dk, p.dk) || !rows_aligned(dv, p.dv)) return kInvalidValue;
  if (p.batch == 0 || p.k_len == 0) return 0;
  return by_type(p, dtype, LaunchKey{from, dk, dv});
}
