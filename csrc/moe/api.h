// Faces of MoE routing, gather and combine; shapes in megatron_lite/ops/moe.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

// counts, offsets, row_of, source
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_route_op(Tensor ids, int64_t experts, int64_t align,
                                                        int64_t rows);
Tensor moe_splits_op(Tensor counts, int64_t ranks);

// packed, packed_probs (empty without probs)
std::tuple<Tensor, Tensor> moe_gather_op(Tensor x, MaybeTensor probs, Tensor source, Tensor row_of);
Tensor moe_scatter_probs_op(Tensor packed_probs, Tensor row_of);

Tensor moe_combine_op(Tensor packed, MaybeTensor probs, Tensor row_of, Tensor source);
// d_packed, d_probs (empty without probs)
std::tuple<Tensor, Tensor> moe_combine_backward_op(Tensor grad, Tensor packed, MaybeTensor probs,
                                                   Tensor row_of, Tensor source);

}  // namespace ml
