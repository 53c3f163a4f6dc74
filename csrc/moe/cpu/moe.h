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
  bool streaming = false;  // past the caches; packed and its rows at multiples of 64 bytes
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
  const int32_t *row_of, *source;
  int64_t assignments, rows;
  // What is found: assignments with a row, rows with an assignment, and the first row whose
  // assignment lies elsewhere (-1: none).
  int64_t placed = 0, filled = 0, wrong = -1;
};

}  // namespace ml

ML_CPU_KERNEL(moe_route, (const MoeRoute& call), (call))
// `most` becomes the largest of n indices, -1 where none is above.
ML_CPU_KERNEL(moe_largest, (const int32_t* values, int64_t n, int32_t& most), (values, n, most))
// Indices in source are below assignments.
ML_CPU_KERNEL(moe_pairs, (MoePairs & pairs), (pairs))
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
