// exp, tanh, sigmoid, square root, reciprocal and the normal distribution (erf) of vectors.
//
// float: polynomials, within 4 units in the last place (reciprocal_of within 2, exact of 1);
//        exp(-inf) = 0, exp of more than 88.7 = inf, NaN stays NaN, results below the least
//        normal number are 0.
//        exp_falling: for softmax, x <= 0; half the instructions, relative error below
//        2e-7 + 1e-7 |x|; below -87 it is 0.
//        normal_of: tail and density within 3e-7 + 1e-7 x^2 relative.
// double: lane by lane through the C library; there for proofs, not for speed. root_of is
//        correctly rounded in both.
#pragma once

#include <cmath>

#include "cpu/vector.h"

namespace ml {
namespace ML_ISA {

// 2^x of a float x within [-126, 128): exponent from the rounded part, polynomial on [-1/2, 1/2].
ML_INLINE Vector<float> exp2_reduced(Vector<float> n, Vector<float> r) {
  Vector<float> p = splat(1.5403530393381609954e-4f);
  p = p * r + 1.3333558146428443423e-3f;
  p = p * r + 9.6181291076284771619e-3f;
  p = p * r + 5.5504108664821579953e-2f;
  p = p * r + 2.4022650695910071233e-1f;
  p = p * r + 6.9314718055994530942e-1f;
  p = p * r + 1.0f;
  const Ints exponent = __builtin_convertvector(n, Ints);
  // Two factors, so that 2^128 and products below 2^-126 do not wrap.
  const Ints half = exponent >> 1;
  const Vector<float> a = reinterpret_cast<Vector<float>>((half + 127) << 23);
  const Vector<float> b = reinterpret_cast<Vector<float>>((exponent - half + 127) << 23);
  return p * a * b;
}

ML_INLINE Vector<float> round_nearest(Vector<float> x) {
  const Vector<float> magic = splat(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}

ML_INLINE Vector<float> exp_of(Vector<float> x) {
  const Vector<float> clamped = minimum<float>(maximum<float>(x, splat(-104.0f)), splat(89.0f));
  const Vector<float> n = round_nearest(clamped * 1.4426950408889634f);
  // r = x / ln 2 - n with ln 2 in two parts, so that the error stays below an ulp.
  const Vector<float> rest = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  const Vector<float> value = exp2_reduced(n, rest * 1.4426950408889634f);
  const Vector<float> low = x < -87.33654f ? splat(0.0f) : value;
  return x == x ? low : x;
}

// Rounding x / ln 2 by adding 1.5 * 2^23 + 127 leaves the biased exponent in the low bits.
ML_INLINE Vector<float> exp_falling(Vector<float> x) {
  const float magic = 12583039.0f;
  const Vector<float> shifted = x * 1.4426950408889634f + magic;
  const Vector<float> r = x * 1.4426950408889634f - (shifted - magic);
  // 2^r on [-1/2, 1/2], fitted to 9e-8 with 1 at 0.
  Vector<float> p = splat(1.3264702e-3f);
  p = p * r + 9.671505e-3f;
  p = p * r + 5.5507336e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.9314698e-1f;
  p = p * r + 1.0f;
  const Words power = reinterpret_cast<Words>(shifted) << 23;
  const Vector<float> value = p * reinterpret_cast<Vector<float>>(power);
  return x < -87.0f ? splat(0.0f) : value;
}

ML_INLINE Vector<double> exp_of(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}
ML_INLINE Vector<double> exp_falling(Vector<double> x) { return exp_of(x); }

// |x| and -|x|; NaN stays NaN.
ML_INLINE Vector<float> magnitude_of(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Words>(x) & 0x7fffffffu);
}
ML_INLINE Vector<float> minus_magnitude_of(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Words>(x) | 0x80000000u);
}
ML_INLINE Vector<double> magnitude_of(Vector<double> x) { return x < 0 ? -x : x; }
ML_INLINE Vector<double> minus_magnitude_of(Vector<double> x) { return x < 0 ? x : -x; }

// 1 / x of normal numbers up to 2^125.
ML_INLINE Vector<float> reciprocal_of(Vector<float> x) {
#if defined(__AVX512F__)
  // A Newton step from 14 bits: divisions of 512 bits take 16 cycles.
  const Vector<float> near =
      reinterpret_cast<Vector<float>>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(x)));
  return near + near * (1.0f - x * near);
