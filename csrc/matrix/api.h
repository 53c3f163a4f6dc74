// Face of accumulate_product; shapes in megatron_lite/ops/matrix.py.
#pragma once

#include "torch/tensor.h"

namespace ml {

// main [m, n] += a^T b, CPU only.
void accumulate_product_op(Tensor main, Tensor a, Tensor b);

}  // namespace ml
