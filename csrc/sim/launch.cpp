// Launches: checks of the configuration, blocks spread over OS threads, options, reports.
//
// A library that contains the simulation exports ml_sim_set, ml_sim_error, ml_sim_counters,
// ml_sim_counter_names and ml_sim_reset_counters. Options start from the environment:
// MLITE_SIM_ORDER, MLITE_SIM_CP_ASYNC, MLITE_SIM_THREADS, MLITE_SIM_COUNT, MLITE_SIM_FAILURE.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "sim/block.h"

#define ML_SIM_API extern "C" __attribute__((visibility("default")))

namespace sim {

namespace {

constexpr size_t kMaxDynamicShared = 227 * 1024;  // sm_90

bool set_order(Options& options, const char* value) {
  options.seed = 0;
  if (std::strcmp(value, "fwd") == 0) {
    options.order = Order::forward;
  } else if (std::strcmp(value, "rev") == 0) {
    options.order = Order::reverse;
  } else if (std::strncmp(value, "rand:", 5) == 0) {
    options.order = Order::random;
    options.seed = std::strtoull(value + 5, nullptr, 10);
  } else {
    return false;
  }
  return true;
}

// Two words to choose between; `flag` becomes whether it is the second.
bool set_flag(bool& flag, const char* value, const char* no, const char* yes) {
  flag = std::strcmp(value, yes) == 0;
  return flag || std::strcmp(value, no) == 0;
}

bool set_blocks(Options& options, const char* value) {
  if (std::strcmp(value, "all") == 0) {
    options.first_block = 0;
    options.num_blocks = -1;
    return true;
  }
  long long first = 0;
  long long count = 0;
  if (std::sscanf(value, "%lld:%lld", &first, &count) != 2 || first < 0 || count < 0) return false;
  options.first_block = first;
  options.num_blocks = count;
  return true;
}

bool set_option(Options& options, const char* name, const char* value) {
  const std::string key = name;
  if (key == "order") return set_order(options, value);
  if (key == "cp_async") return set_flag(options.copies_land_late, value, "early", "late");
  if (key == "count") return set_flag(options.count_accesses, value, "0", "1");
  if (key == "failure") return set_flag(options.abort_on_failure, value, "record", "abort");
  if (key == "blocks") return set_blocks(options, value);
  if (key == "threads") {
    options.os_threads = std::atoi(value);
    return options.os_threads >= 0;
  }
  return false;
}

Options options_from_environment() {
  Options options;
  const char* const names[][2] = {{"MLITE_SIM_ORDER", "order"},
                                  {"MLITE_SIM_CP_ASYNC", "cp_async"},
                                  {"MLITE_SIM_THREADS", "threads"},
                                  {"MLITE_SIM_COUNT", "count"},
                                  {"MLITE_SIM_FAILURE", "failure"}};
  for (const auto& [variable, option] : names) {
    const char* value = std::getenv(variable);
    if (value != nullptr && !set_option(options, option, value)) {
      std::fprintf(stderr, "sim: %s=%s is not an option\n", variable, value);
      std::abort();
    }
  }
  return options;
}

// What outlives a launch. One launch at a time reads and changes it.
struct Process {
  std::mutex mutex;
  Options options = options_from_environment();
  std::string error;
  std::string told;  // what ml_sim_error returned last
  Counters counters;
  std::vector<std::unique_ptr<Block>> idle;  // blocks keep their stacks
};

Process& process() {
  static Process* const instance = new Process;  // lives as long as the process
  return *instance;
}

std::unique_ptr<Block> take_block() {
  Unobserved unobserved;
  std::lock_guard<std::mutex> lock(process().mutex);
  auto& idle = process().idle;
  if (idle.empty()) return std::make_unique<Block>();
  std::unique_ptr<Block> block = std::move(idle.back());
  idle.pop_back();
  return block;
}

void return_block(std::unique_ptr<Block> block) {
  std::lock_guard<std::mutex> lock(process().mutex);
  process().counters.add(block->counters);
  block->counters = Counters{};
  process().idle.push_back(std::move(block));
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

uint64_t gcd(uint64_t a, uint64_t b) { return b == 0 ? a : gcd(b, a % b); }

// The `turn`-th block to run of n.
int64_t block_in_order(const Options& options, int64_t turn, int64_t n) {
  if (options.order == Order::forward) return turn;
  if (options.order == Order::reverse) return n - 1 - turn;
  const auto size = static_cast<uint64_t>(n);
  uint64_t stride = mix(options.seed) % size + 1;
  while (gcd(stride, size) != 1) ++stride;
  const auto product = static_cast<unsigned __int128>(turn) * stride + mix(options.seed + 1);
  return static_cast<int64_t>(product % size);
}

const char* wrong_configuration(const Launch& launch) {
  const dim3 grid = launch.grid;
  const dim3 block = launch.block;
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) return "a block has 1 to 1024 threads, z to 64";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return "a grid has up to 2^31-1 blocks in x and 65535 in y and z";
  if (launch.dynamic_shared_bytes > kMaxDynamicShared)
    return "a block has up to 227 KiB of shared memory";
  return nullptr;
}

int give_up(const Options& options, const std::string& report) {
  if (options.abort_on_failure) {
    std::fprintf(stderr, "%s", report.c_str());
    std::abort();
  }
  std::lock_guard<std::mutex> lock(process().mutex);
  if (process().error.empty()) process().error = report;
  return 1;
}

}  // namespace

void LaunchState::record(const std::string& report) {
  std::lock_guard<std::mutex> lock(process().mutex);
  if (abort_on_failure_) {
    std::fprintf(stderr, "%s", report.c_str());
    std::abort();
  }
  if (process().error.empty()) process().error = report;
  __atomic_store_n(&failed_, true, __ATOMIC_RELEASE);
}

int run(const Launch& launch) {
  const Options options = process().options;
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return 0;
  if (const char* problem = wrong_configuration(launch))
    return give_up(options, std::string("sim: kernel ") + launch.kernel + ": " + problem + "\n");
  const uint64_t in_plane = static_cast<uint64_t>(launch.grid.x) * launch.grid.y;
  const auto in_grid = static_cast<int64_t>(in_plane * launch.grid.z);
  int64_t num_blocks = in_grid - std::min(in_grid, options.first_block);
  if (options.num_blocks >= 0) num_blocks = std::min(num_blocks, options.num_blocks);

  LaunchState state(options.abort_on_failure);
  std::atomic<int64_t> next{0};
  release(&state.begin_sync);
  auto work = [&] {
    std::unique_ptr<Block> block = take_block();
    for (int64_t turn = next++; turn < num_blocks && !state.failed(); turn = next++) {
      const int64_t flat = options.first_block + block_in_order(options, turn, num_blocks);
      const auto index = static_cast<uint64_t>(flat);
      block->run(launch, options, state,
                 {static_cast<unsigned>(index % launch.grid.x),
                  static_cast<unsigned>(index % in_plane / launch.grid.x),
                  static_cast<unsigned>(index / in_plane)},
                 flat);
    }
    return_block(std::move(block));
  };
  int wanted = options.os_threads > 0 ? options.os_threads : available_cores();
  if (race_check) wanted = std::min(wanted, 2);  // the fibers of more are too many for it
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min<int64_t>(wanted, num_blocks); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  acquire(&state.end_sync);
  std::lock_guard<std::mutex> lock(process().mutex);
  process().counters.launches += 1;
  return state.failed() ? 1 : 0;
}

}  // namespace sim

