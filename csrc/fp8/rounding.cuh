// From fp32 to eight bits: E4M3 and E5M2, to nearest even or stochastically; scales from amax.
//
//   Format                constants of one of the two element types
//   encode_nearest        saturates (also infinities), keeps the sign of zero, NaN gives 0x7f
//   encode_stochastic     up iff word < floor(2^32 * discarded fraction); else as above
//   Stream, words_at      one 32-bit word per element, keyed by its logical position
//   scale_from_amax       largest / amax, always finite and not zero; 1 for amax 0, inf, NaN
//   e8m0_from_amax        the least power of two s with amax / s <= largest
//
// A magnitude travels as the bits of |x|: their order is the order of the values, with NaN above
// infinity, so an integer maximum is a maximum that NaN survives, in any order of operations.
// Integer code and correctly rounded operations only: bits do not depend on the compiler.
// Formats: OCP 8-bit floating point 1.0 and OCP microscaling 1.0.
#pragma once

#include "dropout/philox.cuh"
#include "vectors.cuh"

namespace ml::fp8 {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kLargestFloat = 0x7f7fffffu;
constexpr uint8_t kNan = 0x7f;

struct Format {
  int mantissa_bits;
  int subnormal_exponent;  // fp32 exponent field of the least normal value
  uint32_t least_normal;   // fp32 bits
  uint32_t largest;        // fp32 bits of the largest finite value
  uint32_t aligner;        // fp32 bits of a power of two whose unit is the least subnormal
  bool e5m2;
};

constexpr Format kE4M3{3, 121, 0x3c800000u, 0x43e00000u, 0x46800000u, false};
constexpr Format kE5M2{2, 113, 0x38800000u, 0x47600000u, 0x43000000u, true};

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline uint32_t sign_of_code(float x) {
  return (__float_as_uint(x) >> 24) & 0x80u;
}

__device__ inline uint32_t encode_nearest(float x, const Format& format) {
  uint32_t bits = magnitude(x);
  if (bits > kInfinity) return kNan;
  bits = min(bits, format.largest);
  if (bits < format.least_normal) {
    // The addition rounds to nearest even at the unit of the subnormals.
    const float aligned = __fadd_rn(__uint_as_float(bits), __uint_as_float(format.aligner));
    return (__float_as_uint(aligned) - format.aligner) | sign_of_code(x);
  }
  const int shift = 23 - format.mantissa_bits;
  bits -= static_cast<uint32_t>(format.subnormal_exponent - 1) << 23;
  bits += ((bits >> shift) & 1u) + (1u << (shift - 1)) - 1u;
  return (bits >> shift) | sign_of_code(x);
}

__device__ inline uint32_t encode_stochastic(float x, uint32_t word, const Format& format) {
  uint32_t bits = magnitude(x);
  if (bits > kInfinity) return kNan;
  bits = min(bits, format.largest);
  const int exponent = static_cast<int>(bits >> 23);
  const uint32_t significand = (bits & 0x7fffffu) | 0x800000u;  // fp32 subnormals: far below
  const int below = max(format.subnormal_exponent - exponent, 0);
  const int shift = 23 - format.mantissa_bits + below;  // bits that are discarded
  uint32_t kept = 0;
  uint32_t threshold = 0;
  if (shift < 32) {
    kept = significand >> shift;
    threshold = (significand & ((1u << shift) - 1u)) << (32 - shift);
  } else if (shift < 56) {
    threshold = significand >> (shift - 32);
  }
  const int steps = max(exponent - format.subnormal_exponent, 0);
  const uint32_t code = kept + (static_cast<uint32_t>(steps) << format.mantissa_bits);
  return (code + (word < threshold ? 1u : 0u)) | sign_of_code(x);
}

// Four codes, the first in the lowest byte. One instruction for two elements where there is one;
// elsewhere a call: sixteen copies in each kernel would compile for minutes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ inline uint32_t encode_nearest4(float4 x, bool e5m2) {
  const auto kind = e5m2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x.x, x.y), __NV_SATFINITE, kind);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x.z, x.w), __NV_SATFINITE, kind);
  return low | (high << 16);
}
#else
[[maybe_unused]] __attribute__((noinline)) static __device__ uint32_t
encode_nearest4(float4 x, bool e5m2) {
  const Format format = e5m2 ? kE5M2 : kE4M3;
  return encode_nearest(x.x, format) | (encode_nearest(x.y, format) << 8) |
         (encode_nearest(x.z, format) << 16) | (encode_nearest(x.w, format) << 24);
}
#endif

