// Routing and row movement of MoE on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// As csrc/moe/routing.cu; `counts` and `offsets` serve as workspace while rows are given out.
struct MoeRoute {
  const int32_t* ids;
  int64_t assignments, experts, align, rows;
  int64_t *counts, *offsets;
  int32_t *row_of, *source;
};

struct MoeGather {
  const int32_t* source;
  const char* x;
  char* packed;
  int64_t x_stride, row_bytes, k;  // the first two in bytes
  const char* probs;               // with prob_bytes 0: none
  char* packed_probs;
  int64_t prob_bytes;
};

// Probabilities are float, double with double rows.
struct MoeCombine {
  DType dtype;
  bool weighted;
  const int32_t* row_of;
  const void *packed, *probs;
  void* out;
  int64_t h, k;
};

struct MoeCombineBackward {
  DType dtype;
  bool weighted;  // not weighted: packed is not read, d_probs not written
  const int32_t* row_of;
  const void *packed, *probs, *d_out;
  void *d_packed, *d_probs;
  int64_t h, k;
};

}  // namespace ml

ML_CPU_KERNEL(moe_route, (const MoeRoute& call), (call))
// Rows [first, last).
ML_CPU_KERNEL(moe_gather, (const MoeGather& call, int64_t first, int64_t last),
              (call, first, last))
// Tokens [first, last).
ML_CPU_KERNEL(moe_combine, (const MoeCombine& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(moe_combine_backward, (const MoeCombineBackward& call, int64_t first, int64_t last),
              (call, first, last))
