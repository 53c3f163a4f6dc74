// Registers FP8 quantization; the schemas are in megatron_lite/ops/fp8.py.
#include "fp8/api.h"

STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CPU, m) {
  m.impl("fp8_amax", TORCH_BOX(&ml::fp8_amax_op));
  m.impl("fp8_scales", TORCH_BOX(&ml::fp8_scales_op));
  m.impl("fp8_delayed_update", TORCH_BOX(&ml::fp8_delayed_update_op));
  m.impl("fp8_quantize", TORCH_BOX(&ml::fp8_quantize_op));
  m.impl("fp8_dequantize", TORCH_BOX(&ml::fp8_dequantize_op));
}
#ifdef ML_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(megatron_lite, CUDA, m) {
  m.impl("fp8_amax", TORCH_BOX(&ml::fp8_amax_op));
  m.impl("fp8_scales", TORCH_BOX(&ml::fp8_scales_op));
  m.impl("fp8_delayed_update", TORCH_BOX(&ml::fp8_delayed_update_op));
  m.impl("fp8_quantize", TORCH_BOX(&ml::fp8_quantize_op));
  m.impl("fp8_dequantize", TORCH_BOX(&ml::fp8_dequantize_op));
}
#endif
