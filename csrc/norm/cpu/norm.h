// RMSNorm and LayerNorm on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// Statistics are float (double of double). A null residual is absent.
struct NormForward {
  DType dtype;
  bool layer;
  const void *x, *residual, *weight, *bias;
  void *sum, *out, *mean, *inverse;
  int64_t x_stride, residual_stride, h;
  double eps, weight_offset;
};

struct NormBackward {
  DType dtype;
  bool layer;  // not told by a pointer: those of empty tensors are null
  const void *grad, *x, *grad_sum, *weight, *mean, *inverse;
  void *grad_x, *parts;  // parts [kinds, num_parts, h] of the statistics' type
  int64_t grad_stride, x_stride, grad_sum_stride, rows, h, num_parts;
  double weight_offset;
};

}  // namespace ml

// Rows [first, last).
ML_CPU_KERNEL(norm_forward, (const NormForward& call, int64_t first, int64_t last),
              (call, first, last))
// Parts [first, last) of the rows; each part's sums of the weight's gradient go to its own place.
ML_CPU_KERNEL(norm_backward, (const NormBackward& call, int64_t first, int64_t last),
              (call, first, last))
