// Checks and dispatch of the flat optimizer steps and the squared norm.
#include "optimizer/api.h"

#include <cmath>
#include <initializer_list>

#include "optimizer/cpu/update.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_adamw(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq, void* copy,
                 int64_t copy_dtype, const float* clip, const int32_t* skip, int64_t n, double lr,
                 double beta1, double beta2, double eps, double weight_decay, int64_t step,
                 void* stream);
int launch_sgd(float* weight, const float* grad, float* momentum, void* copy, int64_t copy_dtype,
               const float* clip, const int32_t* skip, int64_t n, double lr, double mu,
               double weight_decay, int64_t decoupled, void* stream);
int64_t squared_norm_workspace();
int launch_squared_norm(int64_t dtype, const void* x, int64_t n, double* workspace, double* out,
                        int64_t accumulate, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kCost = 1;  // of an element, for run_rows

// What both rules ask of their tensors. Returns the gradient's type.
DType check_range(const Tensor& weight, const Tensor& grad, const MaybeTensor& copy,
                  const MaybeTensor& clip, const MaybeTensor& skip) {
  const DType held = element_type(weight, "weight");
  ML_CHECK(held == DType::fp32 || held == DType::fp64, "weight: dtype must be float32 or float64");
  ML_CHECK(weight.is_contiguous(), "weight: must be contiguous");
  const DType dtype = element_type(grad, "grad");
  ML_CHECK((dtype == DType::fp64) == (held == DType::fp64),
           "grad: dtype must be float64 with float64 weights, and only then");
  ML_CHECK(!weight.is_cuda() || dtype == DType::fp32, "grad: dtype must be float32 on CUDA");
  const auto same_range = [&](const Tensor& x, const char* name) {
    ML_CHECK(x.numel() == weight.numel(), name, ": has ", x.numel(), " elements, the weight ",
             weight.numel());
    ML_CHECK(x.is_contiguous(), name, ": must be contiguous");
    ML_CHECK(x.is_cuda() == weight.is_cuda(), name, ": lies on another device than the weight");
  };
  same_range(grad, "grad");
  if (copy) {
    same_range(*copy, "copy");
    const ScalarType type = copy->scalar_type();
    ML_CHECK(held == DType::fp32 && (type == ScalarType::BFloat16 || type == ScalarType::Half),
             "copy: must be bfloat16 or float16, of float32 weights");
  }
  if (clip)
    ML_CHECK(clip->numel() == 1 && clip->scalar_type() == weight.scalar_type() &&
                 clip->is_cuda() == weight.is_cuda(),
             "clip: must be one element of the weight's dtype on its device");
  if (skip)
    ML_CHECK(skip->numel() == 1 && skip->scalar_type() == ScalarType::Int &&
                 skip->is_cuda() == weight.is_cuda(),
             "skip: must be one int32 on the weight's device");
  return dtype;
}

void check_state(const Tensor& weight, const Tensor& state, const char* name) {
  check_alike(weight, state, name);
  ML_CHECK(state.numel() == weight.numel() && state.is_contiguous(), name,
           ": must be contiguous with as many elements as the weight");
}

// Every tensor that is written to against all others; the first `written` ones are.
struct Named {
  const Tensor* x;
  const char* name;
};
void check_all_apart(std::initializer_list<Named> tensors, int64_t written) {
  const Named* all = tensors.begin();
  const auto n = static_cast<int64_t>(tensors.size());
  for (int64_t i = 0; i < written; ++i)
    for (int64_t j = i + 1; j < n; ++j)
      if (all[i].x != nullptr && all[j].x != nullptr)
        check_apart(*all[i].x, *all[j].x, all[i].name, all[j].name);
}
const Tensor* pointer(const MaybeTensor& x) { return x ? &*x : nullptr; }

void check_finite(double value, const char* name) {
  ML_CHECK(std::isfinite(value), name, ": must be finite, not ", value);
}
void check_fraction(double value, const char* name) {
  ML_CHECK(value >= 0.0 && value < 1.0, name, ": must be in [0, 1), not ", value);
}

double value_of(const MaybeTensor& clip) {
  if (!clip) return 1.0;
  if (clip->scalar_type() == ScalarType::Double)
    return *static_cast<const double*>(clip->const_data_ptr());
  return *static_cast<const float*>(clip->const_data_ptr());
}

bool is_set(const MaybeTensor& skip) {
  return skip && *static_cast<const int32_t*>(skip->const_data_ptr()) != 0;
}

DType type_of_copy(const MaybeTensor& copy) {
  return copy && copy->scalar_type() == ScalarType::Half ? DType::fp16 : DType::bf16;
}

void* data_of(const MaybeTensor& x) { return x ? x->mutable_data_ptr() : nullptr; }

}  // namespace

