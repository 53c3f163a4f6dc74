// Philox4x32-10 in vectors: words of consecutive counter blocks.
//
// A 64-bit lane holds one 32-bit word of a block, because the widening multiplication takes the
// low halves of 64-bit lanes; what lies above them is never read. Even lanes take the first half
// of the blocks and odd lanes the second, so that pairing words of a lane, then of
// neighbouring vectors inside 128 bits, gives the words of the blocks in order.
// About 60 instructions for 8 (AVX-512), 4 (AVX2) or 2 blocks of four words.
#pragma once

#include "cpu/vector.h"

namespace ml {
namespace ML_ISA {

typedef uint64_t Lanes64 __attribute__((vector_size(kVectorBytes)));
constexpr int kBlocks = kVectorBytes / 8;  // per step
constexpr int kWordsOfStep = 4 * kBlocks;

ML_INLINE Lanes64 multiply_low_halves(Lanes64 a, uint32_t factor) {
  const Lanes64 b = Lanes64{} + factor;
#if defined(__AVX512F__)
  return reinterpret_cast<Lanes64>(_mm512_maskz_mul_epu32(
      0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Lanes64>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Lanes64>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Even (odd) lanes of a and b in turn: a0 b0 a2 b2 ... (a1 b1 a3 b3 ...).
template <int odd>
ML_INLINE Lanes64 pair_lanes(Lanes64 a, Lanes64 b) {
#if defined(__AVX512F__)
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  return reinterpret_cast<Lanes64>(odd ? _mm512_maskz_unpackhi_epi64(0xff, x, y)
                                       : _mm512_maskz_unpacklo_epi64(0xff, x, y));
#elif defined(__AVX2__)
  const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  return reinterpret_cast<Lanes64>(odd ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y));
#else
  Lanes64 out;
  for (int i = 0; i < kBlocks; i += 2) out[i] = a[i + odd], out[i + 1] = b[i + odd];
  return out;
#endif
}

struct PhiloxStream {
  uint32_t seed_low, seed_high, c2, c3;
};

// words[0 .. 4 * blocks), rounded up to a whole step, of the blocks first, first + 1, ...
ML_INLINE void philox_words(const PhiloxStream& stream, uint64_t first, int64_t blocks,
                            uint32_t* words) {
  Lanes64 order;
  for (int i = 0; i < kBlocks; ++i) order[i] = (i & 1) * (kBlocks / 2) + i / 2;
  for (int64_t done = 0; done < blocks; done += kBlocks) {
    const Lanes64 block = order + (first + static_cast<uint64_t>(done));
    Lanes64 c0 = block, c1 = block >> 32;
    Lanes64 c2 = Lanes64{} + stream.c2, c3 = Lanes64{} + stream.c3;
    uint32_t k0 = stream.seed_low, k1 = stream.seed_high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Lanes64 p0 = multiply_low_halves(c0, 0xD2511F53u);
      const Lanes64 p1 = multiply_low_halves(c2, 0xCD9E8D57u);
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c1 = p1;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c3 = p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const Lanes64 low = (c0 & 0xffffffffu) | (c1 << 32), high = (c2 & 0xffffffffu) | (c3 << 32);
    const Lanes64 front = pair_lanes<0>(low, high), back = pair_lanes<1>(low, high);
    std::memcpy(words + 4 * done, &front, sizeof front);
    std::memcpy(words + 4 * done + kWordsOfStep / 2, &back, sizeof back);
  }
}

}  // namespace ML_ISA
}  // namespace ml
