// Detection of the instruction level; see isa.h.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ml {
namespace {

constexpr const char* kNames[] = {"base", "avx2", "avx512", "bf16", "amx"};

#if defined(__x86_64__)
// The kernel hands out the tile registers' state only on request; refused on old ones.
bool amx_permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & (1u << 22)) != 0 && (d & (1u << 24)) != 0;
}

Isa detected() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::base;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 29)) == 0) return Isa::base;  // F16C
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return Isa::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
  if (has_amx_bf16() && amx_permitted()) return Isa::amx;
  // Intel multiplies pairs of bf16 at half the rate of fp32: attention is faster without.
  return __builtin_cpu_is("intel") ? Isa::avx512 : Isa::bf16;
}
#else
Isa detected() { return Isa::base; }
#endif

int from_environment() {
  const char* wanted = std::getenv("MLITE_CPU_ISA");
  if (wanted == nullptr) return -1;
  for (int level = 0; level < 5; ++level)
    if (std::strcmp(wanted, kNames[level]) == 0) return level;
  return -1;
}

std::atomic<int>& level() {
  static const int most = static_cast<int>(detected());
  static std::atomic<int> current{[] {
    const int wanted = from_environment();
    return wanted >= 0 && wanted < most ? wanted : most;
  }()};
  return current;
}

}  // namespace

Isa isa() { return static_cast<Isa>(level().load(std::memory_order_relaxed)); }

}  // namespace ml

extern "C" __attribute__((visibility("default"))) int ml_limit_isa(int wanted) {
  const int most = static_cast<int>(ml::detected());
  ml::level() = wanted >= 0 && wanted < most ? wanted : most;
  return ml::level();
}
