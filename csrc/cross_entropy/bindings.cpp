// Registers cross-entropy's implementations; schemas are in megatron_lite/ops/cross_entropy.py.
#include "cross_entropy/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&ml::cross_entropy_statistics_op));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&ml::cross_entropy_gradient_op));
  m.impl("cross_entropy_", TORCH_BOX(&ml::cross_entropy_whole_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&ml::cross_entropy_statistics_op));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&ml::cross_entropy_gradient_op));
  m.impl("cross_entropy_", TORCH_BOX(&ml::cross_entropy_whole_op));
}
#endif
