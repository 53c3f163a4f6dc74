// Barriers, shuffles, votes, matches and reductions, under CUDA's names.
//
// Masks are honoured strictly: a lane must be in the mask it passes, every lane of the mask
// must exist, must not have exited and must arrive with the same mask, and a shuffle may only
// read a lane of the mask. __activemask is left out: no correct kernel here needs it.
#pragma once

#include <cstring>
#include <type_traits>

#include "sim/runtime.h"

inline void __syncthreads(sim::Site site = sim::Site::here()) {
  sim::barrier(0, 0, false, "__syncthreads", site);
}
inline int __syncthreads_count(int predicate, sim::Site site = sim::Site::here()) {
  return sim::barrier(0, 0, predicate != 0, "__syncthreads_count", site);
}
inline int __syncthreads_or(int predicate, sim::Site site = sim::Site::here()) {
  return sim::barrier(0, 0, predicate != 0, "__syncthreads_or", site) != 0;
}
inline int __syncthreads_and(int predicate, sim::Site site = sim::Site::here()) {
  return sim::barrier(0, 0, predicate == 0, "__syncthreads_and", site) == 0;
}
// bar.sync id, num_threads: whole warps, 1 <= id <= 15.
inline void named_barrier_sync(int id, int num_threads, sim::Site site = sim::Site::here()) {
  if (id < 1 || id > 15 || num_threads <= 0 || num_threads % 32 != 0)
    sim::fail(site, "named_barrier_sync needs an id of 1..15 and whole warps");
  sim::barrier(id, num_threads, false, "named_barrier_sync", site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, sim::Site site = sim::Site::here()) {
  sim::syncwarp(mask, site);
}
inline void __threadfence() { sim::fence(); }
inline void __threadfence_block() { sim::fence(); }

namespace sim {

template <class T, class... Allowed>
constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);

template <class T>
constexpr bool can_shuffle =
    one_of<T, int, unsigned, long, unsigned long, long long, unsigned long long, float, double,
           __half, __half2, __nv_bfloat16, __nv_bfloat162>;

template <class T>
inline uint64_t to_bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

inline uint64_t meet(const Collective& what, uint32_t mask, uint64_t bits, Site site,
                     int parameter = 0, int width = 32) {
  Arrival arrival{&what, mask, site, bits, parameter, width, nullptr, nullptr, nullptr};
  rendezvous(arrival);
  return arrival.bits;
}

template <class T>
inline T shuffle(const Collective& what, unsigned mask, T value, int parameter, int width,
                 Site site) {
  static_assert(can_shuffle<T>, "CUDA has no shuffle for this type");
  return from_bits<T>(meet(what, mask, to_bits(value), site, parameter, width));
}

}  // namespace sim

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     sim::Site site = sim::Site::here()) {
  return sim::shuffle(sim::shuffle_index, mask, value, source, width, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        sim::Site site = sim::Site::here()) {
  return sim::shuffle(sim::shuffle_up, mask, value, static_cast<int>(delta), width, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          sim::Site site = sim::Site::here()) {
  return sim::shuffle(sim::shuffle_down, mask, value, static_cast<int>(delta), width, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         sim::Site site = sim::Site::here()) {
  return sim::shuffle(sim::shuffle_xor, mask, value, lane_mask, width, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, sim::Site site = sim::Site::here()) {
  return static_cast<unsigned>(sim::meet(sim::ballot, mask, predicate != 0, site));
}
inline int __any_sync(unsigned mask, int predicate, sim::Site site = sim::Site::here()) {
  return sim::meet(sim::ballot, mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, sim::Site site = sim::Site::here()) {
  return sim::meet(sim::ballot, mask, predicate != 0, site) == mask;
}

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, sim::Site site = sim::Site::here()) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA has no match for this type");
  return static_cast<unsigned>(sim::meet(sim::match_any, mask, sim::to_bits(value), site));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all,
                                 sim::Site site = sim::Site::here()) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA has no match for this type");
  const auto equal =
      static_cast<unsigned>(sim::meet(sim::match_all, mask, sim::to_bits(value), site));
  *all = equal != 0;
  return equal;
}

#define SIM_REDUCE(name, type, what)                                                           \
  inline type name(unsigned mask, type value, sim::Site site = sim::Site::here()) {            \
    return static_cast<type>(sim::meet(sim::what, mask, static_cast<uint32_t>(value), site)); \
  }
SIM_REDUCE(__reduce_add_sync, unsigned, reduce_add)
SIM_REDUCE(__reduce_add_sync, int, reduce_add)
SIM_REDUCE(__reduce_min_sync, unsigned, reduce_min_unsigned)
SIM_REDUCE(__reduce_min_sync, int, reduce_min_signed)
SIM_REDUCE(__reduce_max_sync, unsigned, reduce_max_unsigned)
SIM_REDUCE(__reduce_max_sync, int, reduce_max_signed)
SIM_REDUCE(__reduce_and_sync, unsigned, reduce_and)
SIM_REDUCE(__reduce_or_sync, unsigned, reduce_or)
SIM_REDUCE(__reduce_xor_sync, unsigned, reduce_xor)
#undef SIM_REDUCE
