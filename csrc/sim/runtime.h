// What kernel code, through the other headers of this folder, asks of the runtime.
//
// The runtime (block.cpp, collective.cpp, async_copy.cpp, counters.cpp, launch.cpp) is
// compiled without thread-sanitizer instrumentation: its own bookkeeping is not part of the
// program under test. Accesses it makes on behalf of a kernel are reported to the sanitizer
// by hand, with the kernel's program counter.
#pragma once

#include "sim/types.h"

namespace sim {

// ---- failures ------------------------------------------------------------------------
// Ends the launch with a report that names the kernel, the block and where its threads are.
[[noreturn]] void fail(Site site, const char* what);

// ---- barriers ------------------------------------------------------------------------
// Waits until `expected` threads (0: all of the block) arrive; the number of true predicates.
int barrier(int id, int expected, bool predicate, const char* name, Site site);
void syncwarp(uint32_t mask, Site site);
void fence();

// ---- warp collectives ----------------------------------------------------------------
struct Arrival;

// `arrivals[i]` is set for every lane i in the mask.
struct Collective {
  const char* name;
  bool aligned;  // all 32 lanes must reach the same place in the source
  void (*complete)(uint32_t mask, Arrival* const* arrivals);
};

// What one lane brings to a collective and takes away from it.
struct Arrival {
  const Collective* what;
  uint32_t mask;
  Site site;
  uint64_t bits;        // operand in, result out
  int parameter;        // source lane, delta or lane mask of a shuffle
  int width;            // segment of a shuffle
  const void* operand;  // mma: A fragment; ldmatrix: row address
  const void* operand2; // mma: B fragment
  void* result;         // mma: accumulator; ldmatrix: registers
};

void rendezvous(Arrival& arrival);

extern const Collective shuffle_index, shuffle_up, shuffle_down, shuffle_xor;
extern const Collective ballot, match_any, match_all;
extern const Collective reduce_add, reduce_and, reduce_or, reduce_xor;
extern const Collective reduce_min_signed, reduce_max_signed;
extern const Collective reduce_min_unsigned, reduce_max_unsigned;
extern const Collective mma_bf16, mma_fp16, mma_e4m3;
extern const Collective ldmatrix[2][3];  // [transposed][x1, x2, x4]

// ---- shared memory -------------------------------------------------------------------
void* dynamic_shared();
// The block's array of this declaration; made, and poisoned, when its first thread arrives.
void* static_shared(const void* declaration, size_t bytes, size_t alignment);

// ---- accesses that are checked and counted -------------------------------------------
enum class Access : uint8_t { global_load, global_store, shared_load, shared_store };
void note_access(Access kind, const void* address, size_t bytes, Site site);

// Called out of line so that its return address is a line of the kernel.
void note_ldmatrix_row(const void* row, int num_matrices, Site site);
void async_copy(void* shared, const void* global, int bytes, int valid_bytes, Site site);
void async_commit();
void async_wait(int groups_in_flight);

// ---- launches ------------------------------------------------------------------------
struct Launch {
  const char* kernel;
  Site site;
  dim3 grid;
  dim3 block;
  size_t dynamic_shared_bytes;
  void (*body)(const void* arguments);
  const void* arguments;
};

// Runs every thread of every block; 0, or a non-zero code after a failure was recorded.
int run(const Launch& launch);

}  // namespace sim
