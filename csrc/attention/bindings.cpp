// Registers attention's implementations; their schemas are in megatron_lite/ops/attention.py.
#include "attention/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&ml::attention_forward_op));
  m.impl("attention_backward", TORCH_BOX(&ml::attention_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&ml::attention_forward_op));
  m.impl("attention_backward", TORCH_BOX(&ml::attention_backward_op));
}
#endif
