// Registers the scaled masked softmax's implementations; their schemas are in
// megatron_lite/ops/softmax.py.
#include "softmax/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("masked_softmax", TORCH_BOX(&ml::masked_softmax_op));
  m.impl("masked_softmax_backward", TORCH_BOX(&ml::masked_softmax_backward_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("masked_softmax", TORCH_BOX(&ml::masked_softmax_op));
  m.impl("masked_softmax_backward", TORCH_BOX(&ml::masked_softmax_backward_op));
}
#endif
