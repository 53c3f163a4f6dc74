// Products of blocks, the stones that matrix products and attention on the CPU are built of.
//
//   C [m, n]  Wide<T>, row-major      C = A B, or C += A B
//   A [m, k]  left operand: row-major, any row stride
//   B [k, n]  right operand: packed by pack_right or pack_right_transposed
//
// Sizes are padded to multiples of kUnit with zeros: that is what packing does, so products have
// no edges. Operands of bf16 stay bf16 where the level multiplies it, everything else is widened:
//
//   level    T = bf16                                 fp16, fp32   fp64
//   amx      tiles of 16 x 16 x 32, 2 x 2 at a time   fp32 FMA     fp64 FMA
//   bf16     vdpbf16ps, 8 rows x 32 columns           "            "
//   others   fp32 FMA, 8 (4) rows x 2 vectors         "            "
//
// Right operand: bf16 pairs lie as the instructions want them, panels of 16 columns, in a panel
// for each two rows 16 pairs [k / 2][16][2], `stride` being the padded k; widened operands are
// row-major, `stride` being the padded n. right_at() gives the place of a block inside.
//
// Bound by arithmetic: 2 m n k FLOPs; sums over k run in order of k in fixed groups of 2 (pairs)
// or 32 (tiles), so an element of C depends on its row and column only, never on the block.
// Include it in files compiled once per level; hold a MatrixUnit while multiplying.
#pragma once

#include "cpu/vector.h"

#if defined(ML_ISA_BF16) || defined(ML_ISA_AMX)
#define ML_PAIRED 1
#else
#define ML_PAIRED 0
#endif

