// Atomics under CUDA's names: relaxed, so they order nothing else (neither does a GPU's).
#pragma once

#include <cstring>

#include "sim/warp.h"

namespace sim {

// Applies `change` to the value at `address` until no other OS thread interferes; the old value.
template <class Word, class T, class Change>
inline T atomic_update(T* address, Change change) {
  static_assert(sizeof(Word) == sizeof(T), "the word carries the value");
  auto* word = reinterpret_cast<Word*>(address);
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    const T old = from_bits<T>(seen);
    const Word next = static_cast<Word>(to_bits<T>(change(old)));
    if (__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return old;
  }
}

}  // namespace sim

#define SIM_INTEGER_ATOMICS(T)                                                                 \
  inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }         \
  inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }       \
  inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }         \
  inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }           \
  inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }         \
  inline T atomicMin(T* p, T v) {                                                              \
    return sim::atomic_update<T>(p, [v](T old) { return v < old ? v : old; });                 \
  }                                                                                            \
  inline T atomicMax(T* p, T v) {                                                              \
    return sim::atomic_update<T>(p, [v](T old) { return v > old ? v : old; });                 \
  }                                                                                            \
  inline T atomicCAS(T* p, T compare, T v) {                                                   \
    __atomic_compare_exchange_n(p, &compare, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);    \
    return compare;                                                                            \
  }
SIM_INTEGER_ATOMICS(int)
SIM_INTEGER_ATOMICS(unsigned)
SIM_INTEGER_ATOMICS(unsigned long long)
#undef SIM_INTEGER_ATOMICS

inline int atomicSub(int* p, int v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
inline unsigned atomicSub(unsigned* p, unsigned v) {
  return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED);
}
inline float atomicAdd(float* p, float v) {
  return sim::atomic_update<uint32_t>(p, [v](float old) { return old + v; });
}
inline double atomicAdd(double* p, double v) {
  return sim::atomic_update<uint64_t>(p, [v](double old) { return old + v; });
}
inline float atomicExch(float* p, float v) {
  return sim::atomic_update<uint32_t>(p, [v](float) { return v; });
}
// The last block to arrive of `limit + 1` sees `limit`; the counter wraps to 0.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return sim::atomic_update<uint32_t>(p, [limit](unsigned old) {
    return old >= limit ? 0u : old + 1u;
  });
}
