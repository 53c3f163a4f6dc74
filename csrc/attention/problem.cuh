// What an attention call is: sizes, strides, documents, the mask; the same for all kernels.
//
//   q    [batch, q_len, heads, dim]           T (bf16 or fp16)   any batch, row and head stride
//   k    [batch, k_len, kv_heads, dim]        T                  "
//   v    [batch, k_len, kv_heads, value_dim]  T                  "
//   out  [batch, q_len, heads, value_dim]     T                  "
//   lse  [batch, heads, q_len]                float32, contiguous; natural logarithm
//
// The last dim is contiguous, rows are 16-byte aligned. Query head n reads key head
// n / (heads / kv_heads). With documents, batch is 1, q_len and k_len are totals, and document i
// owns query rows q_starts[i] .. q_starts[i + 1] and key rows k_starts[i] .. k_starts[i + 1].
// Rows behind the last document see no key: output 0, log-sum-exp -inf, gradient 0.
//
// Query i of a document sees key j iff
//   causal:      j <= i + shift,   shift = k_len - q_len + offset   (offset 0: bottom-right)
//   window >= 0: j >= i + shift - window
// Offsets into memory are 64-bit; positions inside a document are 32-bit (limit 2^30).
#pragma once

#include "device.h"

#include <type_traits>

namespace attention {

struct Strides {
  int64_t batch, row, head;  // in elements
};

// Launchers take it as an array of int64_t in this order.
struct Problem {
  int64_t batch, heads, kv_heads, q_len, k_len, dim, value_dim;
  int64_t causal, offset, window;  // window < 0: none
  int64_t documents;               // 0: none
  Strides q, k, v, out, dout, dq, dk, dv;
};

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Rows begin <= r < end of the other side that any row of a tile sees; all of its rows see those
// from full_begin to full_end.
struct Range {
  int begin, end, full_begin, full_end;
  __device__ __forceinline__ bool masked(int first, int size) const {
    return first < full_begin || first + size > full_end;
  }
};

struct Mask {
  int k_len, shift, low;  // low = shift - window; both clamped to where nothing or all is seen
  bool causal;

  // Keys begin(i) <= j < end(i) are visible to query i.
  __device__ __forceinline__ int begin(int i) const {
    return max(0, i + low);
  }
  __device__ __forceinline__ int end(int i) const {
    return causal ? max(0, min(k_len, i + shift + 1)) : k_len;
  }
  // Queries first_query(j) <= i < last_query(j, q_len) see key j.
  __device__ __forceinline__ int first_query(int j) const { return causal ? max(0, j - shift) : 0; }
  __device__ __forceinline__ int last_query(int j, int q_len) const {
    return max(0, min(q_len, j - low + 1));
  }
  // For queries first .. last, or keys first .. last; begin rounded down to tiles of `size`.
  __device__ __forceinline__ Range keys_of(int first, int last, int size) const {
    return {begin(first) / size * size, end(last), begin(last), end(first)};
  }
  __device__ __forceinline__ Range queries_of(int first, int last, int q_len, int size) const {
    return {first_query(first) / size * size, last_query(last, q_len), first_query(last),
            last_query(first, q_len)};
  }
};

// Beyond +-(2^30 - 1) a diagonal passes every row, as rows have numbers below 2^30 - 1.
__device__ __forceinline__ int clamped(int64_t diagonal) {
  const int64_t limit = kMaxLength - 1;
  return static_cast<int>(diagonal > limit ? limit : (diagonal < -limit ? -limit : diagonal));
}

// One tile of one document (or batch entry), and the rows that belong to it.
struct Span {
  int64_t batch;
  int64_t q_start, k_start;  // first row of the document
  int q_len, k_len;          // of the document
  int first;                 // first row of the tile inside the document
  __device__ __forceinline__ Mask mask(const Problem& p) const {
    const int64_t wanted = k_len - q_len + p.offset;
    return {k_len, clamped(wanted), clamped(p.window < 0 ? -kMaxLength : wanted - p.window),
            p.causal != 0};
  }
};

template <class T>
__device__ __forceinline__ T* row_of(T* tensor, const Strides& strides, int64_t batch,
                                     int64_t row, int64_t head) {
  return tensor + batch * strides.batch + row * strides.row + head * strides.head;
}

// Tiles of `size` rows that cover `rows` rows cut into documents anywhere.
inline int64_t tiles_of(const Problem& p, int64_t rows, int64_t size) {
  if (p.documents == 0) return (rows + size - 1) / size * p.batch;
  return rows / size + p.documents + 1;
}

__device__ __forceinline__ int64_t start_of(const int32_t* starts, int64_t document,
                                            int64_t documents, int64_t total) {
  if (document > documents) return total;
  const int64_t start = load_readonly(starts + document);
  return start < 0 ? 0 : (start > total ? total : start);
}

// The tile with a linear index below tiles_of(). Document i, one more for the rows behind the
// last, begins at tile starts[i] / size + i, so no list of tiles and no longest length is
// needed. Some indices are left without rows.
__device__ __forceinline__ Span find_span(const Problem& p, const int32_t* q_starts,
                                          const int32_t* k_starts, int64_t index, int size,
                                          bool of_queries) {
  const int64_t rows = of_queries ? p.q_len : p.k_len;
  if (p.documents == 0) {
    const int64_t per_batch = (rows + size - 1) / size;
    const int64_t batch = index / per_batch;
    return {batch, 0, 0, static_cast<int>(p.q_len), static_cast<int>(p.k_len),
            static_cast<int>((index - batch * per_batch) * size)};
  }
  const int32_t* starts = of_queries ? q_starts : k_starts;
  int64_t low = 0;
  int64_t high = p.documents;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    const bool begins = start_of(starts, middle, p.documents, rows) / size + middle <= index;
    low = begins ? middle : low;
    high = begins ? high : middle - 1;
  }
  const int64_t tile = index - start_of(starts, low, p.documents, rows) / size - low;
  const int64_t q_start = start_of(q_starts, low, p.documents, p.q_len);
  const int64_t k_start = start_of(k_starts, low, p.documents, p.k_len);
  int64_t q_len = start_of(q_starts, low + 1, p.documents, p.q_len) - q_start;
  int64_t k_len = start_of(k_starts, low + 1, p.documents, p.k_len) - k_start;
  // Behind the last document nothing sees anything.
  if (low == p.documents) (of_queries ? k_len : q_len) = 0;
  return {0, q_start, k_start, static_cast<int>(q_len < 0 ? 0 : q_len),
          static_cast<int>(k_len < 0 ? 0 : k_len), static_cast<int>(tile * size)};
}

