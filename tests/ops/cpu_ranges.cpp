// Parts of the CPU kernels' work by themselves, for sizes that no test runs as a whole.
//
// Each function runs elements, tokens, tiles or rows [first, last) of a call that is as large as
// its pointers say; memory may be sparse. The kernels are compiled for the base level, with the
// flags of tests/sim/build.py. Arguments as tests/sim/build.py hands them over, null at the end.
#include "fp8/cpu/fp8.h"
#include "moe/cpu/moe.h"
#include "optimizer/cpu/update.h"

#define EXPORTED extern "C" __attribute__((visibility("default"))) int

EXPORTED cpu_adamw(void* weight, const void* grad, void* first_moment, void* second_moment,
                   void* copy, int64_t first, int64_t last, void*) {
  ml::base::adamw_update({ml::DType::fp32, ml::DType::bf16, grad, weight, first_moment,
                          second_moment, copy, 1.0, 0.9, 0.95, 1e-8, 0.99, 0.1, 1.0},
                         first, last);
  return 0;
}

EXPORTED cpu_sgd(void* weight, const void* grad, void* momentum, void* copy, int64_t first,
                 int64_t last, void*) {
  ml::base::sgd_update({ml::DType::fp32, ml::DType::bf16, grad, weight, momentum, copy, 1.0, 0.1,
                        0.9, 0.1, 1.0},
                       first, last);
  return 0;
}

// Parts [first, last) of the norm of x [n] bf16.
EXPORTED cpu_squared_norm(const void* x, int64_t n, double* squares, double* bad, int64_t first,
                          int64_t last, void*) {
  ml::base::squared_norm({ml::DType::bf16, x, n, squares, bad}, first, last);
  return 0;
}

EXPORTED cpu_combine(const void* packed, const int32_t* row_of, const float* probs, void* out,
                     int64_t h, int64_t k, int64_t first, int64_t last, void*) {
  ml::base::moe_combine({ml::DType::bf16, true, row_of, packed, probs, out, h, k}, first, last);
  return 0;
}

EXPORTED cpu_combine_backward(const void* packed, const int32_t* row_of, const float* probs,
                              const void* d_out, void* d_packed, float* d_probs, int64_t h,
                              int64_t k, int64_t first, int64_t last, void*) {
  ml::base::moe_combine_backward({ml::DType::bf16, true, row_of, packed, probs, d_out, d_packed,
                                  d_probs, h, k},
                                 first, last);
  return 0;
}

EXPORTED cpu_gather(const void* x, int64_t row_bytes, const int32_t* source, void* packed,
                    int64_t k, int64_t first, int64_t last, void*) {
  ml::base::moe_gather({source, static_cast<const char*>(x), static_cast<char*>(packed),
                        row_bytes, row_bytes, k, nullptr, nullptr, 0},
                       first, last);
  return 0;
}

// Tiles [first, last) of x [rows, cols] bf16 in blocks of 128 x 128, E4M3, both ways.
EXPORTED cpu_quantize(const void* x, int64_t rows, int64_t cols, uint8_t* codes, uint8_t* codes_t,
                      float* scale_inv, int64_t first, int64_t last, void*) {
  ml::Fp8Quantize call{};
  call.dtype = ml::DType::bf16;
  call.scaling = ml::Fp8Scaling::square;
  call.rowwise = call.transposed = true;
  call.rule = {448.0f, 0.0f, false};
  call.x = x, call.rows = rows, call.cols = call.stride = cols;
  call.codes = codes, call.codes_t = codes_t, call.scale_inv = scale_inv;
  ml::base::fp8_quantize(call, first, last);
  return 0;
}

EXPORTED cpu_dequantize(const uint8_t* codes, const float* scale_inv, float* out, int64_t rows,
                        int64_t cols, int64_t first, int64_t last, void*) {
  ml::base::fp8_dequantize({ml::DType::fp32, ml::Fp8Scaling::tensor, false, codes, scale_inv, out,
                            rows, cols},
                           first, last);
  return 0;
}
