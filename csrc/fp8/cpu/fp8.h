// FP8 quantization on the CPU: what a call consists of, and its kernels.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

enum class Fp8Scaling : int64_t { tensor = 0, rows = 1, square = 2, mx = 3 };

struct Fp8ScaleRule {
  float largest, epsilon;
  bool power_of_two;
};

// Tiles of 128 x 128 in row-major order. Absent outputs: a null pointer, told by the flags.
struct Fp8Quantize {
  DType dtype;  // fp32, bf16 or fp16
  Fp8Scaling scaling;
  bool e5m2, rowwise, transposed, with_amax, stochastic;
  Fp8ScaleRule rule;
  const void* x;
  int64_t rows, cols, stride;
  uint8_t *codes, *codes_t;
  float scale;  // of tensor scaling
  void *scale_inv, *scale_inv_t;
  uint32_t* partial;  // amax of each tile, bits
  uint64_t seed;
  uint32_t c2, c3;
  int64_t start, row_stride;  // logical element of x[0, 0]; from row to row
};

struct Fp8Dequantize {
  DType dtype;  // of the output
  Fp8Scaling scaling;
  bool e5m2;
  const uint8_t* codes;
  const void* scale_inv;
  void* out;
  int64_t rows, cols;
};

// Rows of `cols` elements, `stride` apart; `limit` elements in all where they lie one behind
// the other, and the last row is shorter.
struct Fp8Amax {
  DType dtype;
  const void* x;
  int64_t cols, stride, limit;
  uint32_t* partial;  // one per row
};

struct Fp8Scales {
  const float* amax;
  float *scale, *scale_inv;
  Fp8ScaleRule rule;
};

struct Fp8Delayed {
  float *history, *scale, *scale_inv;
  int64_t length, n;
  bool most_recent;
  float margin_factor;
  Fp8ScaleRule rule;
};

}  // namespace ml

// Tiles, rows, rows, tensors, tensors [first, last).
ML_CPU_KERNEL(fp8_quantize, (const Fp8Quantize& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(fp8_dequantize, (const Fp8Dequantize& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(fp8_amax, (const Fp8Amax& call, int64_t first, int64_t last), (call, first, last))
ML_CPU_KERNEL(fp8_scales, (const Fp8Scales& call, int64_t first, int64_t last),
              (call, first, last))
ML_CPU_KERNEL(fp8_delayed, (const Fp8Delayed& call, int64_t first, int64_t last),
              (call, first, last))
