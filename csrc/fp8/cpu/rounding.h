// Vectors of fp32 to eight bits and back, scales from amax, and the random words of rounding.
//
//   encode_nearest, encode_stochastic   codes in the low bytes of 32-bit lanes
//   decode                              their values
//   to_bytes / from_bytes               32-bit lanes to bytes and back
//   scale_from_amax, e8m0_from_amax, factor_from_e8m0, value_of_e8m0
//   random_words                        words of consecutive logical elements
//
// The same definitions as csrc/fp8/rounding.cuh: magnitudes are integers, operations correctly
// rounded, so the bits are those of the CUDA kernels at every level. No product is fused with a
// sum (-ffp-contract=off of this operation). Include in files compiled per level only.
#pragma once

#include "cpu/vector.h"
#include "dropout/cpu/philox.h"
#include "fp8/cpu/fp8.h"

namespace ml {
namespace ML_ISA {

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kLargestFloat = 0x7f7fffffu;
constexpr uint32_t kQuietNan = 0x7fc00000u;
constexpr int kWordLanes = kLanes<float>;

template <bool E5m2>
struct Fp8Format {
  static constexpr int kMantissaBits = E5m2 ? 2 : 3;
  static constexpr uint32_t kSubnormalExponent = E5m2 ? 113 : 121;
  static constexpr uint32_t kLeastNormal = kSubnormalExponent << 23;
  static constexpr uint32_t kLargest = E5m2 ? 0x47600000u : 0x43e00000u;
  static constexpr uint32_t kAligner = E5m2 ? 0x43000000u : 0x46800000u;
};

ML_INLINE Words splat_words(uint32_t value) { return Words{} + value; }
ML_INLINE Words smaller(Words a, Words b) { return a < b ? a : b; }
ML_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
ML_INLINE Words bits_of(Vector<float> x) { return reinterpret_cast<Words>(x); }
ML_INLINE Words magnitude_of(Vector<float> x) { return bits_of(x) & 0x7fffffffu; }

ML_INLINE uint32_t largest_word(Words v) {
  uint32_t lanes[kWordLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kWordLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// ---- codes -----------------------------------------------------------------------------
ML_INLINE Words with_sign_and_nan(Words code, Words bits) {
  const Words signed_code = code | ((bits >> 24) & 0x80u);
  return (bits & 0x7fffffffu) > kInfinity ? splat_words(0x7fu) : signed_code;
}

template <bool E5m2>
ML_INLINE Words encode_nearest(Vector<float> x) {
  using F = Fp8Format<E5m2>;
  const Words bits = bits_of(x), value = smaller(bits & 0x7fffffffu, splat_words(F::kLargest));
  // The addition rounds to nearest even at the unit of the subnormals.
  const Vector<float> unit = reinterpret_cast<Vector<float>>(splat_words(F::kAligner));
  const Words below = bits_of(reinterpret_cast<Vector<float>>(value) + unit) - F::kAligner;
  constexpr int kShift = 23 - F::kMantissaBits;
  const Words rebased = value - ((F::kSubnormalExponent - 1) << 23);
  const Words normal =
      (rebased + ((rebased >> kShift) & 1u) + ((1u << (kShift - 1)) - 1u)) >> kShift;
  return with_sign_and_nan(value < F::kLeastNormal ? below : normal, bits);
}

// Up iff the word is below 2^32 times the discarded fraction.
template <bool E5m2>
ML_INLINE Words encode_stochastic(Vector<float> x, Words word) {
  using F = Fp8Format<E5m2>;
  const Words bits = bits_of(x), value = smaller(bits & 0x7fffffffu, splat_words(F::kLargest));
  const Words exponent = value >> 23, least = splat_words(F::kSubnormalExponent);
  const Words significand = (value & 0x7fffffu) | 0x800000u;  // fp32 subnormals: far below
  const Words under = exponent < least ? least - exponent : Words{};
  const Words shift = under + (23 - F::kMantissaBits);  // bits that are discarded
  const Words most = splat_words(31u);
  const Words kept = significand >> smaller(shift, most);  // 24 bits: nothing from 24 on
  const Words up = splat_words(32u) - smaller(shift, splat_words(32u));
  const Words down = smaller(shift - smaller(shift, splat_words(32u)), most);
  const Words threshold = shift <= 32u ? significand << up : significand >> down;
  const Words steps = exponent > least ? exponent - least : Words{};
  const Words one = splat_words(1u);
  const Words code = kept + (steps << F::kMantissaBits) + (word < threshold ? one : Words{});
  return with_sign_and_nan(code, bits);
}

template <bool E5m2>
ML_INLINE Vector<float> decode(Words code) {
  using F = Fp8Format<E5m2>;
  constexpr int kShift = 23 - F::kMantissaBits;
  const Words value = code & 0x7fu;
  const Vector<float> least = reinterpret_cast<Vector<float>>(splat_words(F::kLeastNormal));
  const Words raised = (value << kShift) + F::kLeastNormal;
  const Words subnormal = bits_of(reinterpret_cast<Vector<float>>(raised) - least);
  Words out = value < (1u << F::kMantissaBits) ? subnormal : raised - (1u << 23);
  if (E5m2) out = value == 0x7cu ? splat_words(kInfinity) : out;
  out = value > (E5m2 ? 0x7cu : 0x7eu) ? splat_words(kQuietNan) : out;
  return reinterpret_cast<Vector<float>>(out | ((code & 0x80u) << 24));
}

#if defined(__AVX512F__)
ML_INLINE void to_bytes(uint8_t* out, Words words) {
  const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(words));
  std::memcpy(out, &bytes, 16);
}
ML_INLINE Words from_bytes(const uint8_t* in) {
  __m128i bytes;
  std::memcpy(&bytes, in, 16);
  return reinterpret_cast<Words>(_mm512_cvtepu8_epi32(bytes));
}
#elif defined(__AVX2__)
ML_INLINE void to_bytes(uint8_t* out, Words words) {
  const __m256i all = reinterpret_cast<__m256i>(words);
  const __m128i pairs =
      _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i bytes = _mm_packus_epi16(pairs, pairs);
  std::memcpy(out, &bytes, 8);
}
ML_INLINE Words from_bytes(const uint8_t* in) {
  __m128i bytes = _mm_setzero_si128();
  std::memcpy(&bytes, in, 8);
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(bytes));
}
#else
ML_INLINE void to_bytes(uint8_t* out, Words words) {
  for (int i = 0; i < kWordLanes; ++i) out[i] = static_cast<uint8_t>(words[i]);
}
ML_INLINE Words from_bytes(const uint8_t* in) {
  Words words;
  for (int i = 0; i < kWordLanes; ++i) words[i] = in[i];
  return words;
}
#endif

// ---- scales ----------------------------------------------------------------------------
// The factor that x is multiplied with; amax as bits of a magnitude.
ML_INLINE float scale_from_amax(uint32_t amax, const Fp8ScaleRule& rule) {
  const uint32_t least = float_to_bits(rule.epsilon) & 0x7fffffffu;
  if (amax < least) amax = least;
  if (amax == 0 || amax >= kInfinity) return 1.0f;
  uint32_t scale = float_to_bits(rule.largest / bits_to_float(amax));
  if (scale >= kInfinity) scale = kLargestFloat;  // amax was tiny
  if (rule.power_of_two) scale &= kInfinity;      // down, so that nothing saturates
  return bits_to_float(scale);
}

// Exponent byte b of the block scale 2^(b - 127): NaN marks its block, infinity gives the
// largest scale.
template <bool E5m2>
ML_INLINE uint8_t e8m0_from_amax(uint32_t amax) {
  constexpr uint32_t kLargest = Fp8Format<E5m2>::kLargest;
  if (amax > kInfinity) return 0xff;
  if (amax == kInfinity) return 0xfe;
  constexpr int kTop = static_cast<int>(kLargest >> 23) - 127;
  const int above = (amax & 0x7fffffu) > (kLargest & 0x7fffffu) ? 1 : 0;
  const int biased = static_cast<int>(amax >> 23) - kTop + above;
  return static_cast<uint8_t>(biased > 0 ? biased : 0);
}

// 2^(127 - b), exact at both ends of the range; NaN for the NaN byte.
ML_INLINE float factor_from_e8m0(uint32_t byte) {
  if (byte == 0xffu) return bits_to_float(kQuietNan);
  return bits_to_float(byte == 0xfeu ? 0x00400000u : (254u - byte) << 23);
}
ML_INLINE float value_of_e8m0(uint32_t byte) {
  if (byte == 0xffu) return bits_to_float(kQuietNan);
  return bits_to_float(byte == 0 ? 0x00400000u : byte << 23);
}

// ---- random words ----------------------------------------------------------------------
// Words of elements [element, element + n), n <= 128: word e mod 4 of the block with counter
// (e div 4, c2, c3). `out` has room for kWordRoom words; returns where they start.
constexpr int64_t kWordRoom = 4 * (33 + kBlocks - 1);

ML_INLINE const uint32_t* random_words(uint64_t element, int64_t n, const Fp8Quantize& call,
                                       uint32_t* out) {
  const auto skip = static_cast<int64_t>(element % 4);
  const PhiloxStream stream{static_cast<uint32_t>(call.seed),
                            static_cast<uint32_t>(call.seed >> 32), call.c2, call.c3};
  philox_words(stream, element / 4, (skip + n + 3) / 4, out);
  return out + skip;
}

}  // namespace ML_ISA
}  // namespace ml
