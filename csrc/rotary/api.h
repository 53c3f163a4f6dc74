// Faces of the rotary embedding; shapes in megatron_lite/ops/rotary.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

Tensor rotary_op(Tensor x, Tensor cosine, Tensor sine, bool interleaved, bool backward);

std::tuple<Tensor, Tensor> rotary_pair_op(Tensor q, Tensor k, Tensor cosine, Tensor sine,
                                          bool interleaved, bool backward);

}  // namespace ml