namespace ml {
namespace ML_ISA {

constexpr int64_t kUnit = 32;
constexpr int64_t kPanel = 16;

ML_INLINE int64_t padded(int64_t size) { return (size + kUnit - 1) / kUnit * kUnit; }

template <class T>
constexpr bool kPaired = ML_PAIRED && std::is_same_v<T, Bf16>;
template <class T>
using Operand = std::conditional_t<kPaired<T>, Bf16, Wide<T>>;

// The processor's tile registers are set up while one lives: one per thread and range of work.
struct MatrixUnit {
  MatrixUnit(const MatrixUnit&) = delete;
#if defined(ML_ISA_AMX)
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~MatrixUnit() { _tile_release(); }
#else
  MatrixUnit() {}
#endif
};

// Elements of memory for a right operand whose sizes are padded.
ML_INLINE int64_t right_size(int64_t k, int64_t n) { return padded(k) * padded(n); }

template <class T>
ML_INLINE int64_t right_stride(int64_t k, int64_t n) {
  return kPaired<T> ? padded(k) : padded(n);
}

// Offset of row k (a multiple of 2) and column n (a multiple of kPanel).
template <class T>
ML_INLINE int64_t right_at(int64_t k, int64_t n, int64_t stride) {
  return kPaired<T> ? n * stride + k * kPanel : k * stride + n;
}

// ---- packing ---------------------------------------------------------------------------
// a0 b0 a1 b1 ... of the first halves of two vectors, then of the second halves.
template <class A>
ML_INLINE void interleave(Vector<A>& a, Vector<A>& b) {
  constexpr int kLength = kLanes<A>;
#if defined(__clang__)
  Vector<A> low, high;
  for (int i = 0; i < kLength; ++i) {
    low[i] = i % 2 == 0 ? a[i / 2] : b[i / 2];
    high[i] = i % 2 == 0 ? a[kLength / 2 + i / 2] : b[kLength / 2 + i / 2];
  }
#else
  using Index = decltype(a < b);
  Index first, second;
  for (int i = 0; i < kLength; ++i) {
    first[i] = i / 2 + (i % 2) * kLength;
    second[i] = first[i] + kLength / 2;
  }
  const Vector<A> low = __builtin_shuffle(a, b, first), high = __builtin_shuffle(a, b, second);
#endif
  a = low;
  b = high;
}

// Transposes kLanes x kLanes elements: interleaving row i with row i + half, log2 times.
template <class A>
ML_INLINE void transpose_square(Vector<A> (&rows)[kLanes<A>]) {
  constexpr int kLength = kLanes<A>;
#pragma GCC unroll 4
  for (int step = 1; step < kLength; step *= 2) {
    Vector<A> next[kLength];
#pragma GCC unroll 8
    for (int i = 0; i < kLength / 2; ++i) {
      Vector<A> a = rows[i], b = rows[i + kLength / 2];
      interleave<A>(a, b);
      next[2 * i] = a;
      next[2 * i + 1] = b;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLength; ++i) rows[i] = next[i];
  }
}

// to [columns, rows] = the transpose of from [rows, columns], widened; the rest of the padded
// `to` is 0.
template <class T>
ML_INLINE void transpose_widened(Wide<T>* to, int64_t to_stride, const T* from,
                                 int64_t row_stride, int64_t rows, int64_t columns) {
  constexpr int kLength = kLanes<Wide<T>>;
  for (int64_t j = 0; j < padded(columns); j += kLength)
    for (int64_t i = 0; i < padded(rows); i += kLength) {
      Vector<Wide<T>> square[kLength];
      for (int r = 0; r < kLength; ++r) {
        const int64_t count = i + r < rows ? columns - j : 0;
        if (count >= kLength) square[r] = load(from + (i + r) * row_stride + j);
        else if (count <= 0) square[r] = splat<Wide<T>>(0);
        else square[r] = load_some(from + (i + r) * row_stride + j, count);
      }
      transpose_square<Wide<T>>(square);
      for (int r = 0; r < kLength; ++r) store(to + (j + r) * to_stride + i, square[r]);
    }
}

#if ML_PAIRED
// Transposes 16 x 16 words of 32 bits.
ML_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// The first `count` (at most 32) elements; the rest is 0.
ML_INLINE __m512i load_halves(const Bf16* from, int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(from);
  if (count <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1u), from);
}

// Rows a and b of 32 columns as pairs: columns 0 .. 15 to `low`, 16 .. 31 to `high`.
ML_INLINE void pair_up(__m512i a, __m512i b, __m512i& low, __m512i& high) {
  const __m512i x = _mm512_unpacklo_epi16(a, b);  // in lanes of 128 bits: columns 0-3 of each 8
  const __m512i y = _mm512_unpackhi_epi16(a, b);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  low = _mm512_permutex2var_epi64(x, first, y);
  high = _mm512_permutex2var_epi64(x, second, y);
}
#endif

// Rows of `from` [m, k]; `to` has padded(m) rows of `to_stride` >= padded(k).
template <class T>
ML_INLINE void pack_left(Operand<T>* to, int64_t to_stride, const T* from, int64_t row_stride,
                         int64_t m, int64_t k) {
  for (int64_t i = 0; i < padded(m); ++i) {
    Operand<T>* row = to + i * to_stride;
    const int64_t count = i < m ? k : 0;
    const T* source = from + i * row_stride;
    if constexpr (std::is_same_v<Operand<T>, T>) {
      if (count > 0) std::memcpy(row, source, count * sizeof(T));
    } else {
      for_each_vector<Wide<T>>(count, [&](int64_t j, int64_t lanes) {
        store_part<Wide<T>>(row + j, load_part(source + j, lanes), lanes);
      });
    }
    if (count < padded(k)) std::memset(row + count, 0, (padded(k) - count) * sizeof(Operand<T>));
  }
}

// The transpose of `from` [k, m].
template <class T>
ML_INLINE void pack_left_transposed(Operand<T>* to, int64_t to_stride, const T* from,
                                    int64_t row_stride, int64_t m, int64_t k) {
#if ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int64_t p = 0; p < padded(k); p += 32)
      for (int64_t i = 0; i < padded(m); i += 32) {
        __m512i left[16], right[16];
        for (int r = 0; r < 16; ++r) {
          const T* row = from + (p + 2 * r) * row_stride + i;
          const __m512i a = load_halves(row, p + 2 * r < k ? m - i : 0);
          const __m512i b = load_halves(row + row_stride, p + 2 * r + 1 < k ? m - i : 0);
          pair_up(a, b, left[r], right[r]);
        }
        transpose_words(left);
        transpose_words(right);
        for (int r = 0; r < 16; ++r) {
          _mm512_storeu_si512(to + (i + r) * to_stride + p, left[r]);
          _mm512_storeu_si512(to + (i + 16 + r) * to_stride + p, right[r]);
        }
      }
    return;
  }
#endif
  if constexpr (!kPaired<T>) transpose_widened(to, to_stride, from, row_stride, k, m);
}

