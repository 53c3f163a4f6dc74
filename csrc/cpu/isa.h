// Which instructions a CPU kernel may use, chosen at run time.
//
// A kernel file is compiled once per level with ML_ISA naming its namespace; ML_CPU_KERNEL
// declares the copies and a dispatcher of the same name in namespace ml:
//
//   ML_CPU_KERNEL(add_rows, (const Rows& call, int64_t first, int64_t last), (call, first, last))
//   // in the .cpp:  namespace ml::ML_ISA { void add_rows(const Rows& call, ...) { ... } }
//
//   base     what every processor of the architecture has (x86-64: SSE2; aarch64: NEON)
//   avx2     AVX2, FMA, F16C
//   avx512   AVX-512 F, BW, DQ, VL
//   bf16     avx512 and AVX512_BF16, not Intel's (ML_CPU_MATRIX_KERNEL only)
//   amx      bf16 and AMX-TILE, AMX-BF16  (ML_CPU_MATRIX_KERNEL only)
//
// The level is what the processor and the operating system allow, at most that of the
// environment variable MLITE_CPU_ISA (read once) or of ml_limit_isa (tests).
#pragma once

#include <cstdint>

namespace ml {

enum class Isa : int { base = 0, avx2 = 1, avx512 = 2, bf16 = 3, amx = 4 };

Isa isa();

}  // namespace ml

// Lowers the level for the rest of the process; -1 lifts the limit. Returns the level in force.
extern "C" int ml_limit_isa(int level);

#if defined(__x86_64__)
#define ML_CPU_KERNEL(name, parameters, arguments)             \
  namespace ml {                                               \
  namespace base {                                             \
  void name parameters;                                        \
  }                                                            \
  namespace avx2 {                                             \
  void name parameters;                                        \
  }                                                            \
  namespace avx512 {                                           \
  void name parameters;                                        \
  }                                                            \
  inline void name parameters {                                \
    if (isa() >= Isa::avx512) return avx512::name arguments;   \
    if (isa() == Isa::avx2) return avx2::name arguments;       \
    return base::name arguments;                               \
  }                                                            \
  }
#define ML_CPU_MATRIX_KERNEL(name, parameters, arguments)      \
  namespace ml {                                               \
  namespace base {                                             \
  void name parameters;                                        \
  }                                                            \
  namespace avx2 {                                             \
  void name parameters;                                        \
  }                                                            \
  namespace avx512 {                                           \
  void name parameters;                                        \
  }                                                            \
  namespace bf16 {                                             \
  void name parameters;                                        \
  }                                                            \
  namespace amx {                                              \
  void name parameters;                                        \
  }                                                            \
  inline void name parameters {                                \
    switch (isa()) {                                           \
      case Isa::amx: return amx::name arguments;               \
      case Isa::bf16: return bf16::name arguments;             \
      case Isa::avx512: return avx512::name arguments;         \
      case Isa::avx2: return avx2::name arguments;             \
      case Isa::base: return base::name arguments;             \
    }                                                          \
  }                                                            \
  }
#else
#define ML_CPU_KERNEL(name, parameters, arguments)             \
  namespace ml {                                               \
  namespace base {                                             \
  void name parameters;                                        \
  }                                                            \
  inline void name parameters { return base::name arguments; } \
  }
#define ML_CPU_MATRIX_KERNEL ML_CPU_KERNEL
#endif
