// Faces of RMSNorm and LayerNorm; shapes in megatron_lite/ops/norm.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

// out, sum (empty without residual), mean (empty for RMSNorm), inverse
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward_op(Tensor x, MaybeTensor residual,
                                                           Tensor weight, MaybeTensor bias,
                                                           double eps, bool one_plus);

// grad_x, grad_weight, grad_bias (empty for RMSNorm)
std::tuple<Tensor, Tensor, Tensor> norm_backward_op(Tensor grad, Tensor x, MaybeTensor grad_sum,
                                                    Tensor weight, MaybeTensor mean,
                                                    Tensor inverse, bool one_plus);

}  // namespace ml
