// Checks and dispatch of dropout with bias and residual.
#include "dropout/api.h"

#include "dropout/cpu/dropout.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_bias_dropout_residual_forward(int64_t dtype, const void* x, int64_t x_stride,
                                         const void* bias, const void* residual,
                                         int64_t residual_stride, void* out, int64_t out_stride,
                                         const int64_t* positions, const int64_t* sample_ids,
                                         int64_t s, int64_t b, int64_t h, double p, int64_t c3,
                                         int64_t seed, void* stream);
int64_t bias_dropout_residual_workspace(int64_t s, int64_t b, int64_t h);
int launch_bias_dropout_residual_backward(int64_t dtype, const void* grad, int64_t grad_stride,
                                          void* grad_x, int64_t grad_x_stride, float* grad_bias,
                                          float* workspace, const int64_t* positions,
                                          const int64_t* sample_ids, int64_t s, int64_t b,
                                          int64_t h, double p, int64_t c3, int64_t seed,
                                          int64_t accumulate, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kMostParts = 64, kTokensOfPart = 16;

const int64_t* indices(const Tensor& x, const Tensor& index, int64_t dim, const char* name) {
  ML_CHECK(index.scalar_type() == ScalarType::Long && index.is_contiguous(), name,
           ": must be int64 and contiguous");
  ML_CHECK(index.is_cuda() == x.is_cuda() && index.get_device_index() == x.get_device_index(),
           name, ": lies on another device than the input");
  ML_CHECK(index.dim() == 1 && index.size(0) == x.size(dim), name,
           ": must have one entry for each of ", x.size(dim));
  return static_cast<const int64_t*>(index.const_data_ptr());
}

// On the CPU a negative position is told: the words of decisions below 0 are not defined.
const int64_t* checked_positions(const Tensor& x, const Tensor& positions) {
  const int64_t* values = indices(x, positions, 0, "positions");
  for (int64_t i = 0; !x.is_cuda() && i < x.size(0); ++i)
    ML_CHECK(values[i] >= 0, "positions: must not be negative, holds ", values[i]);
  return values;
}

DropoutKey key_of(double p, int64_t c3, int64_t seed) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
          static_cast<uint32_t>(c3), static_cast<uint32_t>(p * 4294967296.0), 1.0 / (1.0 - p)};
}

DType check_input(const Tensor& x, double p, const char* name) {
  const DType dtype = element_type(x, name);
  ML_CHECK(x.dim() == 3, name, ": must have shape [s, b, h], not ", x.dim(), " dims");
  ML_CHECK(p >= 0.0 && p < 1.0, "p: must be in [0, 1), not ", p);
  refuse_fp64_on_cuda(x, "bias_dropout_residual");
  return dtype;
}

}  // namespace

Tensor bias_dropout_residual_op(Tensor x, MaybeTensor bias, MaybeTensor residual, Tensor positions,
                                Tensor sample_ids, double p, int64_t c3, int64_t seed) {
  const DType dtype = check_input(x, p, "x");
  const int64_t s = x.size(0), b = x.size(1), h = x.size(2);
  const int64_t *position = nullptr, *sample = nullptr;
  if (p > 0.0) {
    position = checked_positions(x, positions);
    sample = indices(x, sample_ids, 1, "sample_ids");
  }
  if (bias) {
    check_alike(x, *bias, "bias");
    check_shape(*bias, {h}, "bias");
    ML_CHECK(bias->is_contiguous(), "bias: must be contiguous");
  }
  const Rows rows = rows_of(x, "x");
  std::optional<Rows> beside;
  if (residual) {
    check_alike(x, *residual, "residual");
    ML_CHECK(shape_of(x) == shape_of(*residual), "residual: shape differs from the input's");
    beside = rows_of(*residual, "residual");
  }
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
  const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
  const void* beside_data = beside ? beside->data() : nullptr;
  const int64_t beside_stride = beside ? beside->stride : 0;
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(launch_bias_dropout_residual_forward(
                     static_cast<int64_t>(dtype), rows.data(), rows.stride, bias_data, beside_data,
                     beside_stride, out.mutable_data_ptr(), h, position, sample, s, b, h, p, c3,
                     seed, stream_of(x)),
                 "bias_dropout_residual");
    return out;
  }
