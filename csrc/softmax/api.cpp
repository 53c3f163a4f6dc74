// Checks and dispatch of the scaled masked softmax.
#include "softmax/api.h"

#include "softmax/cpu/softmax.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_masked_softmax_forward(int64_t dtype, const void* x, int64_t x_stride,
                                  const uint8_t* visible, int64_t mask_b, int64_t mask_n,
                                  int64_t mask_q, int64_t causal, float scale, void* out,
                                  int64_t out_stride, int64_t b, int64_t n, int64_t queries,
                                  int64_t keys, void* stream);
int launch_masked_softmax_backward(int64_t dtype, const void* grad, int64_t grad_stride,
                                   const void* y, int64_t y_stride, float scale, void* grad_x,
                                   int64_t grad_x_stride, int64_t rows, int64_t keys,
                                   void* stream);
}
#endif

namespace ml {
namespace {

// The mask with its strides over b, n and queries; 0 where it is broadcast.
struct Mask {
  std::optional<Tensor> held;
  int64_t strides[3] = {0, 0, 0};
  const uint8_t* data() const {
    return held ? static_cast<const uint8_t*>(held->const_data_ptr()) : nullptr;
  }
};

Mask mask_of(const Tensor& x, const MaybeTensor& visible) {
  Mask mask;
  if (!visible) return mask;
  ML_CHECK(visible->scalar_type() == ScalarType::Bool, "visible: must be bool");
  ML_CHECK(visible->is_cuda() == x.is_cuda() && visible->get_device_index() == x.get_device_index(),
           "visible: lies on another device than the input");
  const int64_t dims = visible->dim();
  bool fits = dims >= 1 && dims <= x.dim() && visible->size(dims - 1) == x.size(x.dim() - 1);
  for (int64_t back = 2; fits && back <= dims; ++back) {
    const int64_t size = visible->size(dims - back);
    fits = size == 1 || size == x.size(x.dim() - back);
  }
  ML_CHECK(fits, "visible: must be broadcastable to the input, with all of its keys");
  const bool dense = visible->size(dims - 1) <= 1 || visible->stride(dims - 1) == 1;
  mask.held = dense ? *visible : torch::stable::contiguous(*visible);
  for (int64_t back = 2; back <= dims; ++back)
    if (mask.held->size(dims - back) != 1) mask.strides[4 - back] = mask.held->stride(dims - back);
  return mask;
}

}  // namespace

Tensor masked_softmax_op(Tensor x, MaybeTensor visible, double scale, bool causal) {
  const DType dtype = element_type(x, "x");
  const int64_t dims = x.dim();
  ML_CHECK(dims >= 2 && dims <= 4, "x: must have shape [queries, keys], [b, queries, keys] or "
           "[b, n, queries, keys], not ", dims, " dims");
  refuse_fp64_on_cuda(x, "masked_softmax");
  const Mask mask = mask_of(x, visible);
  const Rows rows = rows_of(x, "x");
  const int64_t queries = x.size(dims - 2), keys = x.size(dims - 1);
  const int64_t n = dims > 2 ? x.size(dims - 3) : 1;
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_masked_softmax_forward(static_cast<int64_t>(dtype), rows.data(), rows.stride,
                                      mask.data(), mask.strides[0], mask.strides[1],
                                      mask.strides[2], causal, static_cast<float>(scale),
                                      out.mutable_data_ptr(), keys, dims > 3 ? x.size(0) : 1, n,
                                      queries, keys, stream_of(x)),
        "masked_softmax");
    return out;
  }
#endif
  const SoftmaxForward call{dtype,
                            causal,
                            visible.has_value(),
                            rows.data(),
                            mask.data(),
                            out.mutable_data_ptr(),
                            rows.stride,
                            mask.strides[0],
                            mask.strides[1],
                            mask.strides[2],
                            n,
                            queries,
                            keys,
                            scale};
  run_rows(rows.rows, keys,
           [&](int64_t first, int64_t last) { softmax_forward(call, first, last); });
  return out;
}

Tensor masked_softmax_backward_op(Tensor grad, Tensor out, double scale) {
  const DType dtype = element_type(out, "out");
  check_alike(out, grad, "grad");
  ML_CHECK(shape_of(grad) == shape_of(out), "grad: shape differs from the output's");
  refuse_fp64_on_cuda(out, "masked_softmax");
  const Rows rows = rows_of(out, "out"), grad_rows = rows_of(grad, "grad");
  Tensor grad_x = new_like(out);
  if (out.numel() == 0) return grad_x;
#ifdef ML_WITH_CUDA
  if (out.is_cuda()) {
    check_launch(
        launch_masked_softmax_backward(static_cast<int64_t>(dtype), grad_rows.data(),
                                       grad_rows.stride, rows.data(), rows.stride,
                                       static_cast<float>(scale), grad_x.mutable_data_ptr(),
                                       rows.columns, rows.rows, rows.columns, stream_of(out)),
        "masked_softmax_backward");
    return grad_x;
  }
#endif
  const SoftmaxBackward call{dtype,
                             grad_rows.data(),
                             rows.data(),
                             grad_x.mutable_data_ptr(),
                             grad_rows.stride,
                             rows.stride,
                             rows.columns,
                             scale};
  run_rows(rows.rows, rows.columns,
           [&](int64_t first, int64_t last) { softmax_backward(call, first, last); });
  return grad_x;
}

}  // namespace ml
