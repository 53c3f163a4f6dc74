// Philox4x32-10, and the decisions of the project's stateless dropout.
//
// Key = (seed low, seed high); counter = (block low, block high, c2, c3), where decision e is
// word e mod 4 of block e div 4. Kept iff word >= floor(p * 2^32); the same words as
// megatron_lite/ops/random.py. Source: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011). Cost: 20 wide 32-bit multiplications for four words.
#pragma once

#include "device.h"

namespace ml {

__device__ inline uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(counter.x) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(counter.z) * 0xCD9E8D57u;
    counter = make_uint4(static_cast<uint32_t>(p1 >> 32) ^ counter.y ^ key.x,
                         static_cast<uint32_t>(p1),
                         static_cast<uint32_t>(p0 >> 32) ^ counter.w ^ key.y,
                         static_cast<uint32_t>(p0));
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}

// What all decisions of one launch share; c2 is the low half of the sample's index.
struct DropoutKey {
  uint32_t seed_low, seed_high, c3, threshold;
  float scale;  // 1 / (1 - p)
};

inline DropoutKey dropout_key(double p, uint32_t c3, uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), c3,
          static_cast<uint32_t>(p * 4294967296.0), static_cast<float>(1.0 / (1.0 - p))};
}

// Words of the decisions 4 * block .. 4 * block + 3.
__device__ inline uint4 dropout_words(const DropoutKey& key, uint64_t block, uint32_t c2) {
  return philox4x32(make_uint4(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                               c2, key.c3),
                    make_uint2(key.seed_low, key.seed_high));
}

__device__ inline uint32_t word_of(uint4 words, unsigned which) {
  return which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
}

// Multiplies by 0 or the scale. N % 4 == 0 needs element % 4 == 0; N == 1 takes any element.
template <int N>
__device__ inline void drop(float (&values)[N], const DropoutKey& key, uint64_t element,
                            uint32_t c2) {
  static_assert(N == 1 || N % 4 == 0, "one decision or whole blocks");
  if constexpr (N == 1) {
    const uint32_t word = word_of(dropout_words(key, element / 4, c2), element % 4);
    values[0] = word >= key.threshold ? values[0] * key.scale : 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 words = dropout_words(key, (element + i) / 4, c2);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        values[i + j] = word_of(words, j) >= key.threshold ? values[i + j] * key.scale : 0.0f;
    }
  }
}

}  // namespace ml
