// Registers the rotary embedding's implementations; their schemas are in
// megatron_lite/ops/rotary.py.
#include "rotary/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("rotary", TORCH_BOX(&ml::rotary_op));
  m.impl("rotary_pair", TORCH_BOX(&ml::rotary_pair_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("rotary", TORCH_BOX(&ml::rotary_op));
  m.impl("rotary_pair", TORCH_BOX(&ml::rotary_pair_op));
}
#endif
