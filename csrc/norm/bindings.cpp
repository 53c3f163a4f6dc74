// Registers the norms' implementations; their schemas are in megatron_lite/ops/norm.py.
#include "norm/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("norm_forward", TORCH_BOX(&ml::norm_forward_op));
  m.impl("norm_backward", TORCH_BOX(&ml::norm_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("norm_forward", TORCH_BOX(&ml::norm_forward_op));
  m.impl("norm_backward", TORCH_BOX(&ml::norm_backward_op));
}
#endif
