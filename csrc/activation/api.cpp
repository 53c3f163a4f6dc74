// Checks and dispatch of the activations.
#include "activation/api.h"

#include <cmath>
#include <limits>

#include "activation/cpu/activation.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_activation_forward(int64_t dtype, int64_t kind, int64_t gated, float limit,
                              float offset, const void* x, int64_t x_stride, void* out,
                              int64_t out_stride, int64_t t, int64_t f, void* stream);
int launch_activation_backward(int64_t dtype, int64_t kind, int64_t gated, float limit,
                               float offset, const void* grad, int64_t grad_stride,
                               const void* x, int64_t x_stride, void* grad_x,
                               int64_t grad_x_stride, int64_t t, int64_t f, void* stream);
}
#endif

namespace ml {
namespace {

Activation kind_of(const std::string& kind) {
  if (kind == "gelu") return Activation::gelu;
  if (kind == "gelu_tanh") return Activation::gelu_tanh;
  if (kind == "silu") return Activation::silu;
  if (kind == "squared_relu") return Activation::squared_relu;
  if (kind == "quick_gelu") return Activation::quick_gelu;
  ML_CHECK(false, "activation '", kind,
           "': legal are gelu, gelu_tanh, silu, squared_relu, quick_gelu");
  return Activation::gelu;
}

// Channels of the output.
int64_t check_input(const Tensor& x, bool gated, double limit, double offset) {
  ML_CHECK(x.dim() >= 1, "x: must have at least one dim");
  const int64_t columns = x.size(x.dim() - 1);
  ML_CHECK(!gated || columns % 2 == 0, "x: a gated activation needs an even last dim, not ",
           columns);
  ML_CHECK(limit > 0.0, "limit: must be positive, not ", limit);
  ML_CHECK(gated || limit == std::numeric_limits<double>::infinity(),
           "limit: only gated activations are clamped");
  ML_CHECK(std::isfinite(offset), "offset: must be finite, not ", offset);
  ML_CHECK(gated || offset == 0.0, "offset: only gated activations have a linear half");
  refuse_fp64_on_cuda(x, "activation");
  return gated ? columns / 2 : columns;
}

}  // namespace

Tensor activation_forward_op(Tensor x, std::string kind, bool gated, double limit,
                             double offset) {
  const DType dtype = element_type(x, "x");
  const Activation code = kind_of(kind);
  const int64_t f = check_input(x, gated, limit, offset);
  const Rows rows = rows_of(x, "x");
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = f;
  Tensor out = new_shape(x, shape, x.scalar_type());
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(launch_activation_forward(static_cast<int64_t>(dtype),
                                           static_cast<int64_t>(code), gated,
                                           static_cast<float>(limit), static_cast<float>(offset),
                                           rows.data(), rows.stride, out.mutable_data_ptr(), f,
                                           rows.rows, f, stream_of(x)),
                 "activation_forward");
    return out;
  }
#endif
  const ActivationForward call{dtype,       code, gated, rows.data(), out.mutable_data_ptr(),
                               rows.stride, f,    limit, offset};
  run_rows(rows.rows, f,
           [&](int64_t first, int64_t last) { activation_forward(call, first, last); });
  return out;
}

Tensor activation_backward_op(Tensor grad, Tensor x, std::string kind, bool gated, double limit,
                              double offset) {
  const DType dtype = element_type(x, "x");
  const Activation code = kind_of(kind);
  const int64_t f = check_input(x, gated, limit, offset);
  check_alike(x, grad, "grad");
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = f;
  ML_CHECK(shape_of(grad) == shape, "grad: shape differs from the output's");
  const Rows rows = rows_of(x, "x"), grad_rows = rows_of(grad, "grad");
  Tensor grad_x = new_like(x);
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_activation_backward(static_cast<int64_t>(dtype), static_cast<int64_t>(code), gated,
                                   static_cast<float>(limit), static_cast<float>(offset),
                                   grad_rows.data(), grad_rows.stride, rows.data(), rows.stride,
                                   grad_x.mutable_data_ptr(), rows.columns, rows.rows, f,
                                   stream_of(x)),
        "activation_backward");
    return grad_x;
  }
#endif
  const ActivationBackward call{
      dtype,
      code,
      gated,
      grad_rows.data(),
      rows.data(),
      grad_x.mutable_data_ptr(),
      grad_rows.stride,
      rows.stride,
      f,
      limit,
      offset};
  run_rows(rows.rows, f,
           [&](int64_t first, int64_t last) { activation_backward(call, first, last); });
  return grad_x;
}

}  // namespace ml
