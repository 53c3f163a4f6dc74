// AdamW on a flat range: decoupled weight decay, clip scale and low-precision copy in one pass.
//
//   weight, exp_avg, exp_avg_sq  [n] fp32, updated in place
//   grad       [n] fp32, only read
//   copy       [n] bf16 or fp16 of the new weight, or null
//   clip       one fp32 on the device that multiplies every gradient, or null
//   skip       one int32 on the device, or null; not 0: nothing is written
//
// w *= 1 - lr wd;  m += (1 - beta1)(g - m);  v = beta2 v + (1 - beta2) g^2;
// w -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps).  The powers are
// computed in fp64 on the host. Source: Loshchilov and Hutter, arXiv 1711.05101.
// A thread takes vectors of four elements. Memory-bound: traffic = 28 * n bytes (+ 2 * n with
// a copy). Elements are independent: bitwise repeatable, whatever the cut into ranges.
// Limits: pointers that 16-byte (copy: 8-byte) vectors cannot use take single elements.
#include "vectors.cuh"

namespace ml {
namespace {

struct AdamW {
  float beta1, beta2, eps, decay, step_size, second_scale;
};

template <class C>
struct AdamWArguments {
  float *weight, *exp_avg, *exp_avg_sq;
  const float *grad, *clip;
  C* copy;
  const int32_t* skip;
  int64_t n;
  AdamW rule;
};

struct Element {
  float w, m, v;
};

__device__ inline Element updated(Element e, float g, const AdamW& rule) {
  e.m += (1.0f - rule.beta1) * (g - e.m);
  e.v = rule.beta2 * e.v + (1.0f - rule.beta2) * g * g;
  const float root = sqrtf(e.v) * rule.second_scale + rule.eps;
  e.w = e.w * rule.decay - rule.step_size * e.m / root;
  return e;
}

template <class C>
__device__ inline void update_one(const AdamWArguments<C>& a, int64_t i, float clip) {
  const Element e = updated({load_global(a.weight + i), load_global(a.exp_avg + i),
                             load_global(a.exp_avg_sq + i)},
                            load_global(a.grad + i) * clip, a.rule);
  store_global(a.weight + i, e.w);
  store_global(a.exp_avg + i, e.m);
  store_global(a.exp_avg_sq + i, e.v);
  if (a.copy != nullptr) store_global(a.copy + i, from_float<C>(e.w));
}

template <class C>
__device__ inline void update_vector(const AdamWArguments<C>& a, int64_t i, float clip) {
  float w[4], m[4], v[4], g[4];
  load_vector(a.weight + i, w);
  load_vector(a.exp_avg + i, m);
  load_vector(a.exp_avg_sq + i, v);
  load_vector(a.grad + i, g);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Element e = updated({w[j], m[j], v[j]}, g[j] * clip, a.rule);
    w[j] = e.w;
    m[j] = e.m;
    v[j] = e.v;
  }
  store_vector(a.weight + i, w);
  store_vector(a.exp_avg + i, m);
  store_vector(a.exp_avg_sq + i, v);
  if (a.copy != nullptr)
    store_bits(reinterpret_cast<uint2*>(a.copy + i),
               make_uint2(pack_word<C>(w), pack_word<C>(w + 2)));
}

template <class C, bool Vector>
__global__ void __launch_bounds__(256) adamw(AdamWArguments<C> a) {
  if (a.skip != nullptr && load_readonly(a.skip) != 0) return;
  const float clip = a.clip != nullptr ? load_readonly(a.clip) : 1.0f;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t whole = Vector ? a.n / 4 * 4 : 0;
  for (int64_t i = thread * 4; i < whole; i += threads * 4) update_vector(a, i, clip);
  for (int64_t i = whole + thread; i < a.n; i += threads) update_one(a, i, clip);
}

template <class C>
int run(const AdamWArguments<C>& a, void* stream) {
  const bool fits = vectorizable(a.weight, 0) && vectorizable(a.grad, 0) &&
                    vectorizable(a.exp_avg, 0) && vectorizable(a.exp_avg_sq, 0) &&
                    reinterpret_cast<uintptr_t>(a.copy) % 8 == 0;
  const unsigned grid = grid_size(ceil_div(a.n, fits ? 1024 : 256));
  return fits ? ML_LAUNCH((adamw<C, true>), grid, 256, 0, stream, a)
              : ML_LAUNCH((adamw<C, false>), grid, 256, 0, stream, a);
}

}  // namespace
}  // namespace ml

// copy_dtype: 1 = bf16, 2 = fp16 (any with copy null); step counts from 1.
ML_EXPORT int launch_adamw(float* weight, const float* grad, float* exp_avg, float* exp_avg_sq,
                           void* copy, int64_t copy_dtype, const float* clip,
                           const int32_t* skip, int64_t n, double lr, double beta1, double beta2,
                           double eps, double weight_decay, int64_t step, void* stream) {
  if (n < 0 || step < 1) return ml::kInvalidValue;
  const double power = static_cast<double>(step);
  const ml::AdamW rule{
      static_cast<float>(beta1), static_cast<float>(beta2), static_cast<float>(eps),
      static_cast<float>(1.0 - lr * weight_decay),
      static_cast<float>(lr / (1.0 - pow(beta1, power))),
      static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, power)))};
  if (copy == nullptr || static_cast<ml::DType>(copy_dtype) == ml::DType::bf16)
    return ml::run<__nv_bfloat16>({weight, exp_avg, exp_avg_sq, grad, clip,
                                   static_cast<__nv_bfloat16*>(copy), skip, n, rule},
                                  stream);
  if (static_cast<ml::DType>(copy_dtype) != ml::DType::fp16) return ml::kInvalidValue;
  return ml::run<__half>({weight, exp_avg, exp_avg_sq, grad, clip, static_cast<__half*>(copy),
                          skip, n, rule},
                         stream);
}