// `from` [k, n]; rows [0, padded(k)) and columns [0, padded(n)) are written.
template <class T>
ML_INLINE void pack_right(Operand<T>* to, int64_t to_stride, const T* from, int64_t row_stride,
                          int64_t k, int64_t n) {
#if ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int64_t j = 0; j < padded(n); j += 32)
      for (int64_t p = 0; p < padded(k); p += 2) {
        const T* row = from + p * row_stride + j;
        const __m512i a = load_halves(row, p < k ? n - j : 0);
        const __m512i b = load_halves(row + row_stride, p + 1 < k ? n - j : 0);
        __m512i low, high;
        pair_up(a, b, low, high);
        _mm512_storeu_si512(to + right_at<T>(p, j, to_stride), low);
        _mm512_storeu_si512(to + right_at<T>(p, j + 16, to_stride), high);
      }
    return;
  }
#endif
  if constexpr (!kPaired<T>) {
    for (int64_t p = 0; p < padded(k); ++p) {
      Operand<T>* row = to + p * to_stride;
      const int64_t count = p < k ? n : 0;
      for_each_vector<Wide<T>>(count, [&](int64_t j, int64_t lanes) {
        store_part<Wide<T>>(row + j, load_part(from + p * row_stride + j, lanes), lanes);
      });
      std::memset(row + count, 0, (padded(n) - count) * sizeof(Operand<T>));
    }
  }
}

// The transpose of `from` [n, k].
template <class T>
ML_INLINE void pack_right_transposed(Operand<T>* to, int64_t to_stride, const T* from,
                                     int64_t row_stride, int64_t k, int64_t n) {
#if ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int64_t j = 0; j < padded(n); j += kPanel)
      for (int64_t p = 0; p < padded(k); p += 32) {
        __m512i rows[16];
        for (int r = 0; r < 16; ++r)
          rows[r] = load_halves(from + (j + r) * row_stride + p, j + r < n ? k - p : 0);
        transpose_words(rows);
        for (int r = 0; r < 16; ++r)
          _mm512_storeu_si512(to + right_at<T>(p + 2 * r, j, to_stride), rows[r]);
      }
    return;
  }
#endif
  if constexpr (!kPaired<T>) transpose_widened(to, to_stride, from, row_stride, n, k);
}

