// Memory accesses made for a kernel: asynchronous copies, matrix rows, checked accessors.
#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "sim/block.h"

namespace sim {

namespace {

bool aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// By constant sizes: no call of a memcpy that a sanitizer watches.
void copy(const AsyncCopy& order) {
  if (order.valid_bytes == 16) {
    std::memcpy(order.shared, order.global, 16);
  } else {
    for (int i = 0; i < order.valid_bytes; ++i) order.shared[i] = order.global[i];
    for (int i = order.valid_bytes; i < order.bytes; ++i) order.shared[i] = 0;
  }
}

void land(const AsyncCopy& order) {
  reads(order.global, static_cast<size_t>(order.valid_bytes), order.pc);
  writes(order.shared, static_cast<size_t>(order.bytes), order.pc);
  copy(order);
}

struct WarpAccess {
  const void* address[32];
  int count = 0;
  uint32_t bytes = 0;
};

// Passes beyond the first that a warp-wide access of shared memory takes: 128 bytes of it are
// served at a time, each bank one word at a time, equal words at once.
uint64_t conflicts(const WarpAccess& access) {
  const int lanes_per_pass =
      access.bytes <= 4 ? 32 : static_cast<int>(128 / std::min(access.bytes, 16u));
  uint64_t replays = 0;
  for (int first = 0; first < access.count; first += lanes_per_pass) {
    std::vector<uintptr_t> words[32];
    size_t most = 1;
    for (int i = first; i < std::min(access.count, first + lanes_per_pass); ++i) {
      const auto address = reinterpret_cast<uintptr_t>(access.address[i]);
      for (uintptr_t word = address / 4; word <= (address + access.bytes - 1) / 4; ++word) {
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    }
    replays += most - 1;
  }
  return replays;
}

uint64_t sectors(const WarpAccess& access) {
  std::vector<uintptr_t> seen;
  for (int i = 0; i < access.count; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(access.address[i]);
    for (uintptr_t s = address / 32; s <= (address + access.bytes - 1) / 32; ++s) seen.push_back(s);
  }
  std::sort(seen.begin(), seen.end());
  return static_cast<uint64_t>(std::unique(seen.begin(), seen.end()) - seen.begin());
}

}  // namespace

void async_copy(void* shared, const void* global, int bytes, int valid_bytes, Site site) {
  Lane& lane = current_lane();
  Block& block = *lane.owner;
  const auto size = static_cast<size_t>(bytes);
  if (valid_bytes < 0 || valid_bytes > bytes)
    fail(site, "cp_async: the valid bytes are 0 to the size of the copy");
  if (!aligned(shared, size) || (valid_bytes != 0 && !aligned(global, size)))
    fail(site, "cp_async: an address is not aligned to the size of the copy");
  if (!block.in_shared(shared, size))
    fail(site, "cp_async: the destination is not in the block's shared memory");
  if (valid_bytes != 0 && block.in_shared(global, 1))
    fail(site, "cp_async: the source is shared memory");
  block.counters.cp_async += 1;
  block.counters.cp_async_bytes += static_cast<uint64_t>(valid_bytes);
  block.counters.global_load_bytes += static_cast<uint64_t>(valid_bytes);
  const AsyncCopy order{static_cast<char*>(shared), static_cast<const char*>(global), bytes,
                        valid_bytes, __builtin_return_address(0)};
  land(order);
  if (!block.options->copies_land_late) return;
  // Until the wait that covers it, nothing may be expected there.
  Unobserved unobserved;
  std::memset(order.shared, 0xff, size);
  lane.copies.push_back(order);
}

void async_commit() {
  Lane& lane = current_lane();
  Unobserved unobserved;
  lane.groups.push_back(lane.copies.size());
}

void async_wait(int groups_in_flight) {
  Lane& lane = current_lane();
  auto& groups = lane.groups;
  size_t landed = lane.copies.size();
  size_t done = groups.size();
  if (groups_in_flight >= 0) {
    const auto keep = static_cast<size_t>(groups_in_flight);
    done = groups.size() > keep ? groups.size() - keep : 0;
    landed = done == 0 ? 0 : groups[done - 1];
  }
  for (size_t i = 0; i < landed; ++i) land(lane.copies[i]);
  Unobserved unobserved;
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<ptrdiff_t>(landed));
  groups.erase(groups.begin(), groups.begin() + static_cast<ptrdiff_t>(done));
  for (size_t& end : groups) end -= landed;
}

void note_ldmatrix_row(const void* row, int num_matrices, Site site) {
  Lane& lane = current_lane();
  if (lane.lane >= 8 * num_matrices) return;
  if (!aligned(row, 16)) fail(site, "ldmatrix: the address of a row is not 16-byte aligned");
  if (!lane.owner->in_shared(row, 16))
    fail(site, "ldmatrix: a row is not in the block's shared memory");
  reads(row, 16, __builtin_return_address(0));
}

void note_access(Access kind, const void* address, size_t bytes, Site site) {
  Lane& lane = current_lane();
  Block& block = *lane.owner;
  const bool shared = kind == Access::shared_load || kind == Access::shared_store;
  const size_t alignment = bytes & (~bytes + 1);  // the largest power of two that divides it
  if (!aligned(address, std::min<size_t>(alignment, 16)))
    fail(site, "a misaligned access");
  if (shared && !block.in_shared(address, bytes))
    fail(site, "an access beyond the block's shared memory");
  if (!shared && block.in_shared(address, 1))
    fail(site, "an access to shared memory through a global accessor");
  if (kind == Access::global_load) block.counters.global_load_bytes += bytes;
  if (kind == Access::global_store) block.counters.global_store_bytes += bytes;
  if (!block.options->count_accesses) return;
  Unobserved unobserved;
  lane.log.push_back({site, kind, static_cast<uint32_t>(bytes), address});
}

void Block::fold_if_all_wait(Warp& warp) {
  for (uint32_t rest = warp.present; rest != 0; rest &= rest - 1)
    if (warp.lanes[__builtin_ctz(rest)].state == State::ready) return;
  Unobserved unobserved;
  fold_logs(warp);
}

// The n-th access of each lane at one line is taken as one access of the warp. That is what
// happens where lanes agree on their loops, and an approximation elsewhere.
void Block::fold_logs(Warp& warp) {
  using Key = std::tuple<const char*, int, Access, uint32_t, int>;
  std::map<Key, WarpAccess> accesses;
  for (uint32_t rest = warp.present; rest != 0; rest &= rest - 1) {
    Lane& lane = warp.lanes[__builtin_ctz(rest)];
    std::map<Key, int> seen;
    for (const LoggedAccess& one : lane.log) {
      Key key{one.site.file, one.site.line, one.kind, one.bytes, 0};
      std::get<4>(key) = seen[key]++;
      WarpAccess& access = accesses[key];
      access.bytes = one.bytes;
      access.address[access.count++] = one.address;
    }
    lane.log.clear();
  }
  for (const auto& [key, access] : accesses) {
    switch (std::get<2>(key)) {
      case Access::global_load:
        counters.global_load_sectors += sectors(access);
        break;
      case Access::global_store:
        counters.global_store_sectors += sectors(access);
        break;
      default:
        counters.shared_accesses += 1;
        counters.shared_replays += conflicts(access);
    }
  }
}

}  // namespace sim
