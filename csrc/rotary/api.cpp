// Checks and dispatch of the rotary embedding.
#include "rotary/api.h"

#include "rotary/cpu/rotary.h"

#ifdef ML_WITH_CUDA
extern "C" int launch_rotary(int64_t dtype, const void* x, int64_t x_stride_s, int64_t x_stride_b,
                             int64_t x_stride_n, const float* cosine, const float* sine, void* out,
                             int64_t out_stride_s, int64_t out_stride_b, int64_t out_stride_n,
                             int64_t s, int64_t b, int64_t n, int64_t d, int64_t dim,
                             int64_t interleaved, int64_t backward, void* stream);
#endif

namespace ml {
namespace {

void check_table(const Tensor& x, const Tensor& table, const Tensor& other, const char* name) {
  ML_CHECK(table.scalar_type() == wide_type(x), name,
           ": dtype must be float32 (float64 of a float64 input)");
  ML_CHECK(table.is_cuda() == x.is_cuda() && table.get_device_index() == x.get_device_index(),
           name, ": lies on another device than the input");
  ML_CHECK(table.dim() == 2 && table.size(0) == x.size(0), name,
           ": must have shape [s, dim / 2] with the input's s");
  ML_CHECK(table.size(1) == other.size(1), name, ": width differs from the cosine's");
  ML_CHECK(2 * table.size(1) <= x.size(3), name, ": rotates more channels than a head has");
  ML_CHECK(table.is_contiguous(), name, ": must be contiguous");
}

}  // namespace

Tensor rotary_op(Tensor x, Tensor cosine, Tensor sine, bool interleaved, bool backward) {
  const DType dtype = element_type(x, "x");
  ML_CHECK(x.dim() == 4, "x: must have shape [s, b, n, d], not ", x.dim(), " dims");
  check_table(x, cosine, cosine, "cosine");
  check_table(x, sine, cosine, "sine");
  refuse_fp64_on_cuda(x, "rotary");
  // Heads are read where they lie in the fused projection's output.
  const Tensor held = x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
  const int64_t s = x.size(0), b = x.size(1), n = x.size(2), d = x.size(3);
  Tensor out = new_like(x);
  if (x.numel() == 0) return out;
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_rotary(static_cast<int64_t>(dtype), held.const_data_ptr(), held.stride(0),
                      held.stride(1), held.stride(2),
                      static_cast<const float*>(cosine.const_data_ptr()),
                      static_cast<const float*>(sine.const_data_ptr()), out.mutable_data_ptr(),
                      b * n * d, n * d, d, s, b, n, d, 2 * cosine.size(1), interleaved, backward,
                      stream_of(x)),
        "rotary");
    return out;
  }
#endif
  const Rotary call{dtype,
                    interleaved,
                    held.const_data_ptr(),
                    cosine.const_data_ptr(),
                    sine.const_data_ptr(),
                    out.mutable_data_ptr(),
                    {held.stride(0), held.stride(1), held.stride(2)},
                    b,
                    n,
                    d,
                    cosine.size(1),
                    backward ? -1.0 : 1.0};
  run_rows(s, b * n * d, [&](int64_t first, int64_t last) { rotate_positions(call, first, last); });
  return out;
}

std::tuple<Tensor, Tensor> rotary_pair_op(Tensor q, Tensor k, Tensor cosine, Tensor sine,
                                          bool interleaved, bool backward) {
  check_alike(q, k, "k");
  return {rotary_op(q, cosine, sine, interleaved, backward),
          rotary_op(k, cosine, sine, interleaved, backward)};
}

}  // namespace ml