// A call everywhere, as words_at is.
[[maybe_unused]] __attribute__((noinline)) static __device__ uint32_t
encode_stochastic4(float4 x, uint4 words, bool e5m2) {
  const Format format = e5m2 ? kE5M2 : kE4M3;
  return encode_stochastic(x.x, words.x, format) |
         (encode_stochastic(x.y, words.y, format) << 8) |
         (encode_stochastic(x.z, words.z, format) << 16) |
         (encode_stochastic(x.w, words.w, format) << 24);
}

// ---- random words ----------------------------------------------------------------------
// The words of logical elements: word e mod 4 of the block with counter (e div 4, c2, c3).
struct Stream {
  uint2 key;
  uint32_t c2, c3;
  int64_t start;       // logical element of x[0, 0]
  int64_t row_stride;  // logical elements from one row to the next
};

__device__ inline uint4 counter_of(uint64_t block, uint32_t c2, uint32_t c3) {
  return make_uint4(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), c2, c3);
}

// Words of four logical elements, from `element` on.
[[maybe_unused]] __attribute__((noinline)) static __device__ uint4
words_at(uint64_t element, uint2 key, uint32_t c2, uint32_t c3) {
  const uint64_t block = element / 4;
  const unsigned skip = element % 4;
  const uint4 a = philox4x32(counter_of(block, c2, c3), key);
  if (skip == 0) return a;
  const uint4 b = philox4x32(counter_of(block + 1, c2, c3), key);
  if (skip == 1) return make_uint4(a.y, a.z, a.w, b.x);
  if (skip == 2) return make_uint4(a.z, a.w, b.x, b.y);
  return make_uint4(a.w, b.x, b.y, b.z);
}

// ---- scales ----------------------------------------------------------------------------
struct ScaleRule {
  float largest;
  float epsilon;  // amax below it counts as it
  bool power_of_two;
};

// The factor that x is multiplied with.
__device__ inline float scale_from_amax(uint32_t amax, const ScaleRule& rule) {
  if (amax < magnitude(rule.epsilon)) amax = magnitude(rule.epsilon);
  if (amax == 0 || amax >= kInfinity) return 1.0f;
  uint32_t scale = __float_as_uint(__fdiv_rn(rule.largest, __uint_as_float(amax)));
  if (scale >= kInfinity) scale = kLargestFloat;       // amax was tiny
  if (rule.power_of_two) scale &= kInfinity;           // down, so that nothing saturates
  return __uint_as_float(scale);
}

__device__ inline float inverse_scale(float scale) { return __fdiv_rn(1.0f, scale); }

// Exponent byte b of the block scale 2^(b - 127). NaN marks its block (0xff), infinity gives the
// largest scale, 0 and whatever is too small for the range the least.
__device__ inline uint32_t e8m0_from_amax(uint32_t amax, const Format& format) {
  if (amax > kInfinity) return 0xffu;
  if (amax == kInfinity) return 0xfeu;
  const int top = static_cast<int>(format.largest >> 23) - 127;
  const bool above = (amax & 0x7fffffu) > (format.largest & 0x7fffffu);
  const int biased = static_cast<int>(amax >> 23) - top + (above ? 1 : 0);
  return static_cast<uint32_t>(max(biased, 0));
}

// 2^(127 - b), exact at both ends of the range; NaN for the NaN byte.
__device__ inline float factor_from_e8m0(uint32_t byte) {
  if (byte == 0xffu) return __uint_as_float(0x7fc00000u);
  if (byte == 0xfeu) return __uint_as_float(0x00400000u);
  return __uint_as_float((254u - byte) << 23);
}

// ---- maxima ----------------------------------------------------------------------------
template <int kFirst, int kEnd>
__device__ inline uint32_t max_over_lanes(uint32_t value) {
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

}  // namespace ml::fp8
