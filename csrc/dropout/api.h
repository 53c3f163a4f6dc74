// Faces of dropout with bias and residual; shapes in megatron_lite/ops/dropout.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

Tensor bias_dropout_residual_op(Tensor x, MaybeTensor bias, MaybeTensor residual, Tensor positions,
                                Tensor sample_ids, double p, int64_t c3, int64_t seed);

// grad_x (empty where nothing is dropped: it is grad), grad_bias (empty unless `biased`)
std::tuple<Tensor, Tensor> bias_dropout_residual_backward_op(Tensor grad, Tensor positions,
                                                             Tensor sample_ids, double p,
                                                             int64_t c3, int64_t seed,
                                                             bool biased);

}  // namespace ml
