// Element types of the CPU kernels and the code of a type in a kernel's arguments.
//
//   DType            as in csrc/vectors.cuh, with fp64
//   Bf16, Fp16       16 bits in memory, computed with as float
//   Wide<T>          type of the arithmetic
//   with_element(dtype, body)   body(T{}) for the element type of a code
//
// Everything here is constant or forced inline: it may be included at every level.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ml {

enum class DType : int64_t { fp32 = 0, bf16 = 1, fp16 = 2, fp64 = 3 };

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

#define ML_ELEMENT_INLINE static inline __attribute__((always_inline))

ML_ELEMENT_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
ML_ELEMENT_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
ML_ELEMENT_INLINE float fp16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(subnormal));
}
ML_ELEMENT_INLINE uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the least normal: round in steps of 2^-24
    const float scaled = bits_to_float(magnitude) + 0.5f;  // ulp of 0.5 is 2^-24
    return static_cast<uint16_t>(sign | (float_to_bits(scaled) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

ML_ELEMENT_INLINE float widen_element(Bf16 x) {
  return bits_to_float(static_cast<uint32_t>(x.bits) << 16);
}
ML_ELEMENT_INLINE float widen_element(Fp16 x) { return fp16_to_float(x.bits); }
ML_ELEMENT_INLINE float widen_element(float x) { return x; }
ML_ELEMENT_INLINE double widen_element(double x) { return x; }

template <class Body>
ML_ELEMENT_INLINE void with_element(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::fp32: return body(float{});
    case DType::bf16: return body(Bf16{});
    case DType::fp16: return body(Fp16{});
    case DType::fp64: return body(double{});
  }
}

}  // namespace ml
