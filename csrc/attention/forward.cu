// Attention forward: softmax(scale * q k^T, masked) v and the log-sum-exp of its rows.
//
//   q, k, v, out, lse: see problem.cuh
//
// One block of 4 warps owns kQueries rows of one head; a warp owns 16 * kTiles of them, and its
// softmax needs no other warp. Blocks run through the keys in tiles of kKeys: the values of a
// tile arrive while its scores are made, the next keys while it is weighted. Running maximum
// and sum per row (Milakov and Gimelshein, arXiv 1805.02867), in powers of two with the scale
// folded in. Blocks with the most keys of a causal mask come first.
//
// Compute-bound: 2 * (dim + value_dim) FLOPs per visited pair of query and key, rounded up to
// tiles. Bytes read: q once, k and v once per block; written: out and lse once.
// Soft cap and dropout: extras.cuh. No atomics, one fixed order of sums: repeatable to the bit.
// Limits: dim, value_dim multiples of 8, at most 256 (192 with 128); scale > 0; lengths < 2^30;
// blocks < 2^31. A row that sees no key gives output 0 and log-sum-exp -inf.
#include "attention/extras.cuh"
#include "attention/problem.cuh"
#include "attention/tile.cuh"

namespace attention {

template <class T>
struct ForwardArguments {
  const T *q, *k, *v;
  T* out;
  float* lse;
  const int32_t *q_starts, *k_starts;
  Problem problem;
  float scale;
  Extras extras;
};

template <int kDim, bool kExtras>
struct ForwardShape {
  static constexpr int kTiles = kDim <= 128 && !kExtras ? 2 : 1;
  static constexpr int kQueries = 16 * kWarps * kTiles;
  static constexpr int kKeys = kDim <= 64 ? 64 : 32;
  template <int kValueDim>
  static constexpr int bytes() {
    return 2 * ((kQueries + kKeys) * (kDim + kPad) + kKeys * (kValueDim + kPad));
  }
};

// Running maximum (of the raw scores) and sum of the rows of a warp's lane.
template <int kTiles>
struct RowState {
  float top[kTiles][2];
  float sum[kTiles][2];
};

template <int kTiles>
__device__ __forceinline__ void begin_rows(RowState<kTiles>& state) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.top[m][half] = -INFINITY;
      state.sum[m][half] = 0.0f;
    }
}

// Hides what the mask hides; key0 is the tile's first key, query0 the lane's first row.
template <int kTiles, int kKeys>
__device__ __forceinline__ void hide(float (&scores)[kTiles][kKeys / 8][4], const Mask& mask,
                                     int query0, int key0) {
  const int column = key0 + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = mask.begin(query0 + m * 16 + half * 8);
      const int end = mask.end(query0 + m * 16 + half * 8);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = column + n * 8 + i;
          if (key < begin || key >= end) scores[m][n][2 * half + i] = -INFINITY;
        }
    }
}

// Turns scores into unnormalised probabilities and rescales what was summed before.
template <int kTiles, int kKeys, int kValueDim>
__device__ __forceinline__ void soften(float (&scores)[kTiles][kKeys / 8][4],
                                       RowState<kTiles>& state,
                                       float (&out)[kTiles][kValueDim / 8][4], float scale2) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = state.top[m][half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      // A row that has seen no key yet: nothing to rescale, and -inf - -inf would be NaN.
      const float base = top == -INFINITY ? 0.0f : top * scale2;
      const float rescale = fast_exp2(fmaf(state.top[m][half], scale2, -base));
      state.top[m][half] = top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = fast_exp2(fmaf(score, scale2, -base));
          sum += score;
        }
      state.sum[m][half] = fmaf(state.sum[m][half], rescale, sum);
#pragma unroll
      for (int n = 0; n < kValueDim / 8; ++n) {
        out[m][n][2 * half] *= rescale;
        out[m][n][2 * half + 1] *= rescale;
      }
    }
}

// Sums over the four lanes of a row; writes the log-sum-exp; gives the factor of the output.
template <int kTiles>
__device__ __forceinline__ void finish(RowState<kTiles>& state, float (&factor)[kTiles][2],
                                       float* lse, int rows, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      factor[m][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && row < rows) {
        const float top = state.top[m][half] * scale;
        store_global(lse + row, sum == 0.0f ? -INFINITY : fmaf(fast_log2(sum), kLn2, top));
      }
    }
}

