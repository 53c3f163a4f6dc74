// Device functions of the CUDA math API that a host compiler lacks.
//
// Correctly rounded ones (_rn) are exact here; approximate ones (__expf, fast_exp2, ...) are
// the accurate function, so a GPU differs from them within its documented error.
#pragma once

#include <math.h>

#include <algorithm>

#include "sim/warp.h"

// Conversions of bits.
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(sim::to_bits(x)); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __uint_as_float(unsigned x) { return sim::from_bits<float>(x); }
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline long long __double_as_longlong(double x) {
  return static_cast<long long>(sim::to_bits(x));
}
inline double __longlong_as_double(long long x) {
  return sim::from_bits<double>(static_cast<uint64_t>(x));
}

// Integers.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= ((x >> i) & 1u) << (31 - i);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>((both << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = (selector >> (4 * i)) & 0xfu;
    unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xffu;
    if (pick & 8) byte = (byte & 0x80u) ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

// Arithmetic with stated rounding.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return ::sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
// To integers: saturating, NaN gives 0, as on the device.
inline int sim_to_int(float rounded) {
  if (!(rounded == rounded)) return 0;
  if (rounded >= 2147483648.0f) return 2147483647;
  if (rounded < -2147483648.0f) return -2147483647 - 1;
  return static_cast<int>(rounded);
}
inline int __float2int_rn(float a) { return sim_to_int(::nearbyintf(a)); }
inline int __float2int_rz(float a) { return sim_to_int(::truncf(a)); }
inline int __float2int_rd(float a) { return sim_to_int(::floorf(a)); }
inline int __float2int_ru(float a) { return sim_to_int(::ceilf(a)); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

// Functions. The C library declares some of these names for itself, hence macros.
inline float rsqrtf(float a) { return 1.0f / ::sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / ::sqrt(a); }
namespace sim {
inline float fast_exp(float a) { return ::expf(a); }
inline float fast_log(float a) { return ::logf(a); }
inline float fast_log2f(float a) { return ::log2f(a); }
inline float fast_sin(float a) { return ::sinf(a); }
inline float fast_cos(float a) { return ::cosf(a); }
inline float fast_pow(float a, float b) { return ::powf(a, b); }
inline float fast_divide(float a, float b) { return a / b; }
}  // namespace sim
#define __expf ::sim::fast_exp
#define __logf ::sim::fast_log
#define __log2f ::sim::fast_log2f
#define __sinf ::sim::fast_sin
#define __cosf ::sim::fast_cos
#define __powf ::sim::fast_pow
#define __fdividef ::sim::fast_divide

inline float fast_exp2(float a) { return ::exp2f(a); }
inline float fast_log2(float a) { return ::log2f(a); }
inline float fast_tanh(float a) { return ::tanhf(a); }
inline float fast_rcp(float a) { return 1.0f / a; }

#define SIM_MIN_MAX(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; }      \
  inline T max(T a, T b) { return a < b ? b : a; }
SIM_MIN_MAX(int)
SIM_MIN_MAX(unsigned)
SIM_MIN_MAX(long)
SIM_MIN_MAX(unsigned long)
SIM_MIN_MAX(long long)
SIM_MIN_MAX(unsigned long long)
#undef SIM_MIN_MAX
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }
