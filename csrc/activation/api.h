// Faces of the activations; shapes in megatron_lite/ops/activation.py.
#pragma once

#include <string>

#include "torch/tensor.h"

namespace ml {

Tensor activation_forward_op(Tensor x, std::string kind, bool gated, double limit, double offset);

Tensor activation_backward_op(Tensor grad, Tensor x, std::string kind, bool gated, double limit,
                              double offset);

}  // namespace ml