template <class T, int kDim, int kValueDim, bool kExtras>
__global__ void __launch_bounds__(kThreads, 2)
    attention_forward(const ForwardArguments<T> a) {
  using Shape = ForwardShape<kDim, kExtras>;
  constexpr int kTiles = Shape::kTiles;
  constexpr int kQueries = Shape::kQueries;
  constexpr int kKeys = Shape::kKeys;
  ML_DYN_SMEM(T, q_tile);
  T* const k_tile = q_tile + kQueries * (kDim + kPad);
  T* const v_tile = k_tile + kKeys * (kDim + kPad);

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
  const Range keys = mask.keys_of(span.first, span.first + rows - 1, kKeys);

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kTiles;
  const int query0 = span.first + warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  T* const warp_tile = q_tile + warp_row * (kDim + kPad);
  const bool capped = kExtras && a.extras.cap > 0.0f;
  const float scale = capped ? a.extras.cap : a.scale;
  float out[kTiles][kValueDim / 8][4];
  clear(out);
  RowState<kTiles> state;
  begin_rows(state);

  if (keys.begin < keys.end) {
    load_tile<kQueries, kDim>(q_tile, row_of(a.q, p.q, span.batch, row0, head), p.q.row, rows,
                              dim);
    load_tile<kKeys, kDim>(k_tile, k + keys.begin * p.k.row, p.k.row, span.k_len - keys.begin,
                           dim);
    cp_commit();
  }
  for (int key0 = keys.begin; key0 < keys.end; key0 += kKeys) {
    cp_wait<0>();
    __syncthreads();  // keys are here, the last values are used
    load_tile<kKeys, kValueDim>(v_tile, v + key0 * p.v.row, p.v.row, span.k_len - key0,
                                value_dim);
    cp_commit();
    float scores[kTiles][kKeys / 8][4];
    clear(scores);
    multiply_transposed<kTiles, kKeys, kDim>(scores, warp_tile, k_tile);
    if constexpr (kExtras) {
      if (capped) cap_scores<kKeys>(scores, a.scale / a.extras.cap);
    }
    if (keys.masked(key0, kKeys)) hide<kTiles, kKeys>(scores, mask, query0, key0);
    soften<kTiles, kKeys, kValueDim>(scores, state, out, scale * kLog2e);
    if constexpr (kExtras) {
      drop_keys<kKeys>(scores, a.extras, span.batch, head, span.q_start + query0,
                       span.k_start + key0 + threadIdx.x % 4 * 2);
    }
    cp_wait<0>();
    __syncthreads();  // values are here, the keys are used
    if (key0 + kKeys < keys.end) {
      const int next = key0 + kKeys;
      load_tile<kKeys, kDim>(k_tile, k + next * p.k.row, p.k.row, span.k_len - next, dim);
      cp_commit();
    }
    multiply_registers<kTiles, kKeys, kValueDim>(out, scores, v_tile);
  }

  float factor[kTiles][2];
  const int64_t lse_row = (span.batch * p.heads + head) * p.q_len + row0 + warp_row;
  finish<kTiles>(state, factor, a.lse + lse_row, rows - warp_row, scale);
  T* const to = row_of(a.out, p.out, span.batch, row0 + warp_row, head);
  // The rows of q are this warp's own; value_dim <= dim, so they hold the output.
  static_assert(kValueDim <= kDim, "the output is staged where the queries were");
  store_rows<kTiles, kValueDim>(warp_tile, out, factor, to, p.out.row, rows - warp_row, value_dim);
}

struct LaunchForward {
  const void *q, *k, *v;
  void* out;
  float* lse;
  const int32_t *q_starts, *k_starts;
  Problem problem;
  float scale;
  Extras extras;
  void* stream;

  template <class T, int kDim, int kValueDim>
  int run() const {
    if (!extras.wanted()) return run<T, kDim, kValueDim, false>();
    if constexpr (kExtrasCompiled<kDim>) return run<T, kDim, kValueDim, true>();
    return kInvalidValue;
  }

  template <class T, int kDim, int kValueDim, bool kExtras>
  int run() const {
    using Shape = ForwardShape<kDim, kExtras>;
    const int64_t blocks = tiles_of(problem, problem.q_len, Shape::kQueries) * problem.heads;
    if (blocks >= int64_t{1} << 31) return kInvalidValue;
    const ForwardArguments<T> arguments{
        static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
        static_cast<T*>(out), lse, q_starts, k_starts, problem, scale, extras};
    return ML_LAUNCH((attention_forward<T, kDim, kValueDim, kExtras>),
                     static_cast<unsigned>(blocks), kThreads,
                     Shape::template bytes<kValueDim>(), stream, arguments);
  }
};

}  // namespace attention

// `problem` points to the int64_t fields of attention::Problem (on the host); q_starts and
// k_starts, int32 [documents + 1] on the device, may be null without documents.
// softcap 0: none. dropout 0: none, else the probability, with the int64_t fields of
// attention::Decisions (on the host) and samples, uint32 [batch] on the device: low halves of the
// samples' indices. Returns 0, or an error code for sizes, strides or pointers beyond the limits.
ML_EXPORT int launch_attention_forward(const void* q, const void* k, const void* v, void* out,
                                       float* lse, const int32_t* q_starts,
                                       const int32_t* k_starts, const int64_t* problem,
                                       int64_t dtype, double scale, double softcap,
                                       double dropout, const int64_t* decisions,
                                       const uint32_t* samples, void* stream) {
  using namespace attention;
  const Problem& p = *reinterpret_cast<const Problem*>(problem);
  if (!sizes_valid(p, q_starts, k_starts, scale)) return kInvalidValue;
  if (!extras_valid(softcap, dropout, decisions, samples)) return kInvalidValue;
  if (!rows_aligned(q, p.q) || !rows_aligned(k, p.k) || !rows_aligned(v, p.v) ||
      !rows_aligned(out, p.out))
    return kInvalidValue;
  if (p.batch == 0 || p.q_len == 0) return 0;
  const LaunchForward launch{
      q, k, v, out, lse, q_starts, k_starts, p, static_cast<float>(scale),
      make_extras(softcap, dropout, decisions, samples), stream};
  return by_type(p, dtype, launch);
}
