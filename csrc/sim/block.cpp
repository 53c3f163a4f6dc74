// Scheduling of a block's lanes: who runs next, barriers, exits, deadlock reports.
#include "sim/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {

__thread ThreadIndices* current __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kRaceFibers = 2048;  // per OS thread; ThreadSanitizer knows 8128 in all

std::string at(Site site) {
  std::string file = site.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line);
}

std::string triple(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

void shuffle_positions(uint8_t* order, int n, Order kind, uint64_t seed) {
  for (int i = 0; i < n; ++i)
    order[i] = static_cast<uint8_t>(kind == Order::reverse ? n - 1 - i : i);
  if (kind != Order::random) return;
  for (int i = n - 1; i > 0; --i) {
    seed = mix(seed);
    std::swap(order[i], order[seed % static_cast<uint64_t>(i + 1)]);
  }
}

}  // namespace

Block::Block() : lanes_(kMaxThreads), warps_(kMaxThreads / 32) {
  if (race_check) ring_.reserve(kRaceFibers);
}

void Block::run(const Launch& launch, const Options& launch_options, LaunchState& state,
                uint3 index, int64_t linear_index) {
  launch_ = &launch;
  state_ = &state;
  options = &launch_options;
  home_ = make_home_fiber();
  {
    Unobserved unobserved;
    reset(index, linear_index);
  }
  ThreadIndices* const outside = current;
  start_or_resume(home_, *next_lane());
  current = outside;
  Unobserved unobserved;
  free_shared();
  for (int i = 0; i < num_threads_; ++i) {
    Lane& lane = lanes_[i];
    // A failed launch leaves threads behind; what they did is before what the host does next.
    if (lane.fiber != nullptr && lane.state != State::exited)
      release_as(*lane.fiber, home_, &state.end_sync);
    lane.copies.clear();
    lane.groups.clear();
    lane.log.clear();
    if (!race_check && lane.fiber != nullptr) spare_.push_back(lane.fiber);  // after a failure
    lane.fiber = nullptr;
  }
  sync_.reset();
  counters.blocks += 1;
  counters.threads += static_cast<uint64_t>(num_threads_);
}

void Block::reset(uint3 index, int64_t linear_index) {
  const dim3 size = launch_->block;
  indices_ = {index, size, launch_->grid};
  num_threads_ = static_cast<int>(size.x * size.y * size.z);
  num_warps_ = (num_threads_ + 31) / 32;
  live_ = num_threads_;
  running_ = nullptr;
  for (Barrier& barrier : barriers_) barrier = Barrier{};
  for (int w = 0; w < num_warps_; ++w) {
    Warp& warp = warps_[w];
    warp = Warp{};
    warp.index = w;
    warp.lanes = &lanes_[w * 32];
    const int present = std::min(32, num_threads_ - w * 32);
    warp.present = present == 32 ? 0xffffffffu : (1u << present) - 1;
  }
  for (int i = 0; i < num_threads_; ++i) {
    Lane& lane = lanes_[i];
    const auto flat = static_cast<unsigned>(i);
    lane.thread = {flat % size.x, flat / size.x % size.y, flat / (size.x * size.y)};
    lane.block = &indices_;
    lane.owner = this;
    lane.warp = &warps_[i / 32];
    lane.index = i;
    lane.lane = i % 32;
    lane.state = State::ready;
    lane.fiber = nullptr;
    lane.arrival = nullptr;
  }
  set_orders(mix(options->seed + static_cast<uint64_t>(linear_index)));
  ready_warps_ = 0;
  for (int i = 0; i < num_threads_; ++i) make_ready(lanes_[i]);

  const auto lanes_in_use = static_cast<size_t>(num_threads_);
  const size_t bytes = launch_->dynamic_shared_bytes;
  void* memory = nullptr;
  if (bytes != 0 && posix_memalign(&memory, 128, bytes) != 0) std::abort();
  if (bytes != 0) std::memset(memory, 0xff, bytes);
  dynamic_ = static_cast<char*>(memory);
  if (race_check) {
    sync_ = std::make_unique<BlockSync>();
    // Here, not on first use: a fiber inherits the order of events from its creator.
    while (ring_.size() < std::min(kRaceFibers, ring_next_ + lanes_in_use))
      ring_.push_back(make_fiber(num_fibers_++));
    ring_first_ = ring_next_;
    ring_next_ = (ring_next_ + lanes_in_use) % kRaceFibers;
  }
}