#endif
  const DropoutForward call{dtype,
                            rows.data(),
                            bias_data,
                            beside_data,
                            out.mutable_data_ptr(),
                            position,
                            sample,
                            rows.stride,
                            beside_stride,
                            b,
                            h,
                            key_of(p, c3, seed)};
  run_rows(s * b, h, [&](int64_t first, int64_t last) { dropout_forward(call, first, last); });
  return out;
}

std::tuple<Tensor, Tensor> bias_dropout_residual_backward_op(Tensor grad, Tensor positions,
                                                             Tensor sample_ids, double p,
                                                             int64_t c3, int64_t seed,
                                                             bool biased) {
  const DType dtype = check_input(grad, p, "grad");
  const int64_t s = grad.size(0), b = grad.size(1), h = grad.size(2), tokens = s * b;
  const int64_t *position = nullptr, *sample = nullptr;
  if (p > 0.0) {
    position = checked_positions(grad, positions);
    sample = indices(grad, sample_ids, 1, "sample_ids");
  }
  Tensor grad_x = p > 0.0 ? new_like(grad) : nothing_like(grad, grad.scalar_type());
  Tensor grad_bias = nothing_like(grad, wide_type(grad));
  const Rows rows = rows_of(grad, "grad");
#ifdef ML_WITH_CUDA
  if (grad.is_cuda()) {
    if (grad.numel() == 0 || (p == 0.0 && !biased)) {
      if (biased) grad_bias = torch::stable::new_zeros(grad, {h}, wide_type(grad));
      return {grad_x, grad_bias};
    }
    // The kernel always writes grad_x.
    Tensor written = p > 0.0 ? grad_x : new_like(grad);
    Tensor workspace = nothing_like(grad, ScalarType::Float);
    if (biased) {
      grad_bias = new_shape(grad, {h}, ScalarType::Float);
      workspace =
          new_shape(grad, {bias_dropout_residual_workspace(s, b, h)}, ScalarType::Float);
    }
    float* sums = biased ? static_cast<float*>(grad_bias.mutable_data_ptr()) : nullptr;
    float* parts = biased ? static_cast<float*>(workspace.mutable_data_ptr()) : nullptr;
    check_launch(launch_bias_dropout_residual_backward(
                     static_cast<int64_t>(dtype), rows.data(), rows.stride,
                     written.mutable_data_ptr(), h, sums, parts, position, sample, s, b, h, p, c3,
                     seed, 0, stream_of(grad)),
                 "bias_dropout_residual_backward");
    return {grad_x, grad_bias};
  }
#endif
  if (p == 0.0 && !biased) return {grad_x, grad_bias};
  const int64_t wanted = tokens / kTokensOfPart + 1;
  const int64_t num_parts = wanted < kMostParts ? wanted : kMostParts;
  Tensor sums = new_shape(grad, {biased ? num_parts : 0, h}, wide_type(grad));
  const DropoutBackward call{dtype,
                             rows.data(),
                             p > 0.0 ? grad_x.mutable_data_ptr() : nullptr,
                             biased ? sums.mutable_data_ptr() : nullptr,
                             position,
                             sample,
                             rows.stride,
                             tokens,
                             b,
                             h,
                             num_parts,
                             key_of(p, c3, seed)};
  run_rows(num_parts, tokens / num_parts * h + h,
           [&](int64_t first, int64_t last) { dropout_backward(call, first, last); });
  if (biased) {
    const int64_t dims[] = {0};
    grad_bias = torch::stable::sum(sums, torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
  }
  return {grad_x, grad_bias};
}

}  // namespace ml
