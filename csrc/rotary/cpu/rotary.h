// Rotary embedding on the CPU: what a call consists of, and its kernel.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

struct RotaryStrides {
  int64_t s, b, n;
};

struct Rotary {
  DType dtype;
  bool interleaved;
  const void *x, *cosine, *sine;  // tables [s, half], float (double of double)
  void* out;                      // [s, b, n, d], contiguous
  RotaryStrides x_stride;
  int64_t b, n, d, half;
  double direction;  // 1, or -1 for the gradient
};

}  // namespace ml

// Positions [first, last) of the sequence.
ML_CPU_KERNEL(rotate_positions, (const Rotary& call, int64_t first, int64_t last),
              (call, first, last))
