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

struct MoePairs {
  int64_t placed, filled;  // assignments that have a row, rows that have an assignment
  int64_t wrong;           // the first row whose assignment lies elsewhere, -1: none
};

}  // namespace ml

ML_CPU_KERNEL(moe_route, (const MoeRoute& call), (call))
// The largest of n indices, -1 where none is above.
ML_CPU_FUNCTION(int32_t, moe_largest, (const int32_t* values, int64_t n), (values, n))
// Indices in source are below assignments.
ML_CPU_FUNCTION(MoePairs, moe_pairs,
                (const int32_t* row_of, int64_t assignments, const int32_t* source, int64_t rows),
                (row_of, assignments, source, rows))
// Rows [first, last).
ML_CPU_KERNEL(moe_gather, (const MoeGather& call, int64_t first, int64_t last),
              (call, first, last))
// Tokens [first, last).
ML_CPU_KERNEL(moe_combine, (const MoeCombine& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(moe_combine_backward, (const MoeCombineBackward& call, int64_t first, int64_t last),
              (call, first, last))
// Rows of padding become 0.
ML_CPU_KERNEL(moe_clear_padding,
              (const int32_t* source, int64_t rows, void* packed, int64_t row_bytes),
              (source, rows, packed, row_bytes))
// probs [assignments] of `size` bytes each from packed_probs [rows].
ML_CPU_KERNEL(moe_scatter_probs,
              (const void* packed_probs, const int32_t* row_of, void* probs, int64_t assignments,
               int64_t size),
              (packed_probs, row_of, probs, assignments, size))
