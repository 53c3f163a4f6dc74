// Checks and dispatch of cross-entropy.
#include "cross_entropy/api.h"

#include <limits>

#include "cross_entropy/cpu/cross_entropy.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_cross_entropy_statistics(int64_t dtype, const void* logits, int64_t stride,
                                    const int64_t* target, float* peak, float* sums, int64_t t,
                                    int64_t v, int64_t totals, void* stream);
int launch_cross_entropy_gradient(int64_t dtype, void* logits, int64_t stride,
                                  const int64_t* target, const float* peak, const float* sums,
                                  const float* scale, float* loss, int64_t t, int64_t v,
                                  int64_t v_stored, int64_t classes, float label_smoothing,
                                  float z_loss, void* stream);
}
#endif

namespace ml {
namespace {

// What every call has: the logits' layout and the targets.
CrossEntropy call_of(const Tensor& logits, const Tensor& target, int64_t columns) {
  CrossEntropy call{};
  call.dtype = element_type(logits, "logits");
  ML_CHECK(logits.dim() == 2, "logits: must be [tokens, columns]");
  call.rows = logits.size(0);
  call.stored = logits.size(1);
  // They are changed in place, so nothing can be copied into a better layout.
  ML_CHECK(call.stored <= 1 || logits.stride(1) == 1, "logits: columns must be contiguous");
  call.stride = call.rows > 1 ? logits.stride(0) : call.stored;
  ML_CHECK(call.stride >= call.stored, "logits: rows must not overlap");
  ML_CHECK(columns >= 0 && columns <= call.stored, "columns: must be 0 to ", call.stored,
           ", is ", columns);
  ML_CHECK(target.scalar_type() == ScalarType::Long, "target: dtype must be int64");
  check_shape(target, {call.rows}, "target");
  ML_CHECK(target.is_contiguous(), "target: must be contiguous");
  ML_CHECK(target.is_cuda() == logits.is_cuda(), "target: lies on another device than logits");
  refuse_fp64_on_cuda(logits, "cross_entropy");
  call.logits = const_cast<void*>(logits.const_data_ptr());  // written to with a scale only
  call.target = static_cast<const int64_t*>(target.const_data_ptr());
  call.columns = columns;
  call.classes = columns;
  return call;
}

void check_factors(double label_smoothing, double z_loss, int64_t classes) {
  ML_CHECK(label_smoothing >= 0.0 && label_smoothing <= 1.0,
           "label_smoothing: must be in [0, 1], is ", label_smoothing);
  ML_CHECK(label_smoothing == 0.0 || classes >= 1, "classes: must be at least 1, is ", classes);
  ML_CHECK(z_loss >= 0.0 && z_loss < std::numeric_limits<float>::max(),
           "z_loss: must be finite and not below 0, is ", z_loss);
}

void check_wide(const Tensor& logits, const Tensor& x, std::initializer_list<int64_t> shape,
                const char* name) {
  ML_CHECK(x.scalar_type() == wide_type(logits), name,
           ": dtype must be that of the losses (float32; float64 of float64)");
  ML_CHECK(x.is_cuda() == logits.is_cuda(), name, ": lies on another device than logits");
  check_shape(x, shape, name);
  ML_CHECK(x.is_contiguous(), name, ": must be contiguous");
}

void set_scale(CrossEntropy& call, const Tensor& logits, const MaybeTensor& scale) {
  call.gradient = scale.has_value();
  if (!scale) return;
  check_wide(logits, *scale, {call.rows}, "scale");
  call.logits = logits.mutable_data_ptr();
  call.scale = scale->const_data_ptr();
}

#ifdef ML_WITH_CUDA
void launch_statistics(const CrossEntropy& call, const Tensor& logits) {
  check_launch(launch_cross_entropy_statistics(
                   static_cast<int64_t>(call.dtype), call.logits, call.stride, call.target,
                   static_cast<float*>(call.peak), static_cast<float*>(call.sums), call.rows,
                   call.columns, call.totals, stream_of(logits)),
               "cross_entropy_statistics");
}

void launch_gradient(const CrossEntropy& call, const Tensor& logits) {
  check_launch(launch_cross_entropy_gradient(
                   static_cast<int64_t>(call.dtype), call.logits, call.stride, call.target,
                   static_cast<const float*>(call.peak), static_cast<const float*>(call.sums),
                   call.gradient ? static_cast<const float*>(call.scale) : nullptr,
                   static_cast<float*>(call.loss), call.rows, call.columns, call.stored,
                   call.classes, static_cast<float>(call.label_smoothing),
                   static_cast<float>(call.z_loss), stream_of(logits)),
               "cross_entropy_gradient");
}
#endif

}  // namespace

std::tuple<Tensor, Tensor> cross_entropy_statistics_op(Tensor logits, Tensor target,
                                                       int64_t columns, bool totals) {
  CrossEntropy call = call_of(logits, target, columns);
  Tensor peak = new_shape(logits, {call.rows}, wide_type(logits));
  Tensor sums = new_shape(logits, {totals ? 3 : 2, call.rows}, wide_type(logits));
  call.peak = peak.mutable_data_ptr();
  call.sums = sums.mutable_data_ptr();
  call.totals = totals;
#ifdef ML_WITH_CUDA
  if (logits.is_cuda()) {
    launch_statistics(call, logits);
    return {peak, sums};
  }
#endif
  run_rows(call.rows, columns,
           [&](int64_t first, int64_t last) { cross_entropy_statistics(call, first, last); });
  return {peak, sums};
}

Tensor cross_entropy_gradient_op(Tensor logits, Tensor target, Tensor peak, Tensor sums,
                                 MaybeTensor scale, int64_t columns, int64_t classes,
                                 double label_smoothing, double z_loss) {
  CrossEntropy call = call_of(logits, target, columns);
  check_factors(label_smoothing, z_loss, classes);
  check_wide(logits, peak, {call.rows}, "peak");
  call.totals = label_smoothing != 0.0;
  check_wide(logits, sums, {call.totals ? 3 : 2, call.rows}, "sums");
  ML_CHECK(classes >= columns, "classes: must be at least columns (", columns, "), is ", classes);
  set_scale(call, logits, scale);
  Tensor loss = new_shape(logits, {call.rows}, wide_type(logits));
  call.peak = const_cast<void*>(peak.const_data_ptr());
  call.sums = const_cast<void*>(sums.const_data_ptr());
  call.loss = loss.mutable_data_ptr();
  call.classes = classes;
  call.label_smoothing = label_smoothing;
  call.z_loss = z_loss;
#ifdef ML_WITH_CUDA
  if (logits.is_cuda()) {
    launch_gradient(call, logits);
    return loss;
  }
#endif
  run_rows(call.rows, call.stored,
           [&](int64_t first, int64_t last) { cross_entropy_gradient(call, first, last); });
  return loss;
}

Tensor cross_entropy_whole_op(Tensor logits, Tensor target, MaybeTensor scale, int64_t columns,
                              double label_smoothing, double z_loss) {
#ifdef ML_WITH_CUDA
  if (logits.is_cuda()) {
    const auto [peak, sums] =
        cross_entropy_statistics_op(logits, target, columns, label_smoothing != 0.0);
    return cross_entropy_gradient_op(logits, target, peak, sums, scale, columns, columns,
                                     label_smoothing, z_loss);
  }
#endif
  CrossEntropy call = call_of(logits, target, columns);
  check_factors(label_smoothing, z_loss, columns);
  set_scale(call, logits, scale);
  Tensor loss = new_shape(logits, {call.rows}, wide_type(logits));
  call.loss = loss.mutable_data_ptr();
  call.label_smoothing = label_smoothing;
  call.z_loss = z_loss;
  run_rows(call.rows, call.stored,
           [&](int64_t first, int64_t last) { cross_entropy_whole(call, first, last); });
  return loss;
}

}  // namespace ml