// ---- the host's side -----------------------------------------------------------------
inline bool rows_aligned(const void* data, const Strides& s) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && s.batch % 8 == 0 && s.row % 8 == 0 &&
         s.head % 8 == 0;
}

inline bool sizes_valid(const Problem& p, const void* q_starts, const void* k_starts,
                        double scale) {
  if (p.batch < 0 || p.q_len < 0 || p.k_len < 0 || p.heads < 1 || p.kv_heads < 1) return false;
  if (p.heads % p.kv_heads != 0 || p.q_len >= kMaxLength || p.k_len >= kMaxLength) return false;
  if (p.dim < 8 || p.dim % 8 != 0 || p.value_dim < 8 || p.value_dim % 8 != 0) return false;
  if (p.window >= kMaxLength || !(scale > 0.0 && scale < 1e30)) return false;
  if (p.documents == 0) return true;
  return p.documents > 0 && p.batch == 1 && q_starts != nullptr && k_starts != nullptr;
}

// Calls launch.run<T, dim, value_dim>() with the smallest compiled dims that hold the problem's.
template <class T, class Launch>
int by_dims(const Problem& p, const Launch& launch) {
  const auto fits = [&](int64_t dim, int64_t value_dim) {
    return p.dim <= dim && p.value_dim <= value_dim;
  };
#if defined(MLITE_ATTENTION_ONLY_DIM_64)  // for tests: quick to compile
  constexpr bool kAll = false;
#elif defined(MLITE_ATTENTION_TEST_DIMS)
  constexpr bool kAll = std::is_same_v<T, __nv_bfloat16>;
#else
  constexpr bool kAll = true;
#endif
  if constexpr (kAll) {
    if (fits(32, 32)) return launch.template run<T, 32, 32>();
  }
  if (fits(64, 64)) return launch.template run<T, 64, 64>();
  if constexpr (kAll) {
    if (fits(96, 96)) return launch.template run<T, 96, 96>();
    if (fits(128, 128)) return launch.template run<T, 128, 128>();
    if (fits(192, 128)) return launch.template run<T, 192, 128>();
    if (fits(256, 256)) return launch.template run<T, 256, 256>();
  }
  return kInvalidValue;
}

// Types have the numbers 1 (bf16) and 2 (fp16).
template <class Launch>
int by_type(const Problem& p, int64_t dtype, const Launch& launch) {
  if (dtype == 2) return by_dims<__half>(p, launch);
  return dtype == 1 ? by_dims<__nv_bfloat16>(p, launch) : kInvalidValue;
}

}  // namespace attention
