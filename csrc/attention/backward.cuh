// What the two kernels of attention's backward share: arguments and probabilities.
#pragma once

#include "attention/extras.cuh"
#include "attention/problem.cuh"
#include "attention/tile.cuh"

namespace attention {

template <class T>
struct BackwardArguments {
  const T *q, *k, *v, *dout;
  const float *lse, *delta;
  T *dq, *dk, *dv;
  const int32_t *q_starts, *k_starts;
  Problem problem;
  float scale;
  Extras extras;
};

// The exponent that a row's log-sum-exp gives its scores: probability = 2^(scale2 * score + it).
// A row that sees no key has log-sum-exp -inf and gets probability 0.
__device__ __forceinline__ float exponent_of(float lse) {
  return lse == -INFINITY ? -INFINITY : -lse * kLog2e;
}

struct BackwardPointers {
  const void *q, *k, *v, *dout;
  const float *lse, *delta;
  const int32_t *q_starts, *k_starts;
  Problem problem;
  float scale;
  Extras extras;
  void* stream;

  template <class T>
  BackwardArguments<T> typed(void* dq, void* dk, void* dv) const {
    return {static_cast<const T*>(q),    static_cast<const T*>(k),
            static_cast<const T*>(v),    static_cast<const T*>(dout),
            lse,                         delta,
            static_cast<T*>(dq),         static_cast<T*>(dk),
            static_cast<T*>(dv),         q_starts,
            k_starts,                    problem,
            scale,                       extras};
  }
  bool valid() const {
    const Problem& p = problem;
    return sizes_valid(p, q_starts, k_starts, scale) && rows_aligned(q, p.q) &&
           rows_aligned(k, p.k) && rows_aligned(v, p.v) && rows_aligned(dout, p.dout);
  }
};

}  // namespace attention
