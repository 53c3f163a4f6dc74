// One block of CUDA threads on one OS thread.
//
// A thread (Lane) runs until it must wait; then the next ready lane of its warp runs, then
// the next warp with a ready lane. When no lane is ready and some are left, that is a
// deadlock, and the report says where each of them waits.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/fiber.h"
#include "sim/options.h"
#include "sim/runtime.h"

namespace sim {

class Block;
struct Warp;

struct AsyncCopy {
  char* shared;
  const char* global;
  int bytes;
  int valid_bytes;
  void* pc;  // of the kernel's line
};

struct LoggedAccess {
  Site site;
  Access kind;
  uint32_t bytes;
  const void* address;
};

enum class State : uint8_t { ready, at_barrier, at_collective, exited };

struct Lane : ThreadIndices {
  Block* owner;
  Warp* warp;
  int index;     // in the block
  int lane;      // in the warp
  int position;  // in the warp's running order
  State state;
  Fiber* fiber;  // null until it starts
  // Where it waits.
  Site site;
  const char* waits_in;
  int barrier_id;
  Arrival* arrival;
  // Asynchronous copies that have not landed, and where each committed group ends.
  std::vector<AsyncCopy> copies;
  std::vector<size_t> groups;
  std::vector<LoggedAccess> log;
};

struct Warp {
  int index;
  int position;       // in the block's running order
  uint32_t present;   // lanes that exist
  uint32_t exited;
  uint32_t waiting;   // at a collective
  uint32_t ready;     // by position
  uint8_t lane_at[32];
  Lane* lanes;
  Arrival* arrivals[32];
};

struct Barrier {
  int arrived;
  int expected;
  int trues;
  bool mixed;  // threads arrived at different places
  Site site;
  const char* name;
  uint32_t generation;
  int result[2];
};

struct StaticArray {
  const void* declaration;
  char* memory;
  size_t bytes;
};

// What the threads of one block synchronise on, seen by the race check. Made anew for every
// block, so that no order between blocks comes from it.
struct MaskSync {
  uint32_t generation = 0;  // completed __syncwarp calls with this mask
  uint64_t sync[2] = {};    // by parity of the generation
};

struct BlockSync {
  uint64_t barriers[16][2] = {};  // by barrier, parity of its generation
  std::map<uint32_t, MaskSync> warps[32];
};

// State of a launch that its blocks share.
class LaunchState;

class Block {
 public:
  Block();
  void run(const Launch& launch, const Options& options, LaunchState& state, uint3 index,
           int64_t linear_index);

  // Called on the fibers of the block's lanes.
  void wait_at_barrier(int id, int expected, bool predicate, const char* name, Site site,
                       int& result);
  void wait_at_collective(Arrival& arrival);
  void syncwarp(uint32_t mask, Site site);
  [[noreturn]] void fail(Site site, const std::string& what);
  bool in_shared(const void* address, size_t bytes) const;
  void* dynamic_shared() { return dynamic_; }
  void* static_shared(const void* declaration, size_t bytes, size_t alignment);

  Counters counters;
  const Options* options = nullptr;

 private:
  static void lane_main();
  void reset(uint3 index, int64_t linear_index);
  void set_orders(uint64_t seed);
  void exit_lane(Lane& lane);
  void check_mask(const Arrival& arrival, Lane& lane);
  void make_ready(Lane& lane);
  Lane* next_lane();
  void wait();  // until made ready; a deadlock if nobody is
  void start_or_resume(Fiber& from, Lane& lane, bool forever = false);
  Fiber* take_fiber(Lane& lane);
  std::string where_everybody_is() const;
  std::string describe(const Lane& lane) const;
  void free_shared();
  void fold_logs(Warp& warp);
  void fold_if_all_wait(Warp& warp);

  const Launch* launch_ = nullptr;
  LaunchState* state_ = nullptr;
  BlockIndices indices_;
  int num_threads_ = 0;
  int num_warps_ = 0;
  int live_ = 0;
  uint32_t ready_warps_ = 0;  // by position
  Warp* running_ = nullptr;
  uint8_t warp_at_[32];
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  Barrier barriers_[16];
  Fiber home_;
  std::vector<Fiber*> spare_;
  int num_fibers_ = 0;
  std::vector<Fiber> ring_;  // race check: blocks take fibers in turn, so that two blocks near
  size_t ring_first_ = 0;    // each other are different threads to it
  size_t ring_next_ = 0;
  std::unique_ptr<BlockSync> sync_;
  char* dynamic_ = nullptr;
  std::vector<StaticArray> arrays_;
};

inline Lane& current_lane() { return *static_cast<Lane*>(current); }

class LaunchState {
 public:
  explicit LaunchState(bool abort_on_failure) : abort_on_failure_(abort_on_failure) {}
  void record(const std::string& report);  // the first one counts
  bool failed() const { return __atomic_load_n(&failed_, __ATOMIC_ACQUIRE); }
  uint64_t begin_sync = 0;  // race check: released before the launch, acquired by every thread
  uint64_t end_sync = 0;

 private:
  bool failed_ = false;
  const bool abort_on_failure_;
};

}  // namespace sim
