// Faces of the flat optimizer steps and the squared norm; shapes in megatron_lite/ops/optimizer.py.
#pragma once

#include "torch/tensor.h"

namespace ml {

void adamw_update_op(Tensor weight, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq,
                     MaybeTensor copy, MaybeTensor clip, MaybeTensor skip, int64_t step, double lr,
                     double beta1, double beta2, double eps, double weight_decay);

void sgd_update_op(Tensor weight, Tensor grad, MaybeTensor momentum, MaybeTensor copy,
                   MaybeTensor clip, MaybeTensor skip, double lr, double mu, double weight_decay,
                   bool decoupled);

// [2] fp64: sum of squares, number of non-finite elements
Tensor squared_norm_op(Tensor x);

}  // namespace ml
