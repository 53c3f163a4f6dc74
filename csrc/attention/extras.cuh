// Soft cap of the scores and dropout of the probabilities, compiled as kernels of their own
// (template parameter kExtras): calls without them pay nothing.
//
// Soft cap: score = cap * tanh(scale * q k / cap). The kernels keep tanh() itself and take the
// cap as their scale; 1 - tanh^2 closes the chain in the backward.
// Dropout: decision ((first_head + head) * sequence + first_query + i) * sequence + first_key + j
// of the sample, i and j rows of q and k; see dropout/philox.cuh. The log-sum-exp is that of all
// probabilities, so delta = rowsum(dout * out) stays true.
#pragma once

#include "attention/problem.cuh"
#include "dropout/philox.cuh"

namespace attention {

// Launchers take it as an array of int64_t in this order.
struct Decisions {
  int64_t seed, c3, sequence, first_head, first_query, first_key;
};

struct Extras {
  float cap;  // 0: none
  const uint32_t* samples;
  ml::DropoutKey key;  // threshold 0: none
  Decisions decisions;
  bool wanted() const { return cap > 0.0f || key.threshold != 0; }
};

#ifdef MLITE_ATTENTION_TEST_DIMS
template <int kDim>
constexpr bool kExtrasCompiled = kDim == 64;
#else
template <int kDim>
constexpr bool kExtrasCompiled = true;
#endif

inline bool extras_valid(double cap, double probability, const int64_t* decisions,
                         const uint32_t* samples) {
  if (!(cap >= 0.0 && cap < 1e30) || !(probability >= 0.0 && probability < 1.0)) return false;
  return probability == 0.0 || (decisions != nullptr && samples != nullptr);
}

inline Extras make_extras(double cap, double probability, const int64_t* decisions,
                          const uint32_t* samples) {
  Extras extras{};
  extras.cap = static_cast<float>(cap);
  if (probability == 0.0) return extras;
  extras.samples = samples;
  extras.decisions = *reinterpret_cast<const Decisions*>(decisions);
  extras.key = ml::dropout_key(probability, static_cast<uint32_t>(extras.decisions.c3),
                               static_cast<uint64_t>(extras.decisions.seed));
  return extras;
}

// tanh within 2^-22, unlike the approximate instruction's 2^-11: a cap multiplies the error.
__device__ __forceinline__ float exact_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + fast_exp2(x * (2.0f * kLog2e)));
}

template <int kColumns>
__device__ __forceinline__ void cap_scores(float (&scores)[1][kColumns / 8][4], float factor) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[0][n][i] = exact_tanh(scores[0][n][i] * factor);
}

__device__ __forceinline__ int64_t decision_of(const Extras& extras, int64_t head, int64_t query,
                                               int64_t key) {
  const Decisions& d = extras.decisions;
  return ((d.first_head + head) * d.sequence + d.first_query + query) * d.sequence + d.first_key +
         key;
}

// Decisions of a lane's accumulators, bit 4 * n + i for [n][i] of a product with kColumns
// columns: 1 is kept. `first` is the decision of [0][0]; kKeysAreColumns says whether a step
// to the next column is a step of the key or of the query.
template <int kColumns, bool kKeysAreColumns>
__device__ __forceinline__ uint32_t kept(const Extras& extras, uint32_t sample, int64_t first) {
  const int64_t sequence = extras.decisions.sequence;
  const int64_t row_step = kKeysAreColumns ? sequence : 1;
  const int64_t column_step = kKeysAreColumns ? 1 : sequence;
  uint32_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < kColumns / 8; ++n)
    for (int half = 0; half < 2; ++half) {
      uint4 words = make_uint4(0, 0, 0, 0);
      int64_t block = -1;
      for (int i = 0; i < 2; ++i) {
        const int64_t decision = first + half * 8 * row_step + (n * 8 + i) * column_step;
        if (decision / 4 != block) {
          block = decision / 4;
          words = ml::dropout_words(extras.key, static_cast<uint64_t>(block), sample);
        }
        const uint32_t word = ml::word_of(words, static_cast<unsigned>(decision % 4));
        bits |= static_cast<uint32_t>(word >= extras.key.threshold) << (4 * n + 2 * half + i);
      }
    }
  return bits;
}

template <int kColumns>
__device__ __forceinline__ void drop_values(float (&values)[1][kColumns / 8][4], uint32_t bits,
                                            float scale) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[0][n][i] = (bits >> (4 * n + i) & 1) != 0 ? values[0][n][i] * scale : 0.0f;
}

// The same for queries as rows from (head, query, key) on: applied at once.
template <int kColumns>
__device__ __forceinline__ void drop_keys(float (&values)[1][kColumns / 8][4],
                                          const Extras& extras, int64_t batch, int64_t head,
                                          int64_t query, int64_t key) {
  if (extras.key.threshold == 0) return;
  const int64_t first = decision_of(extras, head, query, key);
  const uint32_t bits = kept<kColumns, true>(extras, load_readonly(extras.samples + batch), first);
  drop_values<kColumns>(values, bits, extras.key.scale);
}

}  // namespace attention
