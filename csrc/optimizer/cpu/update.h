// AdamW and SGD steps and the squared norm on the CPU: what a call consists of, its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// Weights and state are float, or double with a double gradient. Absent: a null pointer.
struct AdamWUpdate {
  DType dtype;   // of the gradient; fp64: everything is double
  DType copied;  // bf16 or fp16; not read without copy
  const void* grad;
  void *weight, *exp_avg, *exp_avg_sq, *copy;
  double clip, beta1, beta2, eps, decay, step_size, second_scale;
};

struct SgdUpdate {
  DType dtype, copied;
  const void* grad;
  void *weight, *momentum, *copy;
  double clip, lr, mu, coupled_decay, decay;
};

struct SquaredNorm {
  DType dtype;
  const void* x;
  int64_t n;
  double *squares, *bad;  // one of each per part
};

constexpr int64_t kNormPart = 65536;  // elements

}  // namespace ml

// Elements [first, last).
ML_CPU_KERNEL(adamw_update, (const AdamWUpdate& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(sgd_update, (const SgdUpdate& call, int64_t first, int64_t last),
              (call, first, last))
// Parts [first, last) of kNormPart elements.
ML_CPU_KERNEL(squared_norm, (const SquaredNorm& call, int64_t first, int64_t last),
              (call, first, last))
