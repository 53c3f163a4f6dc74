// Scaled masked softmax on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

struct SoftmaxForward {
  DType dtype;
  bool causal, masked;
  const void* x;           // [b, n, queries, keys], rows x_stride apart
  const uint8_t* visible;  // bytes, 0 hides; strides may be 0
  void* out;               // contiguous
  int64_t x_stride, mask_b, mask_n, mask_q, n, queries, keys;
  double scale;
};

struct SoftmaxBackward {
  DType dtype;
  const void *grad, *y;  // rows at their strides
  void* grad_x;          // contiguous
  int64_t grad_stride, y_stride, keys;
  double scale;
};

}  // namespace ml

// Rows [first, last) of b * n * queries.
ML_CPU_KERNEL(softmax_forward, (const SoftmaxForward& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(softmax_backward, (const SoftmaxBackward& call, int64_t first, int64_t last),
              (call, first, last))
