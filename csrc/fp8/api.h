// Faces of FP8 quantization; shapes in megatron_lite/ops/fp8.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

Tensor fp8_amax_op(Tensor x);
// scale, scale_inv
std::tuple<Tensor, Tensor> fp8_scales_op(Tensor amax, bool e5m2, double epsilon,
                                         bool power_of_two);
void fp8_delayed_update_op(Tensor history, Tensor scale, Tensor scale_inv, bool e5m2,
                           bool most_recent, int64_t margin, double epsilon, bool power_of_two);
// codes, codes_t, scale_inv, scale_inv_t, amax; each empty where it is not asked for
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_quantize_op(
    Tensor x, MaybeTensor scale, int64_t scaling, bool e5m2, bool rowwise, bool transposed,
    bool with_amax, double epsilon, bool power_of_two, bool stochastic, int64_t seed, int64_t c2,
    int64_t c3, int64_t start, int64_t row_stride);
Tensor fp8_dequantize_op(Tensor codes, Tensor scale_inv, int64_t scaling, ScalarType dtype);

}  // namespace ml
