// Activations on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

enum class Activation : int64_t {
  gelu = 0,
  gelu_tanh = 1,
  silu = 2,
  squared_relu = 3,
  quick_gelu = 4
};

struct ActivationForward {
  DType dtype;
  Activation kind;
  bool gated;
  const void* x;
  void* out;
  int64_t x_stride, f;
  double limit;   // of gate and up when gated; infinity: none
  double offset;  // added to the clamped up
};

struct ActivationBackward {
  DType dtype;
  Activation kind;
  bool gated;
  const void *grad, *x;
  void* grad_x;
  int64_t grad_stride, x_stride, f;
  double limit, offset;
};

}  // namespace ml

// Rows [first, last).
ML_CPU_KERNEL(activation_forward,
              (const ActivationForward& call, int64_t first, int64_t last), (call, first, last))
ML_CPU_KERNEL(activation_backward,
              (const ActivationBackward& call, int64_t first, int64_t last), (call, first, last))
