// Dropout with bias and residual on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// What all decisions of one call share; nothing is dropped where the threshold is 0.
struct DropoutKey {
  uint32_t seed_low, seed_high, c3, threshold;
  double scale;  // 1 / (1 - p)
};

struct DropoutForward {
  DType dtype;
  const void *x, *bias, *residual;  // null: none
  void* out;
  const int64_t *positions, *sample_ids;
  int64_t x_stride, residual_stride, b, h;
  DropoutKey key;
};

struct DropoutBackward {
  DType dtype;
  const void* grad;
  void *grad_x, *parts;  // grad_x null: not wanted; parts [num_parts, h] wide, null: no bias
  const int64_t *positions, *sample_ids;
  int64_t grad_stride, tokens, b, h, num_parts;
  DropoutKey key;
};

}  // namespace ml

// Tokens [first, last) of s * b.
ML_CPU_KERNEL(dropout_forward, (const DropoutForward& call, int64_t first, int64_t last),
              (call, first, last))
// Parts [first, last) of the tokens; each part's sum of the bias's gradient goes to its place.
ML_CPU_KERNEL(dropout_backward, (const DropoutBackward& call, int64_t first, int64_t last),
              (call, first, last))