// Positions say in which order ready warps, and ready lanes of a warp, run.
void Block::set_orders(uint64_t seed) {
  shuffle_positions(warp_at_, num_warps_, options->order, seed);
  for (int p = 0; p < num_warps_; ++p) warps_[warp_at_[p]].position = p;
  for (int w = 0; w < num_warps_; ++w) {
    Warp& warp = warps_[w];
    const int lanes = std::min(32, num_threads_ - w * 32);
    shuffle_positions(warp.lane_at, lanes, options->order, mix(seed + 1 + w));
    for (int p = 0; p < lanes; ++p) warp.lanes[warp.lane_at[p]].position = p;
  }
}

void Block::make_ready(Lane& lane) {
  lane.state = State::ready;
  lane.warp->ready |= 1u << lane.position;
  ready_warps_ |= 1u << lane.warp->position;
}

Lane* Block::next_lane() {
  Warp* warp = running_;
  if (warp == nullptr || warp->ready == 0) {
    if (ready_warps_ == 0) return nullptr;
    warp = running_ = &warps_[warp_at_[__builtin_ctz(ready_warps_)]];
  }
  const int position = __builtin_ctz(warp->ready);
  warp->ready &= warp->ready - 1;
  if (warp->ready == 0) ready_warps_ &= ~(1u << warp->position);
  return &warp->lanes[warp->lane_at[position]];
}

Fiber* Block::take_fiber(Lane& lane) {
  // A lane keeps its stack: nothing is shared that the kernel did not share.
  if (race_check) return &ring_[(ring_first_ + static_cast<size_t>(lane.index)) % kRaceFibers];
  if (spare_.empty()) spare_.push_back(new Fiber(make_fiber(num_fibers_++)));
  Fiber* fiber = spare_.back();
  spare_.pop_back();
  return fiber;
}

void Block::start_or_resume(Fiber& from, Lane& lane, bool forever) {
  if (lane.fiber == nullptr) {
    lane.fiber = take_fiber(lane);
    prepare(*lane.fiber, &Block::lane_main);
  }
  current = &lane;
  switch_fiber(from, *lane.fiber, forever);
}

// Runs lanes on one stack, one after the other, until a lane must be resumed elsewhere.
void Block::lane_main() {
  Block& block = *current_lane().owner;
  entered_fiber(&block.home_);
  for (;;) {
    Lane& lane = current_lane();
    acquire(&block.state_->begin_sync);
    block.launch_->body(block.launch_->arguments);
    async_wait(-1);  // what nobody waited for lands as well: the race check must see it
    release(&block.state_->end_sync);
    block.exit_lane(lane);
    Lane* next = block.next_lane();
    if (next != nullptr && next->fiber == nullptr && !race_check) {
      next->fiber = lane.fiber;
      lane.fiber = nullptr;
      current = next;
      continue;
    }
    if (next == nullptr && block.live_ > 0)
      block.fail(block.launch_->site, "deadlock: no thread of the block can go on");
    Fiber* mine = lane.fiber;
    if (!race_check) {
      block.spare_.push_back(mine);
      lane.fiber = nullptr;
    }
    if (next == nullptr)
      switch_fiber(*mine, block.home_, true);
    else
      block.start_or_resume(*mine, *next, true);
    __builtin_unreachable();
  }
}

void Block::exit_lane(Lane& lane) {
  Warp& warp = *lane.warp;
  lane.state = State::exited;
  warp.exited |= 1u << lane.lane;
  live_ -= 1;
  for (uint32_t rest = warp.waiting; rest != 0; rest &= rest - 1) {
    const Lane& other = warp.lanes[__builtin_ctz(rest)];
    if (other.arrival->mask >> lane.lane & 1)
      fail(other.site, "a thread exits while " + std::string(other.waits_in) +
                           " waits for it (thread " + triple(lane.thread) + ")");
  }
  if (options->count_accesses) fold_if_all_wait(warp);
}