void adamw_update_op(Tensor weight, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq,
                     MaybeTensor copy, MaybeTensor clip, MaybeTensor skip, int64_t step, double lr,
                     double beta1, double beta2, double eps, double weight_decay) {
  const DType dtype = check_range(weight, grad, copy, clip, skip);
  check_state(weight, exp_avg, "exp_avg");
  check_state(weight, exp_avg_sq, "exp_avg_sq");
  check_all_apart({{&weight, "weight"}, {&exp_avg, "exp_avg"}, {&exp_avg_sq, "exp_avg_sq"},
                   {pointer(copy), "copy"}, {&grad, "grad"}},
                  4);
  ML_CHECK(step >= 1, "step: counts from 1, not ", step);
  check_finite(lr, "lr");
  check_finite(weight_decay, "weight_decay");
  check_fraction(beta1, "beta1");
  check_fraction(beta2, "beta2");
  ML_CHECK(eps >= 0.0 && std::isfinite(eps), "eps: must be finite and not below 0, is ", eps);
  refuse_fp64_on_cuda(weight, "adamw_update");
#ifdef ML_WITH_CUDA
  if (weight.is_cuda()) {
    const auto floats = [](const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); };
    check_launch(launch_adamw(floats(weight), floats(grad), floats(exp_avg), floats(exp_avg_sq),
                              data_of(copy), static_cast<int64_t>(type_of_copy(copy)),
                              static_cast<const float*>(data_of(clip)),
                              static_cast<const int32_t*>(data_of(skip)), weight.numel(), lr,
                              beta1, beta2, eps, weight_decay, step, stream_of(weight)),
                 "adamw_update");
    return;
  }
#endif
  if (is_set(skip)) return;
  const double power = static_cast<double>(step);
  const AdamWUpdate call{dtype,
                         type_of_copy(copy),
                         grad.const_data_ptr(),
                         weight.mutable_data_ptr(),
                         exp_avg.mutable_data_ptr(),
                         exp_avg_sq.mutable_data_ptr(),
                         data_of(copy),
                         value_of(clip),
                         beta1,
                         beta2,
                         eps,
                         1.0 - lr * weight_decay,
                         lr / (1.0 - std::pow(beta1, power)),
                         1.0 / std::sqrt(1.0 - std::pow(beta2, power))};
  run_rows(weight.numel(), kCost,
           [&](int64_t first, int64_t last) { adamw_update(call, first, last); });
}

void sgd_update_op(Tensor weight, Tensor grad, MaybeTensor momentum, MaybeTensor copy,
                   MaybeTensor clip, MaybeTensor skip, double lr, double mu, double weight_decay,
                   bool decoupled) {
  const DType dtype = check_range(weight, grad, copy, clip, skip);
  if (momentum) check_state(weight, *momentum, "momentum");
  check_all_apart({{&weight, "weight"}, {pointer(momentum), "momentum"}, {pointer(copy), "copy"},
                   {&grad, "grad"}},
                  3);
  check_finite(lr, "lr");
  check_finite(weight_decay, "weight_decay");
  check_finite(mu, "mu");
  ML_CHECK(momentum.has_value() || mu == 0.0, "momentum: is absent, so its factor must be 0");
  refuse_fp64_on_cuda(weight, "sgd_update");
#ifdef ML_WITH_CUDA
  if (weight.is_cuda()) {
    check_launch(launch_sgd(static_cast<float*>(weight.mutable_data_ptr()),
                            static_cast<const float*>(grad.const_data_ptr()),
                            static_cast<float*>(data_of(momentum)), data_of(copy),
                            static_cast<int64_t>(type_of_copy(copy)),
                            static_cast<const float*>(data_of(clip)),
                            static_cast<const int32_t*>(data_of(skip)), weight.numel(), lr, mu,
                            weight_decay, decoupled, stream_of(weight)),
                 "sgd_update");
    return;
  }
#endif
  if (is_set(skip)) return;
  const SgdUpdate call{dtype,
                       type_of_copy(copy),
                       grad.const_data_ptr(),
                       weight.mutable_data_ptr(),
                       data_of(momentum),
                       data_of(copy),
                       value_of(clip),
                       lr,
                       mu,
                       decoupled ? 0.0 : weight_decay,
                       decoupled ? 1.0 - lr * weight_decay : 1.0};
  run_rows(weight.numel(), kCost,
           [&](int64_t first, int64_t last) { sgd_update(call, first, last); });
}

Tensor squared_norm_op(Tensor x) {
  const DType dtype = element_type(x, "x");
  ML_CHECK(x.is_contiguous(), "x: must be contiguous");
  refuse_fp64_on_cuda(x, "squared_norm");
  Tensor out = new_shape(x, {2}, ScalarType::Double);
  double* totals = static_cast<double*>(out.mutable_data_ptr());
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    Tensor workspace = new_shape(x, {squared_norm_workspace()}, ScalarType::Double);
    check_launch(launch_squared_norm(static_cast<int64_t>(dtype), x.const_data_ptr(), x.numel(),
                                     static_cast<double*>(workspace.mutable_data_ptr()), totals, 0,
                                     stream_of(x)),
                 "squared_norm");
    return out;
  }
#endif
  const int64_t parts = (x.numel() + kNormPart - 1) / kNormPart;
  Tensor sums = new_shape(x, {2, parts}, ScalarType::Double);
  double* squares = static_cast<double*>(sums.mutable_data_ptr());
  const SquaredNorm call{dtype, x.const_data_ptr(), x.numel(), squares, squares + parts};
  run_rows(parts, kNormPart,
           [&](int64_t first, int64_t last) { squared_norm(call, first, last); });
  totals[0] = totals[1] = 0.0;
  for (int64_t part = 0; part < parts; ++part) {
    totals[0] += squares[part];
    totals[1] += squares[parts + part];
  }
  return out;
}

}  // namespace ml
