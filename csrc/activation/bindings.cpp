// Registers the activations' implementations; their schemas are in
// megatron_lite/ops/activation.py.
#include "activation/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("activation_forward", TORCH_BOX(&ml::activation_forward_op));
  m.impl("activation_backward", TORCH_BOX(&ml::activation_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("activation_forward", TORCH_BOX(&ml::activation_forward_op));
  m.impl("activation_backward", TORCH_BOX(&ml::activation_backward_op));
}
#endif
