// Fibers: a stack of one's own and a switch that saves what the calling convention asks for.
//
// The sanitizers must be told of every switch. Under ThreadSanitizer each fiber is a thread of
// its own, without an order from switching: only barriers and atomics order CUDA threads.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(ML_SIM_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range_pc(void* address, unsigned long size, void* pc);
void __tsan_write_range_pc(void* address, unsigned long size, void* pc);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace sim {

struct Fiber {
  void* stack_pointer = nullptr;  // where it stopped
  char* base = nullptr;           // lowest usable byte; home fibers: filled in by ASan
  size_t size = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;        // ThreadSanitizer's thread
};

// Maps a stack with a guard page below it. `index` staggers the tops of the stacks, which
// would otherwise all fall into the same sets of the cache.
Fiber make_fiber(int index);
// The fiber that runs already: the OS thread itself.
Fiber make_home_fiber();
// Lets `entry` be what runs when the fiber is switched to next; it must not return.
void prepare(Fiber& fiber, void (*entry)());
// Leaves `from` (for good if `forever`) and continues `to`.
void switch_fiber(Fiber& from, Fiber& to, bool forever = false);
// First call of an entry function; `from_home`, if given, learns the bounds of its stack.
void entered_fiber(Fiber* from_home);

// ---- what only ThreadSanitizer wants to know -----------------------------------------
#if defined(ML_SIM_TSAN)
constexpr bool race_check = true;
inline void acquire(void* sync) { __tsan_acquire(sync); }
inline void release(void* sync) { __tsan_release(sync); }
inline void release_as(Fiber& fiber, Fiber& home, void* sync) {
  __tsan_switch_to_fiber(fiber.tsan, 1);
  __tsan_release(sync);
  __tsan_switch_to_fiber(home.tsan, 1);
}
inline void reads(const void* p, size_t n, void* pc) {
  __tsan_read_range_pc(const_cast<void*>(p), n, pc);
}
inline void writes(void* p, size_t n, void* pc) { __tsan_write_range_pc(p, n, pc); }
// Memory that is allocated, filled or freed in here is as new: no access before it counts.
struct Unobserved {
  Unobserved() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Unobserved() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};
#else
constexpr bool race_check = false;
inline void acquire(void*) {}
inline void release(void*) {}
inline void release_as(Fiber&, Fiber&, void*) {}
inline void reads(const void*, size_t, void*) {}
inline void writes(void*, size_t, void*) {}
struct Unobserved {
  Unobserved() {}
  ~Unobserved() {}
};
#endif

}  // namespace sim
