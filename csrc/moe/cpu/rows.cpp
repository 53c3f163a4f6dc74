// Rows to expert-major order and back: gather, weighted combine, and the combine's gradients.
//
//   x         [tokens, h]  any element, rows `x_stride` bytes apart
//   source    [rows]       int32, assignment (token * k + slot) of a row; -1: padding, +0
//   row_of    [tokens, k]  int32, row of an assignment; -1: dropped, contributes nothing
//   packed, d_packed  [rows, h] T;  out, d_out  [tokens, h] T
//   probs, d_probs    [tokens, k]  float (double of double); d_probs 0 where dropped
//
// Memory-bound: bytes as csrc/moe/pack.cu and combine.cu. Large results of the gather are written
// past the caches, and the row that comes next is asked for meanwhile. Sums are float (double), slots
// ascending; each row belongs to one assignment, so tokens are independent: the same bits for
// any number of threads. Padding rows of d_packed are the caller's to clear.
#include <cstring>

#include "cpu/vector.h"
#include "moe/cpu/moe.h"

namespace ml {
namespace ML_ISA {
namespace {

// N vectors of one token from channel `at` on; the last may be a part of `last` elements.
template <class T, bool Weighted, int N>
ML_INLINE void combine_channels(const MoeCombine& c, int64_t token, int64_t at, int64_t last) {
  using A = Wide<T>;
  constexpr int64_t W = kLanes<A>;
  const int32_t* rows = c.row_of + token * c.k;
  const A* probs = static_cast<const A*>(c.probs) + (Weighted ? token * c.k : 0);
  Vector<A> sums[N] = {};
  for (int64_t slot = 0; slot < c.k; ++slot) {
    if (rows[slot] < 0) continue;
    const T* row = static_cast<const T*>(c.packed) + rows[slot] * c.h + at;
    const A weight = Weighted ? probs[slot] : A(1);
    for (int j = 0; j < N; ++j) {
      const Vector<A> value = load_part(row + j * W, N == 1 ? last : W);
      sums[j] += Weighted ? weight * value : value;
    }
  }
  T* out = static_cast<T*>(c.out) + token * c.h + at;
  for (int j = 0; j < N; ++j) store_part(out + j * W, sums[j], N == 1 ? last : W);
}

template <class T, bool Weighted>
void combine_tokens(const MoeCombine& c, int64_t first, int64_t last) {
  constexpr int64_t W = kLanes<Wide<T>>;
  for (int64_t token = first; token < last; ++token) {
    int64_t at = 0;
    for (; at + 4 * W <= c.h; at += 4 * W) combine_channels<T, Weighted, 4>(c, token, at, W);
    for (; at + W <= c.h; at += W) combine_channels<T, Weighted, 1>(c, token, at, W);
    if (at < c.h) combine_channels<T, Weighted, 1>(c, token, at, c.h - at);
  }
}

// One assignment: d_packed = weight * d_out; returns packed . d_out.
template <class T>
ML_INLINE Wide<T> weighted_row(const T* row, const T* d_out, T* d_row, Wide<T> weight, int64_t h) {
  using A = Wide<T>;
  constexpr int64_t W = kLanes<A>;
  Vector<A> sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= h; i += 2 * W) {
    for (int j = 0; j < 2; ++j) {
      const Vector<A> d = load(d_out + i + j * W);
      sums[j] += load(row + i + j * W) * d;
      store(d_row + i + j * W, d * weight);
    }
  }
  A tail = 0;
  for_each_vector<A>(h - i, [&](int64_t offset, int64_t n) {
    const Vector<A> d = load_part(d_out + i + offset, n);
    const Vector<A> products = load_part(row + i + offset, n) * d;
    tail += sum<A>(products);  // lanes beyond n are 0
    store_part(d_row + i + offset, d * weight, n);
  });
  return sum<A>(sums[0] + sums[1]) + tail;
}

// Copies one row past the caches and asks for the one that comes; n, a multiple of 64, bytes.
ML_INLINE void stream_row(char* to, const char* from, const char* coming, int64_t n) {
#if defined(__AVX2__)
  constexpr int64_t kLine = 64, B = kVectorBytes;
  for (int64_t i = 0; i < n; i += kLine) {
    __builtin_prefetch(coming + i);
    for (int64_t j = i; j < i + kLine; j += B) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + j), _mm512_loadu_si512(from + j));
#else
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j)));
#endif
    }
  }
#else
  std::memcpy(to, from, static_cast<size_t>(n));
#endif
}