// ---- multiplying -----------------------------------------------------------------------
#if defined(ML_ISA_AMX)
// C tile (i, j) of the 2 x 2 is tmm 2 i + j. The compiler does not see what tiles read and write.
ML_INLINE void multiply_tiles(float* c, int64_t c_stride, const Bf16* a, int64_t a_stride,
                              const Bf16* b, int64_t b_stride, int64_t k, bool add) {
  const int64_t c_bytes = c_stride * 4, a_bytes = a_stride * 2;
  float* const below = c + 16 * c_stride;
  if (add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, below, c_bytes);
    _tile_loadd(3, below + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const Bf16* const next = b + kPanel * b_stride;
  for (int64_t p = 0; p < k; p += 32) {
    _tile_loadd(4, a + p, a_bytes);
    _tile_loadd(6, b + p * kPanel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, next + p * kPanel, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * a_stride + p, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, below, c_bytes);
  _tile_stored(3, below + 16, c_bytes);
}
#elif ML_PAIRED
constexpr int kPairedRows = 8;
ML_INLINE void multiply_pairs(float* c, int64_t c_stride, const Bf16* a, int64_t a_stride,
                              const Bf16* b, int64_t b_stride, int64_t k, bool add) {
  __m512 acc[kPairedRows][2];
  for (int r = 0; r < kPairedRows; ++r)
    for (int j = 0; j < 2; ++j)
      acc[r][j] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * j) : _mm512_setzero_ps();
  const Bf16* const next = b + kPanel * b_stride;
  for (int64_t p = 0; p < k; p += 2) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b + p * kPanel);
    const __m512bh b1 = (__m512bh)_mm512_loadu_si512(next + p * kPanel);
    for (int r = 0; r < kPairedRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * a_stride + p, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
    }
  }
  for (int r = 0; r < kPairedRows; ++r)
    for (int j = 0; j < 2; ++j) _mm512_storeu_ps(c + r * c_stride + 16 * j, acc[r][j]);
}
#endif

constexpr int kWideRows = kVectorBytes == 64 ? 8 : 4;

// kWideRows rows and two vectors of columns in registers.
template <class A>
ML_INLINE void multiply_wide(A* c, int64_t c_stride, const A* a, int64_t a_stride, const A* b,
                             int64_t b_stride, int64_t k, bool add) {
  constexpr int kLength = kLanes<A>;
  Vector<A> acc[kWideRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kWideRows; ++r)
    for (int j = 0; j < 2; ++j)
      acc[r][j] = add ? load(c + r * c_stride + kLength * j) : splat<A>(0);
  for (int64_t p = 0; p < k; ++p) {
    const Vector<A> b0 = load(b + p * b_stride), b1 = load(b + p * b_stride + kLength);
#pragma GCC unroll 8
    for (int r = 0; r < kWideRows; ++r) {
      const A x = a[r * a_stride + p];
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kWideRows; ++r)
    for (int j = 0; j < 2; ++j) store(c + r * c_stride + kLength * j, acc[r][j]);
}

// C [m, n] = or += A B; m, n and k multiples of kUnit.
template <class T>
ML_INLINE void multiply(Wide<T>* c, int64_t c_stride, const Operand<T>* a, int64_t a_stride,
                        const Operand<T>* b, int64_t b_stride, int64_t m, int64_t n, int64_t k,
                        bool add) {
#if defined(ML_ISA_AMX)
  if constexpr (kPaired<T>) {
    asm volatile("" ::: "memory");
    for (int64_t j = 0; j < n; j += 32)
      for (int64_t i = 0; i < m; i += 32)
        multiply_tiles(c + i * c_stride + j, c_stride, a + i * a_stride, a_stride,
                       b + right_at<T>(0, j, b_stride), b_stride, k, add);
    asm volatile("" ::: "memory");
    return;
  }
#elif ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int64_t j = 0; j < n; j += 32)
      for (int64_t i = 0; i < m; i += kPairedRows)
        multiply_pairs(c + i * c_stride + j, c_stride, a + i * a_stride, a_stride,
                       b + right_at<T>(0, j, b_stride), b_stride, k, add);
    return;
  }
#endif
  if constexpr (!kPaired<T>) {
    for (int64_t j = 0; j < n; j += 2 * kLanes<Wide<T>>)
      for (int64_t i = 0; i < m; i += kWideRows)
        multiply_wide(c + i * c_stride + j, c_stride, a + i * a_stride, a_stride, b + j, b_stride,
                      k, add);
  }
}

}  // namespace ML_ISA
}  // namespace ml
