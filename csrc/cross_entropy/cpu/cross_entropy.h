// Cross-entropy on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// Shapes and formulas are in the .cpp. peak, sums, scale, loss are float (double of double).
struct CrossEntropy {
  DType dtype;
  void* logits;
  const int64_t* target;
  const void* scale;
  void *peak, *sums, *loss;
  int64_t rows, stride, columns, stored, classes;
  double label_smoothing, z_loss;
  bool totals;    // sums has its third row
  bool gradient;  // scale is given; not told by a pointer: those of empty tensors are null
};

}  // namespace ml

// All three: rows [first, last).
// Fills peak and sums from the logits.
ML_CPU_KERNEL(cross_entropy_statistics, (const CrossEntropy& call, int64_t first, int64_t last),
              (call, first, last))
// Fills loss, and turns the logits into the gradient, from peak and sums.
ML_CPU_KERNEL(cross_entropy_gradient, (const CrossEntropy& call, int64_t first, int64_t last),
              (call, first, last))
// Both at once for a vocabulary in one piece; peak and sums are not used.
ML_CPU_KERNEL(cross_entropy_whole, (const CrossEntropy& call, int64_t first, int64_t last),
              (call, first, last))
