// Vectors of the compiler's own kind, as wide as the level allows, and elements in and out.
//
//   Wide<T>            type of the arithmetic: float for float, bf16, fp16; double for double
//   Vector<A>          kLanes<A> values of A (float or double); + - * / and comparisons work
//   load<T> / store<T>           kLanes<Wide<T>> elements at any alignment
//   load_some<T> / store_some<T> the first `count` of them; the rest reads as 0
//   sum, largest       over the lanes, in a fixed order
//   select(mask, a, b) lane by lane; mask is what a comparison gives
//   for_each_vector(n, body)     body(index, count): whole vectors, then the tail
//
// Include it inside files that are compiled once per level only: everything lives in
// namespace ml::ML_ISA, so that no level's code is linked into another's.
// Rounding to bf16 and fp16 is to nearest even; NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/elements.h"

namespace ml {
namespace ML_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vector = typename VectorOf<A>::type;

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

#define ML_INLINE inline __attribute__((always_inline))

template <class A>
ML_INLINE Vector<A> splat(A value) {
  return Vector<A>{} + value;
}

template <class A, class Mask>
ML_INLINE Vector<A> select(Mask mask, Vector<A> yes, Vector<A> no) {
  return mask ? yes : no;
}

// The second argument where one is NaN; one instruction, which the compiler does not find.
template <class A>
ML_INLINE Vector<A> maximum(Vector<A> a, Vector<A> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>)
    return reinterpret_cast<Vector<A>>(
        _mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<A, float>)
    return reinterpret_cast<Vector<A>>(
        _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#endif
  return a > b ? a : b;
}
template <class A>
ML_INLINE Vector<A> minimum(Vector<A> a, Vector<A> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>)
    return reinterpret_cast<Vector<A>>(
        _mm512_maskz_min_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<A, float>)
    return reinterpret_cast<Vector<A>>(
        _mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#endif
  return a < b ? a : b;
}

template <class A>
ML_INLINE A sum(Vector<A> v) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
template <class A>
ML_INLINE A largest(Vector<A> v) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// 16 bits to 32 and back (values below 2^16). The compiler's own conversions of whole vectors go
// through their halves.
#if defined(__AVX512F__)
ML_INLINE Words to_words(Halves bits) {
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));
}
ML_INLINE Halves to_halves(Words words) {
  return reinterpret_cast<Halves>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words)));
}
#elif defined(__AVX2__)
ML_INLINE Words to_words(Halves bits) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits)));
}
ML_INLINE Halves to_halves(Words words) {
  const __m256i lanes = reinterpret_cast<__m256i>(words);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lanes, lanes), 0x08);
  return reinterpret_cast<Halves>(_mm256_castsi256_si128(packed));
}
#else
ML_INLINE Words to_words(Halves bits) { return __builtin_convertvector(bits, Words); }
ML_INLINE Halves to_halves(Words words) { return __builtin_convertvector(words, Halves); }
#endif

ML_INLINE Vector<float> widen(Halves bits) {
  return reinterpret_cast<Vector<float>>(to_words(bits) << 16);
}
// Round to nearest even; the carry of the addition may run into the exponent, as it should.
#if defined(__AVX512BW__)
ML_INLINE Halves narrow(Vector<float> value) {
  const __m512 number = reinterpret_cast<__m512>(value);
  const __m512i bits = reinterpret_cast<__m512i>(value);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __mmask16 nan = _mm512_cmp_ps_mask(number, number, _CMP_UNORD_Q);
  __m512i sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  sum = _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
  sum = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
  typedef int16_t Indices __attribute__((vector_size(64)));
  const Indices upper = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i packed =
      _mm512_maskz_permutexvar_epi16(0xffffffffu, reinterpret_cast<__m512i>(upper), sum);
  return reinterpret_cast<Halves>(_mm512_castsi512_si256(packed));
}
#else
ML_INLINE Halves narrow(Vector<float> value) {
  const Words bits = reinterpret_cast<Words>(value);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  return to_halves(value == value ? rounded : quiet);
}
#endif

#if defined(__AVX512F__)
ML_INLINE Vector<float> widen_fp16(Halves bits) {
  return reinterpret_cast<Vector<float>>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
}
ML_INLINE Halves narrow_fp16(Vector<float> value) {
  return reinterpret_cast<Halves>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
ML_INLINE Vector<float> widen_fp16(Halves bits) {
  return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
}
ML_INLINE Halves narrow_fp16(Vector<float> value) {
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}
#else
ML_INLINE Vector<float> widen_fp16(Halves bits) {
  Vector<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = fp16_to_float(bits[i]);
  return out;
}
ML_INLINE Halves narrow_fp16(Vector<float> value) {
  Halves out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = float_to_fp16(value[i]);
  return out;
}
#endif

template <class T>
ML_INLINE Vector<Wide<T>> load(const T* address) {
  if constexpr (sizeof(T) == 2) {
    Halves bits;
    std::memcpy(&bits, address, sizeof bits);
    if constexpr (std::is_same_v<T, Bf16>) return widen(bits);
    else return widen_fp16(bits);
  } else {
    Vector<T> value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
}
template <class T>
ML_INLINE void store(T* address, Vector<Wide<T>> value) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const Halves bits = narrow(value);
    std::memcpy(address, &bits, sizeof bits);
  } else if constexpr (std::is_same_v<T, Fp16>) {
    const Halves bits = narrow_fp16(value);
    std::memcpy(address, &bits, sizeof bits);
  } else {
    std::memcpy(address, &value, sizeof value);
  }
}
template <class T>
ML_INLINE Vector<Wide<T>> load_some(const T* address, int64_t count) {
  T elements[kLanes<Wide<T>>] = {};
  for (int64_t i = 0; i < count; ++i) elements[i] = address[i];
  return load(elements);
}
template <class T>
ML_INLINE void store_some(T* address, Vector<Wide<T>> value, int64_t count) {
  T elements[kLanes<Wide<T>>];
  store(elements, value);
  for (int64_t i = 0; i < count; ++i) address[i] = elements[i];
}

// `count` is a constant in the loop over whole vectors, so the choice costs nothing there.
template <class T>
ML_INLINE Vector<Wide<T>> load_part(const T* address, int64_t count) {
  return count == kLanes<Wide<T>> ? load(address) : load_some(address, count);
}
template <class T>
ML_INLINE void store_part(T* address, Vector<Wide<T>> value, int64_t count) {
  if (count == kLanes<Wide<T>>) store(address, value);
  else store_some(address, value, count);
}

// Calls body(first, count) for whole vectors of A, then once for the tail.
template <class A, class Body>
ML_INLINE void for_each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) body(i, static_cast<int64_t>(kLanes<A>));
  if (i < n) body(i, n - i);
}

}  // namespace ML_ISA
}  // namespace ml
