// exp, tanh, erf and sigmoid of vectors.
//
// float: polynomials, within 3 units in the last place;
//        exp(-inf) = 0, exp of more than 88.7 = inf, NaN stays NaN, results below the least
//        normal number are 0.
// double: lane by lane through the C library; there for proofs, not for speed.
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

ML_INLINE Vector<double> exp_of(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
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

}  // namespace ML_ISA
}  // namespace ml
