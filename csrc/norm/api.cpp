// Checks and dispatch of RMSNorm and LayerNorm.
#include "norm/api.h"

#include "norm/cpu/norm.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_norm_forward(int64_t dtype, const void* x, int64_t x_stride, const void* residual,
                        int64_t residual_stride, void* sum, int64_t sum_stride,
                        const void* weight, const void* bias, void* out, int64_t out_stride,
                        float* mean, float* inverse, int64_t rows, int64_t h, float eps,
                        int64_t one_plus, void* stream);
int64_t norm_backward_workspace(int64_t dtype, int64_t rows, int64_t h, int64_t layer);
int launch_norm_backward(int64_t dtype, const void* grad, int64_t grad_stride, const void* x,
                         int64_t x_stride, const void* grad_sum, int64_t grad_sum_stride,
                         const void* weight, const float* mean, const float* inverse,
                         void* grad_x, int64_t grad_x_stride, float* grad_weight,
                         float* grad_bias, float* workspace, int64_t rows, int64_t h,
                         int64_t one_plus, int64_t accumulate, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kMostParts = 64, kRowsOfPart = 16;

void check_vector(const Tensor& x, const Tensor& vector, const char* name) {
  check_alike(x, vector, name);
  check_shape(vector, {x.size(x.dim() - 1)}, name);
  ML_CHECK(vector.is_contiguous(), name, ": must be contiguous");
}

void check_rows(const Tensor& x, const Tensor& other, const char* name) {
  check_alike(x, other, name);
  ML_CHECK(shape_of(x) == shape_of(other), name, ": shape differs from the input's");
}

void check_statistic(const Tensor& x, const Tensor& statistic, int64_t rows, const char* name) {
  ML_CHECK(statistic.scalar_type() == wide_type(x), name,
           ": dtype must be float32 (float64 of a float64 input)");
  ML_CHECK(statistic.is_cuda() == x.is_cuda() &&
               statistic.get_device_index() == x.get_device_index(),
           name, ": lies on another device than the input");
  ML_CHECK(statistic.numel() == rows && statistic.is_contiguous(), name,
           ": must be contiguous with one value per row");
}

// Sums the parts in order: [num_parts, h] -> [h].
Tensor sum_parts(const Tensor& parts, int64_t kind) {
  const Tensor one = torch::stable::select(parts, 0, kind);
  const int64_t dims[] = {0};
  return torch::stable::sum(one, torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward_op(Tensor x, MaybeTensor residual,
                                                           Tensor weight, MaybeTensor bias,
                                                           double eps, bool one_plus) {
  const DType dtype = element_type(x, "x");
  const Rows rows = rows_of(x, "x");
  check_vector(x, weight, "weight");
  if (bias) check_vector(x, *bias, "bias");
  if (residual) check_rows(x, *residual, "residual");
  std::optional<Rows> residual_rows;
  if (residual) residual_rows = rows_of(*residual, "residual");
  refuse_fp64_on_cuda(x, "norm");
  Tensor out = new_like(x);
  Tensor sum = residual ? new_like(x) : nothing_like(x, x.scalar_type());
  std::vector<int64_t> shape = shape_of(x);
  shape.pop_back();
  Tensor inverse = new_shape(x, shape, wide_type(x));
  Tensor mean = bias ? new_shape(x, shape, wide_type(x)) : nothing_like(x, wide_type(x));
  const void* residual_data = residual ? residual_rows->data() : nullptr;
  const int64_t residual_stride = residual ? residual_rows->stride : 0;
  const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_norm_forward(static_cast<int64_t>(dtype), rows.data(), rows.stride, residual_data,
                            residual_stride, sum.mutable_data_ptr(), rows.columns,
                            weight.const_data_ptr(), bias_data, out.mutable_data_ptr(),
                            rows.columns, static_cast<float*>(mean.mutable_data_ptr()),
                            static_cast<float*>(inverse.mutable_data_ptr()), rows.rows,
                            rows.columns, static_cast<float>(eps), one_plus, stream_of(x)),
        "norm_forward");
    return {out, sum, mean, inverse};
  }
#endif
  const NormForward call{dtype,
                         bias.has_value(),
                         rows.data(),
                         residual_data,
                         weight.const_data_ptr(),
                         bias_data,
                         sum.mutable_data_ptr(),
                         out.mutable_data_ptr(),
                         mean.mutable_data_ptr(),
                         inverse.mutable_data_ptr(),
                         rows.stride,
                         residual_stride,
                         rows.columns,
                         eps,
                         one_plus ? 1.0 : 0.0};
  run_rows(rows.rows, rows.columns,
           [&](int64_t first, int64_t last) { norm_forward(call, first, last); });
  return {out, sum, mean, inverse};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_op(Tensor grad, Tensor x, MaybeTensor grad_sum,
                                                    Tensor weight, MaybeTensor mean,
                                                    Tensor inverse, bool one_plus) {
  const DType dtype = element_type(x, "x");
  const Rows rows = rows_of(x, "x");
  check_vector(x, weight, "weight");
  check_rows(x, grad, "grad");
  if (grad_sum) check_rows(x, *grad_sum, "grad_sum");
  check_statistic(x, inverse, rows.rows, "inverse");
  if (mean) check_statistic(x, *mean, rows.rows, "mean");
  refuse_fp64_on_cuda(x, "norm");
  const Rows grad_rows = rows_of(grad, "grad");
  std::optional<Rows> beside;
  if (grad_sum) beside = rows_of(*grad_sum, "grad_sum");
  const void* beside_data = beside ? beside->data() : nullptr;
  const int64_t beside_stride = beside ? beside->stride : 0;
  const void* mean_data = mean ? mean->const_data_ptr() : nullptr;
  Tensor grad_x = new_like(x);
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    Tensor grad_weight = new_shape(x, {rows.columns}, ScalarType::Float);
    Tensor grad_bias = new_shape(x, {mean ? rows.columns : 0}, ScalarType::Float);
    if (rows.rows == 0) {  // a null pointer of an empty mean would say RMSNorm
      torch::stable::zero_(grad_weight), torch::stable::zero_(grad_bias);
      return {grad_x, grad_weight, grad_bias};
    }
    const int64_t code = static_cast<int64_t>(dtype);
    Tensor workspace = new_shape(
        x, {norm_backward_workspace(code, rows.rows, rows.columns, mean ? 1 : 0)},
        ScalarType::Float);
    check_launch(
        launch_norm_backward(code, grad_rows.data(), grad_rows.stride, rows.data(), rows.stride,
                             beside_data, beside_stride, weight.const_data_ptr(),
                             static_cast<const float*>(mean_data),
                             static_cast<const float*>(inverse.const_data_ptr()),
                             grad_x.mutable_data_ptr(), rows.columns,
                             static_cast<float*>(grad_weight.mutable_data_ptr()),
                             static_cast<float*>(grad_bias.mutable_data_ptr()),
                             static_cast<float*>(workspace.mutable_data_ptr()), rows.rows,
                             rows.columns, one_plus, 0, stream_of(x)),
        "norm_backward");
    return {grad_x, grad_weight, grad_bias};
  }
#endif
  const int64_t wanted = rows.rows / kRowsOfPart + 1;
  const int64_t parts = wanted < kMostParts ? wanted : kMostParts;
  Tensor sums = new_shape(x, {mean ? 2 : 1, parts, rows.columns}, wide_type(x));
  const NormBackward call{dtype,
                          mean.has_value(),
                          grad_rows.data(),
                          rows.data(),
                          beside_data,
                          weight.const_data_ptr(),
                          mean_data,
                          inverse.const_data_ptr(),
                          grad_x.mutable_data_ptr(),
                          sums.mutable_data_ptr(),
                          grad_rows.stride,
                          rows.stride,
                          beside_stride,
                          rows.rows,
                          rows.columns,
                          parts,
                          one_plus ? 1.0 : 0.0};
  run_rows(parts, kRowsOfPart * rows.columns,
           [&](int64_t first, int64_t last) { norm_backward(call, first, last); });
  Tensor grad_bias = mean ? sum_parts(sums, 1) : nothing_like(x, wide_type(x));
  return {grad_x, sum_parts(sums, 0), grad_bias};
}

}  // namespace ml