// 0, or 1 when the option or its value is unknown.
ML_SIM_API int ml_sim_set(const char* name, const char* value) {
  std::lock_guard<std::mutex> lock(sim::process().mutex);
  return sim::set_option(sim::process().options, name, value) ? 0 : 1;
}

// The report of the first failure since the last call with clear != 0; empty without one.
ML_SIM_API const char* ml_sim_error(int clear) {
  std::lock_guard<std::mutex> lock(sim::process().mutex);
  sim::process().told = sim::process().error;
  if (clear != 0) sim::process().error.clear();
  return sim::process().told.c_str();
}

ML_SIM_API const char* ml_sim_counter_names() {
#define SIM_NAME(name) #name " "
  return SIM_COUNTERS(SIM_NAME);
#undef SIM_NAME
}

ML_SIM_API void ml_sim_counters(uint64_t* values) {
  std::lock_guard<std::mutex> lock(sim::process().mutex);
  const sim::Counters& counters = sim::process().counters;
#define SIM_VALUE(name) *values++ = counters.name;
  SIM_COUNTERS(SIM_VALUE)
#undef SIM_VALUE
}

ML_SIM_API void ml_sim_reset_counters() {
  std::lock_guard<std::mutex> lock(sim::process().mutex);
  sim::process().counters = sim::Counters{};
}
