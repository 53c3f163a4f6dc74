// Faces of the scaled masked softmax; shapes in megatron_lite/ops/softmax.py.
#pragma once

#include "torch/tensor.h"

namespace ml {

Tensor masked_softmax_op(Tensor x, MaybeTensor visible, double scale, bool causal);

Tensor masked_softmax_backward_op(Tensor grad, Tensor out, double scale);

}  // namespace ml
