// Faces of cross-entropy; shapes in megatron_lite/ops/cross_entropy.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

// peak [t], sums [2 or 3, t] of a shard
std::tuple<Tensor, Tensor> cross_entropy_statistics_op(Tensor logits, Tensor target,
                                                       int64_t columns, bool totals);

// loss [t]; with a scale, logits become the gradient
Tensor cross_entropy_gradient_op(Tensor logits, Tensor target, Tensor peak, Tensor sums,
                                 MaybeTensor scale, int64_t columns, int64_t classes,
                                 double label_smoothing, double z_loss);

// Both for a vocabulary in one piece.
Tensor cross_entropy_whole_op(Tensor logits, Tensor target, MaybeTensor scale, int64_t columns,
                              double label_smoothing, double z_loss);

}  // namespace ml