void Block::wait() {
  Lane& me = current_lane();
  Lane* next = next_lane();
  if (next == nullptr) fail(me.site, "deadlock: no thread of the block can go on");
  start_or_resume(*me.fiber, *next);
}

void Block::wait_at_barrier(int id, int expected, bool predicate, const char* name, Site site,
                            int& result) {
  Lane& me = current_lane();
  Barrier& barrier = barriers_[id];
  const uint32_t phase = barrier.generation & 1;
  me.state = State::at_barrier;
  me.site = site;
  me.waits_in = name;
  me.barrier_id = id;
  if (race_check) release(&sync_->barriers[id][phase]);
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.name = name;
    barrier.expected = expected == 0 ? num_threads_ : expected;
  } else if (id == 0 && !(site == barrier.site)) {
    barrier.mixed = true;
  } else if (id != 0 && barrier.expected != expected) {
    fail(site, "threads disagree on how many meet at this named barrier");
  }
  barrier.arrived += 1;
  barrier.trues += predicate;
  if (options->count_accesses) fold_if_all_wait(*me.warp);
  if (barrier.arrived < barrier.expected) {
    wait();
  } else {
    if (barrier.mixed)
      fail(site, "divergent barrier: threads meet in __syncthreads at different lines");
    counters.barriers += 1;
    barrier.result[phase] = barrier.trues;
    barrier.arrived = barrier.trues = 0;
    barrier.generation += 1;
    if (id == 0 && options->order == Order::random)
      set_orders(mix(options->seed + barrier.generation) ^ indices_.block.x);
    for (int i = 0; i < num_threads_; ++i) {
      Lane& lane = lanes_[i];
      const bool waits_here = lane.state == State::at_barrier && lane.barrier_id == id;
      if (waits_here && &lane != &me) make_ready(lane);
    }
    me.state = State::ready;
  }
  if (race_check) acquire(&sync_->barriers[id][phase]);
  result = barrier.result[phase];
}

void Block::check_mask(const Arrival& arrival, Lane& lane) {
  const Warp& warp = *lane.warp;
  if (!(arrival.mask >> lane.lane & 1))
    fail(arrival.site, std::string(arrival.what->name) + ": lane " + std::to_string(lane.lane) +
                           " is not in the mask that it passes");
  if (arrival.mask & ~warp.present)
    fail(arrival.site, std::string(arrival.what->name) +
                           ": the mask names lanes that this block does not have");
  if (arrival.mask & warp.exited)
    fail(arrival.site,
         std::string(arrival.what->name) + ": the mask names lanes that have exited");
}

void Block::wait_at_collective(Arrival& arrival) {
  Lane& me = current_lane();
  Warp& warp = *me.warp;
  me.site = arrival.site;
  me.waits_in = arrival.what->name;
  check_mask(arrival, me);
  me.state = State::at_collective;
  me.arrival = warp.arrivals[me.lane] = &arrival;
  warp.waiting |= 1u << me.lane;
  if ((warp.waiting & arrival.mask) != arrival.mask) {
    wait();
    return;
  }
  for (uint32_t rest = arrival.mask; rest != 0; rest &= rest - 1) {
    const Arrival& other = *warp.arrivals[__builtin_ctz(rest)];
    if (other.what != arrival.what || other.mask != arrival.mask)
      fail(arrival.site, "divergent warp: lanes of one mask meet in different collectives");
    if (arrival.what->aligned && !(other.site == arrival.site))
      fail(arrival.site, std::string("divergent warp: ") + arrival.what->name +
                             " is reached at different lines");
  }
  if (options->count_accesses) fold_if_all_wait(warp);
  counters.collectives += 1;
  if (arrival.what->complete != nullptr) arrival.what->complete(arrival.mask, warp.arrivals);
  warp.waiting &= ~arrival.mask;
  for (uint32_t rest = arrival.mask; rest != 0; rest &= rest - 1) {
    Lane& lane = warp.lanes[__builtin_ctz(rest)];
    if (&lane != &me) make_ready(lane);
  }
  me.state = State::ready;
}

