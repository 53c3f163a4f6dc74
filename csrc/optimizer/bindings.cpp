// Registers the optimizer steps; their schemas are in megatron_lite/ops/optimizer.py.
#include "optimizer/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("adamw_update", TORCH_BOX(&ml::adamw_update_op));
  m.impl("sgd_update", TORCH_BOX(&ml::sgd_update_op));
  m.impl("squared_norm", TORCH_BOX(&ml::squared_norm_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("adamw_update", TORCH_BOX(&ml::adamw_update_op));
  m.impl("sgd_update", TORCH_BOX(&ml::sgd_update_op));
  m.impl("squared_norm", TORCH_BOX(&ml::squared_norm_op));
}
#endif
