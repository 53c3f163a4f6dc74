// What forward and backward share: exponentials, dropout factors, masks of a block, and rows
// out of transposed blocks.
//
// A block holds scores transposed, [keys, kQueries]: lanes are queries, so that maxima and sums
// over keys need no work across lanes. Exponents are to the base 2 in float, to e in double.
#pragma once

#include <cmath>

#include "attention/cpu/attention.h"
#include "cpu/math.h"
#include "matrix/cpu/product.h"
#include "matrix/cpu/scratch.h"

namespace ml {
namespace ML_ISA {

constexpr int64_t kQueries = 64;
constexpr int64_t kKeys = 128;

ML_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ML_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- exponentials ----------------------------------------------------------------------
template <class A>
constexpr A kBase = std::is_same_v<A, double> ? A(1) : A(1.4426950408889634);

// kBase-th power; 0 of -inf, NaN of NaN. float: within 2^-22, 0 below 2^-126 (but at AVX-512).
ML_INLINE Vector<float> power_of(Vector<float> x) {
#if defined(__AVX512F__)
  const Vector<float> clamped = maximum<float>(splat(-160.0f), x);
#else
  const Vector<float> clamped = maximum<float>(splat(-130.0f), x);
#endif
  const Vector<float> n = round_nearest(clamped);
  const Vector<float> r = clamped - n;
  Vector<float> p = splat(1.327647178e-3f);
  p = p * r + 9.675541333e-3f;
  p = p * r + 5.550713274e-2f;
  p = p * r + 2.402211972e-1f;
  p = p * r + 6.931469671e-1f;
  p = p * r + 1.000000072f;
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Vector<float> whole = minimum<float>(splat(127.0f), maximum<float>(splat(-126.0f), n));
  const Ints exponent = __builtin_convertvector(whole, Ints);
  const Vector<float> value = p * reinterpret_cast<Vector<float>>((exponent + 127) << 23);
  return n < -126.0f ? splat(0.0f) : value;
#endif
}
ML_INLINE Vector<double> power_of(Vector<double> x) { return exp_of(x); }

// ---- dropout ---------------------------------------------------------------------------
typedef uint64_t Longs __attribute__((vector_size(kVectorBytes)));
typedef float FewFloats __attribute__((vector_size(kVectorBytes / 2)));
constexpr int64_t kLongs = kVectorBytes / 8;

// Products of the low halves; the high halves of `a` may hold anything.
ML_INLINE Longs multiply_low(Longs a, uint32_t factor) {
#if defined(__AVX512F__)
  return (Longs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__x86_64__)
  return (Longs)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
  return (a & 0xffffffffu) * static_cast<uint64_t>(factor);
#endif
}

// Philox4x32-10 in each lane, see csrc/dropout/philox.cuh; low halves hold the words.
ML_INLINE void philox(Longs (&c)[4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Longs p0 = multiply_low(c[0], 0xD2511F53u), p1 = multiply_low(c[2], 0xCD9E8D57u);
    const Longs c1 = c[1], c3 = c[3];
    c[0] = (p1 >> 32) ^ c1 ^ key0;
    c[1] = p1;
    c[2] = (p0 >> 32) ^ c3 ^ key1;
    c[3] = p0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

struct Dropper {
  uint64_t seed, threshold;
  uint32_t sample, c3;
  double scale;
  int64_t sequence;
  int64_t first;  // decision of query 0 and key 0 of this head and document
};

// 0 or the scale for keys key0 .. key0 + keys of queries query0 .. query0 + queries.
template <class A>
void drop_factors(A* factors, const Dropper& d, int64_t query0, int64_t queries, int64_t key0,
                  int64_t keys) {
  for (int64_t c = 0; c < queries; c += kLongs) {
    Longs start;
    for (int64_t lane = 0; lane < kLongs; ++lane)
      start[lane] = static_cast<uint64_t>(d.first + (query0 + c + lane) * d.sequence + key0);
    const Longs skipped = start & 3u;
    const bool together = d.sequence % 4 == 0;  // all lanes begin at the same word of a block
    for (int64_t j = 0; j < keys + 3; j += 4) {
      const Longs block = (start >> 2) + static_cast<uint64_t>(j / 4);
      Longs words[4] = {block, block >> 32, Longs{} + d.sample, Longs{} + d.c3};
      philox(words, d.seed);
      for (int w = 0; w < 4; ++w) {
        const Longs word = words[w] & 0xffffffffu;
        const Vector<double> kept =
            word >= (Longs{} + d.threshold) ? splat<double>(d.scale) : splat<double>(0);
        if (together) {
          const int64_t row = j + w - static_cast<int64_t>(skipped[0]);
          if (row < 0 || row >= keys) continue;
          A* to = factors + row * kQueries + c;
          if constexpr (std::is_same_v<A, double>) {
            store(to, kept);
          } else {
            const FewFloats few = __builtin_convertvector(kept, FewFloats);
            std::memcpy(to, &few, sizeof few);
          }
          continue;
        }
        for (int64_t lane = 0; lane < kLongs; ++lane) {
          const int64_t row = j + w - static_cast<int64_t>(skipped[lane]);
          if (row >= 0 && row < keys) factors[row * kQueries + c + lane] = A(kept[lane]);
        }
      }
    }
  }
}

ML_INLINE Dropper dropper_of(const AttentionCall& call, const AttentionPiece& piece,
                             int64_t head) {
  const AttentionDecisions& d = call.decisions;
  Dropper dropper{};
  if (call.dropout == 0.0) return dropper;
  dropper.seed = static_cast<uint64_t>(d.seed);
  dropper.threshold = static_cast<uint32_t>(call.dropout * 4294967296.0);
  dropper.sample = static_cast<uint32_t>(call.samples[piece.batch]);
  dropper.c3 = static_cast<uint32_t>(d.c3);
  dropper.scale = call.dtype == DType::fp64 ? 1.0 / (1.0 - call.dropout)
                                            : static_cast<float>(1.0 / (1.0 - call.dropout));
  dropper.sequence = d.sequence;
  dropper.first = ((d.first_head + head) * d.sequence + d.first_query + piece.q_start) *
                      d.sequence + d.first_key + piece.k_start;
  return dropper;
}

// ---- masks -----------------------------------------------------------------------------
template <class A>
ML_INLINE Vector<A> lane_numbers(int64_t first) {
  Vector<A> v;
  for (int i = 0; i < kLanes<A>; ++i) v[i] = static_cast<A>(first + i);
  return v;
}

// Columns low <= c < high of a block's row are visible, as numbers that compare with lanes.
template <class A>
struct VisibleColumns {
  A low, high;
};
template <class A>
ML_INLINE VisibleColumns<A> visible_columns(const AttentionMask& mask, int64_t key,
                                            int64_t query0) {
  if (key >= mask.k_len) return {A(kQueries), A(0)};
  const int64_t low = most(0, least(kQueries, mask.first_query(key) - query0));
  const int64_t high = most(0, least(kQueries, mask.last_query(key) - query0));
  return {static_cast<A>(low), static_cast<A>(high)};
}

// Keys [begin, end), multiples of kUnit inside a document, that queries first .. last see.
struct KeyRange {
  int64_t begin, end;
};
ML_INLINE KeyRange keys_seen(const AttentionMask& mask, int64_t first, int64_t last) {
  return {mask.begin(first) / kUnit * kUnit, padded(mask.end(last))};
}
// Whether every query first .. last sees all keys of [begin, end).
ML_INLINE bool all_seen(const AttentionMask& mask, int64_t first, int64_t last, int64_t begin,
                        int64_t end) {
  return mask.begin(last) <= begin && mask.end(first) >= end;
}

// ---- rows ------------------------------------------------------------------------------
template <class T>
ML_INLINE T* row_at(T* tensor, const AttentionStrides& s, int64_t batch, int64_t row,
                    int64_t head) {
  return tensor + batch * s.batch + row * s.row + head * s.head;
}

// to [queries, dim] = or += the transpose of from [dim, kQueries] times a factor per query.
template <class T, bool kAdd>
void store_transposed(T* to, int64_t row_stride, const Wide<T>* from, const Wide<T>* factors,
                      int64_t queries, int64_t dim) {
  using A = Wide<T>;
  constexpr int kLength = kLanes<A>;
  for (int64_t c = 0; c < queries; c += kLength) {
    const Vector<A> factor = load(factors + c);
    for (int64_t r = 0; r < dim; r += kLength) {
      Vector<A> square[kLength];
      for (int i = 0; i < kLength; ++i) square[i] = load(from + (r + i) * kQueries + c) * factor;
      transpose_square<A>(square);
      const int64_t rows = least(kLength, queries - c), columns = least(kLength, dim - r);
      for (int64_t i = 0; i < rows; ++i) {
        T* const place = to + (c + i) * row_stride + r;
        if constexpr (kAdd) square[i] += load_part(place, columns);
        store_part(place, square[i], columns);
      }
    }
  }
}

// to [rows, columns] = factor * from [rows, from_stride].
template <class T>
void store_scaled(T* to, int64_t row_stride, const Wide<T>* from, int64_t from_stride,
                  Wide<T> factor, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for_each_vector<Wide<T>>(columns, [&](int64_t j, int64_t lanes) {
      store_part(to + i * row_stride + j, load(from + i * from_stride + j) * factor, lanes);
    });
}

#if ML_PAIRED
// 32 values, rounded.
ML_INLINE __m512i narrow_two(Vector<float> low, Vector<float> high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
// Rows a and b of 16 columns as pairs.
ML_INLINE __m512i narrow_pairs(Vector<float> a, Vector<float> b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, narrow_two(a, b));
}
#endif

}  // namespace ML_ISA
}  // namespace ml