#else
  return 1.0f / x;
#endif
}
ML_INLINE Vector<double> reciprocal_of(Vector<double> x) { return 1.0 / x; }

// Of the standard normal distribution: the share of the tail beyond |x|, (1 - erf(|x| / sqrt 2))
// / 2 without cancellation, and the density.
template <class A>
struct Normal {
  Vector<A> tail, density;
};

ML_INLINE Normal<float> normal_of(Vector<float> x) {
  const Vector<float> e = exp_falling(x * x * -0.5f);
  // The tail over e is a polynomial in r = 1 / (|x| + 3), without constant term. Fitted to 5e-8
  // on [0, 14.5]; beyond e is 0.
  const Vector<float> r = reciprocal_of(minimum<float>(splat(15.0f), magnitude_of(x)) + 3.0f);
  Vector<float> p = splat(-441.7207f);
  p = p * r + 840.2736f;
  p = p * r - 586.61578f;
  p = p * r + 157.16643f;
  p = p * r - 12.428054f;
  p = p * r + 9.6399879f;
  p = p * r + 3.0411932f;
  p = p * r + 1.2019171f;
  p = p * r + 0.39886937f;
  return {p * r * e, e * 0.39894228040143268f};
}
ML_INLINE Normal<double> normal_of(Vector<double> x) {
  Normal<double> out;
  for (int i = 0; i < kLanes<double>; ++i) {
    out.tail[i] = 0.5 * std::erfc(std::fabs(x[i]) * 0.70710678118654752440);
    out.density[i] = 0.39894228040143267794 * std::exp(-0.5 * x[i] * x[i]);
  }
  return out;
}

template <class A>
ML_INLINE Vector<A> sigmoid_of(Vector<A> x) {
  // Through exp(-|x|), so that neither tail cancels or overflows.
  const Vector<A> magnitude = x < 0 ? -x : x;
  const Vector<A> e = exp_of(-magnitude);
  const Vector<A> one = splat<A>(1);
  return (x < 0 ? e : one) / (one + e);
}

ML_INLINE Vector<float> tanh_of(Vector<float> x) {
  const Vector<float> magnitude = x < 0.0f ? -x : x;
  const Vector<float> e = exp_of(-2.0f * magnitude);
  const Vector<float> far = (1.0f - e) / (1.0f + e);
  // Odd polynomial where 1 - e cancels.
  const Vector<float> s = x * x;
  Vector<float> p = splat(-5.70498872745e-3f);
  p = p * s + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  const Vector<float> near = x + x * s * p;
  const Vector<float> signed_far = x < 0.0f ? -far : far;
  return magnitude < 0.625f ? near : signed_far;
}
ML_INLINE Vector<double> tanh_of(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

#if defined(__AVX512F__)
ML_INLINE Vector<float> root_of(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
}
ML_INLINE Vector<double> root_of(Vector<double> x) {
  return reinterpret_cast<Vector<double>>(_mm512_sqrt_pd(reinterpret_cast<__m512d>(x)));
}
#elif defined(__AVX2__)
ML_INLINE Vector<float> root_of(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
}
ML_INLINE Vector<double> root_of(Vector<double> x) {
  return reinterpret_cast<Vector<double>>(_mm256_sqrt_pd(reinterpret_cast<__m256d>(x)));
}
#else
template <class V>
ML_INLINE V root_of(V x) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
  return x;
}
#endif

}  // namespace ML_ISA
}  // namespace ml
