// Options of a launch, its failures and the counters, as the C functions of launch.cpp and
// the environment give them.
#pragma once

#include <cstdint>
#include <string>

namespace sim {

enum class Order { forward, reverse, random };

struct Options {
  Order order = Order::forward;  // of blocks, of warps in a block, of lanes in a warp
  uint64_t seed = 0;             // of the random order
  bool copies_land_late = true;  // asynchronous copies: at the wait, or at the issue
  bool count_accesses = false;   // group accessors' addresses by warp: conflicts and sectors
  bool abort_on_failure = true;  // else the launch returns a code and the report is kept
  int os_threads = 0;            // 0: one per available core
  int64_t first_block = 0;       // run only these blocks, by linear index
  int64_t num_blocks = -1;       // -1: all
};

// One line per counter: name.
#define SIM_COUNTERS(X)                                                            \
  X(launches) X(blocks) X(threads)                                                 \
  X(barriers)          /* completed block barriers */                              \
  X(collectives)       /* completed warp collectives, syncwarp included */         \
  X(mma)               /* per warp */                                              \
  X(ldmatrix)          /* 8x8 matrices */                                          \
  X(ldmatrix_replays)  /* extra passes by bank conflicts */                        \
  X(cp_async) X(cp_async_bytes)                                                    \
  X(global_load_bytes) X(global_store_bytes)  /* accessors and copies */           \
  X(global_load_sectors) X(global_store_sectors)  /* 32-byte sectors per warp */   \
  X(shared_accesses)   /* warp-wide accesses through accessors */                  \
  X(shared_replays)    /* their extra passes by bank conflicts */

struct Counters {
#define SIM_FIELD(name) uint64_t name = 0;
  SIM_COUNTERS(SIM_FIELD)
#undef SIM_FIELD
  void add(const Counters& other) {
#define SIM_ADD(name) name += other.name;
    SIM_COUNTERS(SIM_ADD)
#undef SIM_ADD
  }
};

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace sim
