// The context switch for x86-64 and aarch64, stacks, and the sanitizers' view of both.
#include "sim/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// void ml_sim_switch(void** save, void* restore): push the callee-saved registers, store the
// stack pointer to *save, take `restore` as the stack pointer, pop, return. Rounding modes
// are the same in all fibers and are not switched.
#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .hidden ml_sim_switch
    .globl  ml_sim_switch
    .type   ml_sim_switch, @function
ml_sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq  %rsp, (%rdi)
    movq  %rsi, %rsp
    popq  %r15
    popq  %r14
    popq  %r13
    popq  %r12
    popq  %rbx
    popq  %rbp
    ret
    .size ml_sim_switch, . - ml_sim_switch
)");
constexpr int kSavedWords = 6;  // then the return address
#elif defined(__aarch64__)
asm(R"(
    .text
    .p2align 4
    .hidden ml_sim_switch
    .globl  ml_sim_switch
    .type   ml_sim_switch, %function
ml_sim_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8,  d9,  [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8,  d9,  [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
    .size ml_sim_switch, . - ml_sim_switch
)");
#else
#error "the fiber switch is written for x86-64 and aarch64"
#endif
extern "C" void ml_sim_switch(void** save, void* restore);

namespace sim {

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 512 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

}  // namespace

Fiber make_fiber(int index) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + 2 * page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::fprintf(stderr, "sim: no memory for the stack of a thread\n");
    std::abort();
  }
  Fiber fiber;
  fiber.base = static_cast<char*>(memory) + page;
  // 33 cache lines further down for each stack, modulo one page.
  fiber.size = kStackBytes + page - static_cast<size_t>(index) * 33 * 64 % 4096;
#if defined(ML_SIM_TSAN)
  fiber.tsan = __tsan_create_fiber(0);
#endif
  return fiber;
}

Fiber make_home_fiber() {
  Fiber fiber;
#if defined(ML_SIM_TSAN)
  fiber.tsan = __tsan_get_current_fiber();
#endif
  return fiber;
}

void prepare(Fiber& fiber, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.base, fiber.size);
  fiber.fake_stack = nullptr;
#endif
  auto* top = reinterpret_cast<uint64_t*>(fiber.base + fiber.size);
#if defined(__x86_64__)
  // At its first instruction a function expects 16-byte alignment, less a return address.
  *--top = 0;  // the return address that `entry` would use: ends backtraces
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < kSavedWords; ++i) *--top = 0;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[1] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  fiber.stack_pointer = top;
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool forever) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(forever ? nullptr : &from.fake_stack, to.base, to.size);
#endif
#if defined(ML_SIM_TSAN)
  __tsan_switch_to_fiber(to.tsan, 1 /* no synchronisation */);
#endif
  ml_sim_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void entered_fiber([[maybe_unused]] Fiber* from_home) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (from_home != nullptr && from_home->base == nullptr) {
    from_home->base = static_cast<char*>(const_cast<void*>(bottom));
    from_home->size = size;
  }
#endif
}

}  // namespace sim
