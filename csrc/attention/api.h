// Faces of attention; shapes and meaning of the arguments in megatron_lite/ops/attention.py.
#pragma once

#include <tuple>

#include "torch/tensor.h"

namespace ml {

// out, log-sum-exp
std::tuple<Tensor, Tensor> attention_forward_op(Tensor q, Tensor k, Tensor v, bool causal,
                                                int64_t offset, int64_t window, double scale,
                                                double softcap, MaybeTensor q_starts,
                                                MaybeTensor k_starts, double dropout,
                                                std::vector<int64_t> decisions,
                                                MaybeTensor samples);

// dq, dk, dv
std::tuple<Tensor, Tensor, Tensor> attention_backward_op(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, MaybeTensor dlse,
    bool causal, int64_t offset, int64_t window, double scale, double softcap,
    MaybeTensor q_starts, MaybeTensor k_starts, double dropout, std::vector<int64_t> decisions,
    MaybeTensor samples);

}  // namespace ml
