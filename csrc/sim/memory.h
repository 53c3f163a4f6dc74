// Shared memory, checked accessors and asynchronous copies.
//
// Shared arrays have exactly the declared size (so that AddressSanitizer sees the first byte
// beyond) and start as 0xff, which is NaN in every floating type. The accessors read and write
// as plain C++ does, after a check (alignment, right memory) and a count.
#pragma once

#include "sim/runtime.h"

namespace sim {

template <class T, int... extents>
struct ArrayOf;
template <class T, int n>
struct ArrayOf<T, n> {
  using type = T[n];
};
template <class T, int n, int... rest>
struct ArrayOf<T, n, rest...> {
  using type = typename ArrayOf<T, rest...>::type[n];
};

template <class Array>
inline Array& shared_array(const void* declaration) {
  return *static_cast<Array*>(static_shared(declaration, sizeof(Array), alignof(Array)));
}

}  // namespace sim

#define ML_SHARED(T, name, ...)          \
  static const char name##_declared = 0; \
  auto& name = ::sim::shared_array<typename ::sim::ArrayOf<T, __VA_ARGS__>::type>(&name##_declared)

#define ML_DYN_SMEM(T, name) T* const name = static_cast<T*>(::sim::dynamic_shared())

template <class T>
inline T load_global(const T* address, sim::Site site = sim::Site::here()) {
  sim::note_access(sim::Access::global_load, address, sizeof(T), site);
  return *address;
}
// For data that no thread of this launch writes (the read-only path of the GPU).
template <class T>
inline T load_readonly(const T* address, sim::Site site = sim::Site::here()) {
  return load_global(address, site);
}
// For data that is read or written once (evicted first from the caches of the GPU).
template <class T>
inline T load_streaming(const T* address, sim::Site site = sim::Site::here()) {
  return load_global(address, site);
}
template <class T>
inline void store_global(T* address, const T& value, sim::Site site = sim::Site::here()) {
  sim::note_access(sim::Access::global_store, address, sizeof(T), site);
  *address = value;
}
template <class T>
inline void store_streaming(T* address, const T& value, sim::Site site = sim::Site::here()) {
  store_global(address, value, site);
}
template <class T>
inline T load_shared(const T* address, sim::Site site = sim::Site::here()) {
  sim::note_access(sim::Access::shared_load, address, sizeof(T), site);
  return *address;
}
template <class T>
inline void store_shared(T* address, const T& value, sim::Site site = sim::Site::here()) {
  sim::note_access(sim::Access::shared_store, address, sizeof(T), site);
  *address = value;
}

// The first `valid_bytes` are copied, the rest of the destination becomes 0; with 0 the
// source is not touched.
#define SIM_ASYNC_COPY(name, size)                                                           \
  __attribute__((always_inline)) inline void name(                                           \
      void* shared, const void* global, int valid_bytes = size,                              \
      sim::Site site = sim::Site::here()) {                                                  \
    sim::async_copy(shared, global, size, valid_bytes, site);                                \
  }
SIM_ASYNC_COPY(cp_async4, 4)
SIM_ASYNC_COPY(cp_async8, 8)
SIM_ASYNC_COPY(cp_async16, 16)
#undef SIM_ASYNC_COPY

inline void cp_commit() { sim::async_commit(); }
// Waits until at most N of this thread's committed groups are in flight.
template <int N>
inline void cp_wait() {
  static_assert(N >= 0, "a count of groups");
  sim::async_wait(N);
}
inline void cp_wait_all() { sim::async_wait(-1); }

// Checked in simulation, nothing on a GPU.
#define ML_SIM_ASSERT(condition)                                           \
  do {                                                                     \
    if (!(condition)) ::sim::fail(::sim::Site::here(), "ML_SIM_ASSERT(" #condition ")"); \
  } while (0)
