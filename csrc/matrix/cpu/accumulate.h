// Accumulation of a product on the CPU: what a call consists of, and its kernel.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

// main [m, n] += a^T b of a [t, m], b [t, n]; main is float, double of double.
struct AccumulateProduct {
  DType dtype;
  void* main;
  const void *a, *b;
  int64_t main_stride, a_stride, b_stride, t, m, n;
  int64_t block_rows, block_columns;  // of main, multiples of 32
  int64_t column_blocks;
};

}  // namespace ml

// Blocks [first, last) of main, numbered by rows of blocks.
ML_CPU_MATRIX_KERNEL(accumulate_product,
                     (const AccumulateProduct& call, int64_t first, int64_t last),
                     (call, first, last))
