// Sum of squares and number of non-finite elements of parts of a flat range.
//
//   x             [n]      float, bf16, fp16 or double
//   squares, bad  [parts]  double; the caller adds them in order
//
// Squares are formed and summed in double, in four running vectors per part: no square of a
// finite float overflows. Elements are looked at a second time only where a part's sum is not
// finite. Memory-bound: n * sizeof(element) bytes. Parts are cut by n alone: the same bits for
// any number of threads.
#include "cpu/vector.h"
#include "optimizer/cpu/update.h"

namespace ml {
namespace ML_ISA {
namespace {

// The lower and the upper half of a vector. The compiler's own conversion takes quarters.
struct Doubles {
  Vector<double> low, high;
};
ML_INLINE Doubles to_doubles(Vector<float> value) {
#if defined(__AVX512F__)
  const __m512 all = reinterpret_cast<__m512>(value);
  const __m256 upper = _mm512_extractf32x8_ps(all, 1);
  return {reinterpret_cast<Vector<double>>(_mm512_cvtps_pd(_mm512_castps512_ps256(all))),
          reinterpret_cast<Vector<double>>(_mm512_cvtps_pd(upper))};
#elif defined(__AVX2__)
  const __m256 all = reinterpret_cast<__m256>(value);
  const __m128 upper = _mm256_extractf128_ps(all, 1);
  return {reinterpret_cast<Vector<double>>(_mm256_cvtps_pd(_mm256_castps256_ps128(all))),
          reinterpret_cast<Vector<double>>(_mm256_cvtps_pd(upper))};
#else
  Doubles out;
  for (int i = 0; i < kLanes<double>; ++i) {
    out.low[i] = value[i];
    out.high[i] = value[i + kLanes<double>];
  }
  return out;
#endif
}

// Adds the squares of a vector of elements to two running sums.
template <class T>
ML_INLINE void add_squares(const T* x, Vector<double>& low, Vector<double>& high) {
  if constexpr (std::is_same_v<T, double>) {
    const Vector<double> a = load(x);
    low += a * a;
  } else {
    const Doubles value = to_doubles(load(x));
    low += value.low * value.low;
    high += value.high * value.high;
  }
}

template <class T>
ML_INLINE double count_bad(const T* x, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto value = widen_element(x[i]);
    bad += value - value == 0 ? 0 : 1;
  }
  return static_cast<double>(bad);
}

template <class T>
void norm_parts(const SquaredNorm& c, int64_t first, int64_t last) {
  constexpr int64_t W = kLanes<Wide<T>>, kSize = sizeof(T);
  constexpr int64_t kAhead = 4096 / kSize;  // the processor itself stops at the end of a page
  for (int64_t part = first; part < last; ++part) {
    const T* x = static_cast<const T*>(c.x) + part * kNormPart;
    const int64_t rest = c.n - part * kNormPart, n = rest < kNormPart ? rest : kNormPart;
    Vector<double> a{}, b{}, d{}, e{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      for (int64_t j = 0; j < 4 * W; j += 64 / kSize) __builtin_prefetch(x + i + kAhead + j);
      add_squares(x + i, a, b);
      add_squares(x + i + W, d, e);
      add_squares(x + i + 2 * W, a, b);
      add_squares(x + i + 3 * W, d, e);
    }
    double tail = 0.0;
    for (; i < n; ++i) {
      const double value = widen_element(x[i]);
      tail += value * value;
    }
    const double sum = ml::ML_ISA::sum<double>((a + b) + (d + e)) + tail;
    c.squares[part] = sum;
    c.bad[part] = sum - sum == 0.0 ? 0.0 : count_bad(x, n);
  }
}

}  // namespace

void squared_norm(const SquaredNorm& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) { norm_parts<decltype(element)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
