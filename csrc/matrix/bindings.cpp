// Registers the matrix operations; their schemas are in megatron_lite/ops/matrix.py.
#include "matrix/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("accumulate_product", TORCH_BOX(&ml::accumulate_product_op));
}