void Block::syncwarp(uint32_t mask, Site site) {
  static const Collective what = {"__syncwarp", false, nullptr};
  Arrival arrival{&what, mask, site, 0, 0, 32, nullptr, nullptr, nullptr};
  if (!race_check) return wait_at_collective(arrival);
  MaskSync* meeting = nullptr;
  {
    Unobserved unobserved;
    meeting = &sync_->warps[current_lane().warp->index][mask];
  }
  const uint32_t generation = meeting->generation;
  uint64_t* const address = &meeting->sync[generation & 1];
  release(address);
  wait_at_collective(arrival);
  // The lane that completes the meeting is the first to get here.
  if (meeting->generation == generation) meeting->generation += 1;
  acquire(address);
}

std::string Block::describe(const Lane& lane) const {
  switch (lane.state) {
    case State::exited:
      return "exited";
    case State::ready:
      return lane.fiber == nullptr ? "not started" : "running";
    default:
      return "in " + std::string(lane.waits_in) + " at " + at(lane.site);
  }
}

// One line for each run of neighbouring lanes in the same state.
std::string Block::where_everybody_is() const {
  std::string text;
  for (int first = 0; first < num_threads_;) {
    const std::string what = describe(lanes_[first]);
    int last = first;
    while (last + 1 < num_threads_ && describe(lanes_[last + 1]) == what) ++last;
    text += "  threads " + std::to_string(first) + "-" + std::to_string(last) + " (warp " +
            std::to_string(first / 32) + " lane " + std::to_string(first % 32) + " to warp " +
            std::to_string(last / 32) + " lane " + std::to_string(last % 32) + "): " + what + "\n";
    first = last + 1;
  }
  return text;
}

void Block::fail(Site site, const std::string& what) {
  Lane& me = current_lane();
  {
    Unobserved unobserved;
    state_->record("sim: " + at(site) + ": " + what + "\n  kernel " + launch_->kernel +
                   " launched at " + at(launch_->site) + ", block " + triple(indices_.block) +
                   ", thread " + triple(me.thread) + "\n" + where_everybody_is());
  }
  // The block's stacks are abandoned: kernels own nothing that needs a destructor.
  switch_fiber(*me.fiber, home_, true);
  __builtin_unreachable();
}

bool Block::in_shared(const void* address, size_t bytes) const {
  const char* p = static_cast<const char*>(address);
  auto within = [&](const char* memory, size_t size) {
    return memory != nullptr && p >= memory && p + bytes <= memory + size;
  };
  if (within(dynamic_, launch_->dynamic_shared_bytes)) return true;
  return std::any_of(arrays_.begin(), arrays_.end(), [&](const StaticArray& array) {
    return within(array.memory, array.bytes);
  });
}

void* Block::static_shared(const void* declaration, size_t bytes, size_t alignment) {
  for (const StaticArray& array : arrays_)
    if (array.declaration == declaration) return array.memory;
  Unobserved unobserved;
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max<size_t>(alignment, 16), bytes) != 0) std::abort();
  std::memset(memory, 0xff, bytes);
  arrays_.push_back({declaration, static_cast<char*>(memory), bytes});
  return memory;
}

void Block::free_shared() {
  std::free(dynamic_);
  dynamic_ = nullptr;
  for (const StaticArray& array : arrays_) std::free(array.memory);
  arrays_.clear();
}

// ---- what kernel code calls ------------------------------------------------------------
#if defined(ML_SIM_TSAN)
const ThreadIndices& indices() { return *current; }
#endif

void fail(Site site, const char* what) { current_lane().owner->fail(site, what); }

int barrier(int id, int expected, bool predicate, const char* name, Site site) {
  int result = 0;
  current_lane().owner->wait_at_barrier(id, expected, predicate, name, site, result);
  return result;
}

void syncwarp(uint32_t mask, Site site) { current_lane().owner->syncwarp(mask, site); }

void rendezvous(Arrival& arrival) { current_lane().owner->wait_at_collective(arrival); }

void* dynamic_shared() { return current_lane().owner->dynamic_shared(); }

void* static_shared(const void* declaration, size_t bytes, size_t alignment) {
  return current_lane().owner->static_shared(declaration, bytes, alignment);
}

void fence() {
  static uint64_t fence_sync = 0;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  release(&fence_sync);
  acquire(&fence_sync);
}

}  // namespace sim