// Rows are short: a loop in place beats calls of memcpy.
ML_INLINE void copy_row(char* to, const char* from, int64_t n) {
  constexpr int64_t B = kVectorBytes;
  int64_t i = 0;
  for (; i + 4 * B <= n; i += 4 * B) {
    Words parts[4];
    for (int j = 0; j < 4; ++j) std::memcpy(&parts[j], from + i + j * B, B);
    for (int j = 0; j < 4; ++j) std::memcpy(to + i + j * B, &parts[j], B);
  }
  for (; i + B <= n; i += B) {
    Words part;
    std::memcpy(&part, from + i, B);
    std::memcpy(to + i, &part, B);
  }
  if (i < n) std::memcpy(to + i, from + i, static_cast<size_t>(n - i));
}

// Quotients of numbers below 2^31 by one divisor, as a product and a shift: with 2^bits >= divisor,
// factor = ceil(2^(31 + bits) / divisor) is exact there (Granlund and Montgomery, 1994).
class Quotients {
 public:
  explicit Quotients(int64_t divisor) {
    while ((int64_t{1} << bits_) < divisor) ++bits_;
    factor_ = ((uint64_t{1} << (31 + bits_)) + static_cast<uint64_t>(divisor) - 1) /
              static_cast<uint64_t>(divisor);
  }
  int64_t of(int64_t number) const {
    return static_cast<int64_t>(static_cast<uint64_t>(number) * factor_ >> (31 + bits_));
  }

 private:
  int bits_ = 0;
  uint64_t factor_;
};

template <class T>
void backward_tokens(const MoeCombineBackward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  for (int64_t a = first * c.k; a < last * c.k; ++a) {
    const int64_t row = c.row_of[a];
    const T* d_out = static_cast<const T*>(c.d_out) + a / c.k * c.h;
    T* d_row = static_cast<T*>(c.d_packed) + row * c.h;
    if (!c.weighted) {
      if (row >= 0) std::memcpy(d_row, d_out, static_cast<size_t>(c.h) * sizeof(T));
      continue;
    }
    A dot = 0;
    if (row >= 0) {
      const T* packed = static_cast<const T*>(c.packed) + row * c.h;
      dot = weighted_row(packed, d_out, d_row, static_cast<const A*>(c.probs)[a], c.h);
    }
    static_cast<A*>(c.d_probs)[a] = dot;
  }
}

template <bool streaming>
void gather_rows(const MoeGather c, int64_t first, int64_t last) {  // a copy stays in registers
  const auto row_bytes = static_cast<size_t>(c.row_bytes);
  const auto prob_bytes = static_cast<size_t>(c.prob_bytes);
  const Quotients tokens(c.k > 1 ? c.k : 1);
  const int64_t ahead = 1 + 2048 / (c.row_bytes + 1);  // about 2 KiB
  for (int64_t row = first; row < last; ++row) {
    const int64_t a = c.source[row];
    char* to = c.packed + row * c.row_bytes;
    if (a < 0) {
      std::memset(to, 0, row_bytes);
    } else if constexpr (streaming) {
      const int64_t next = c.source[row + ahead < last ? row + ahead : row];
      const char* coming = c.x + tokens.of(next < 0 ? 0 : next) * c.x_stride;
      stream_row(to, c.x + tokens.of(a) * c.x_stride, coming, c.row_bytes);
    } else {
      copy_row(to, c.x + tokens.of(a) * c.x_stride, c.row_bytes);
    }
    if (prob_bytes == 0) continue;
    char* prob = c.packed_probs + row * c.prob_bytes;
    if (a < 0) std::memset(prob, 0, prob_bytes);
    else std::memcpy(prob, c.probs + a * c.prob_bytes, prob_bytes);
  }
#if defined(__AVX2__)
  if constexpr (streaming) _mm_sfence();  // other threads read what was written past the caches
#endif
}

}  // namespace

void moe_gather(const MoeGather& call, int64_t first, int64_t last) {
  if (call.streaming) gather_rows<true>(call, first, last);
  else gather_rows<false>(call, first, last);
}

void moe_scatter_probs(const void* packed_probs, const int32_t* row_of, void* probs,
                       int64_t assignments, int64_t size) {
  const char* from = static_cast<const char*>(packed_probs);
  char* to = static_cast<char*>(probs);
  for (int64_t a = 0; a < assignments; ++a, to += size) {
    if (row_of[a] < 0) std::memset(to, 0, static_cast<size_t>(size));
    else std::memcpy(to, from + row_of[a] * size, static_cast<size_t>(size));
  }
}

void moe_clear_padding(const int32_t* source, int64_t rows, void* packed, int64_t row_bytes) {
  char* row = static_cast<char*>(packed);
  for (int64_t i = 0; i < rows; ++i, row += row_bytes)
    if (source[i] < 0) std::memset(row, 0, static_cast<size_t>(row_bytes));
}

void moe_combine(const MoeCombine& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (call.weighted) combine_tokens<T, true>(call, first, last);
    else combine_tokens<T, false>(call, first, last);
  });
}

void moe_combine_backward(const MoeCombineBackward& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { backward_tokens<decltype(element)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
