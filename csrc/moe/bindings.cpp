// Registers MoE routing, gather and combine; their schemas are in megatron_lite/ops/moe.py.
#include "moe/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("moe_route", TORCH_BOX(&ml::moe_route_op));
  m.impl("moe_splits", TORCH_BOX(&ml::moe_splits_op));
  m.impl("moe_gather", TORCH_BOX(&ml::moe_gather_op));
  m.impl("moe_scatter_probs", TORCH_BOX(&ml::moe_scatter_probs_op));
  m.impl("moe_combine", TORCH_BOX(&ml::moe_combine_op));
  m.impl("moe_combine_backward", TORCH_BOX(&ml::moe_combine_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("moe_route", TORCH_BOX(&ml::moe_route_op));
  m.impl("moe_splits", TORCH_BOX(&ml::moe_splits_op));
  m.impl("moe_gather", TORCH_BOX(&ml::moe_gather_op));
  m.impl("moe_scatter_probs", TORCH_BOX(&ml::moe_scatter_probs_op));
  m.impl("moe_combine", TORCH_BOX(&ml::moe_combine_op));
  m.impl("moe_combine_backward", TORCH_BOX(&ml::moe_combine_backward_op));
}
#endif
