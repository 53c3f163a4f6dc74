// Registers the implementations of dropout with bias and residual; their schemas are in
// megatron_lite/ops/dropout.py.
#include "dropout/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("bias_dropout_residual", TORCH_BOX(&ml::bias_dropout_residual_op));
  m.impl("bias_dropout_residual_backward", TORCH_BOX(&ml::bias_dropout_residual_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("bias_dropout_residual", TORCH_BOX(&ml::bias_dropout_residual_op));
  m.impl("bias_dropout_residual_backward", TORCH_BOX(&ml::bias_dropout_residual_backward_op));
}
#endif
