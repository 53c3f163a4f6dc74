// SGD with momentum on a flat range, in one pass with clip scale and low-precision copy.
//
//   weight, momentum  [n] fp32, updated in place; momentum null: none
//   grad              [n] fp32, only read
//   copy              [n] bf16 or fp16 of the new weight, or null
//   clip, skip        one fp32 / one int32 on the device, or null (see adamw.cu)
//
// Decay is coupled, as in torch: g += wd w;  m = mu m + g;  w -= lr m. With `decoupled`,
// w *= 1 - lr wd instead. A momentum of 0 makes the first step m = g.
// A thread takes vectors of four elements. Memory-bound: traffic = 20 * n bytes (12 * n without
// momentum, + 2 * n with a copy). Elements are independent: bitwise repeatable.
// Limits: pointers that 16-byte (copy: 8-byte) vectors cannot use take single elements.
#include "vectors.cuh"

namespace ml {
namespace {

template <class C>
struct SgdArguments {
  float *weight, *momentum;
  const float *grad, *clip;
  C* copy;
  const int32_t* skip;
  int64_t n;
  float lr, mu, coupled_decay, decay;
};

struct Element {
  float w, m;
};

template <class C>
__device__ inline Element updated(const SgdArguments<C>& a, Element e, float g) {
  g += a.coupled_decay * e.w;
  e.m = a.mu * e.m + g;
  e.w = e.w * a.decay - a.lr * e.m;
  return e;
}

template <class C, bool Vector>
__global__ void __launch_bounds__(256) sgd(SgdArguments<C> a) {
  if (a.skip != nullptr && load_readonly(a.skip) != 0) return;
  const float clip = a.clip != nullptr ? load_readonly(a.clip) : 1.0f;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t whole = Vector ? a.n / 4 * 4 : 0;
  for (int64_t i = thread * 4; i < whole; i += threads * 4) {
    float w[4], g[4], m[4] = {};
    load_vector(a.weight + i, w);
    load_vector(a.grad + i, g);
    if (a.momentum != nullptr) load_vector(a.momentum + i, m);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Element e = updated(a, {w[j], m[j]}, g[j] * clip);
      w[j] = e.w;
      m[j] = e.m;
    }
    store_vector(a.weight + i, w);
    if (a.momentum != nullptr) store_vector(a.momentum + i, m);
    if (a.copy != nullptr)
      store_bits(reinterpret_cast<uint2*>(a.copy + i),
                 make_uint2(pack_word<C>(w), pack_word<C>(w + 2)));
  }
  for (int64_t i = whole + thread; i < a.n; i += threads) {
    const float m = a.momentum != nullptr ? load_global(a.momentum + i) : 0.0f;
    const Element e =
        updated(a, {load_global(a.weight + i), m}, load_global(a.grad + i) * clip);
    store_global(a.weight + i, e.w);
    if (a.momentum != nullptr) store_global(a.momentum + i, e.m);
    if (a.copy != nullptr) store_global(a.copy + i, from_float<C>(e.w));
  }
}

template <class C>
int run(const SgdArguments<C>& a, void* stream) {
  const bool fits = vectorizable(a.weight, 0) && vectorizable(a.grad, 0) &&
                    (a.momentum == nullptr || vectorizable(a.momentum, 0)) &&
                    reinterpret_cast<uintptr_t>(a.copy) % 8 == 0;
  const unsigned grid = grid_size(ceil_div(a.n, fits ? 1024 : 256));
  return fits ? ML_LAUNCH((sgd<C, true>), grid, 256, 0, stream, a)
              : ML_LAUNCH((sgd<C, false>), grid, 256, 0, stream, a);
}

}  // namespace
}  // namespace ml

// copy_dtype: 1 = bf16, 2 = fp16 (any with copy null).
ML_EXPORT int launch_sgd(float* weight, const float* grad, float* momentum, void* copy,
                         int64_t copy_dtype, const float* clip, const int32_t* skip, int64_t n,
                         double lr, double mu, double weight_decay, int64_t decoupled,
                         void* stream) {
  if (n < 0) return ml::kInvalidValue;
  const float coupled = decoupled != 0 ? 0.0f : static_cast<float>(weight_decay);
  const float decay = decoupled != 0 ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
  const float rate = static_cast<float>(lr), share = static_cast<float>(mu);
  if (copy == nullptr || static_cast<ml::DType>(copy_dtype) == ml::DType::bf16)
    return ml::run<__nv_bfloat16>({weight, momentum, grad, clip,
                                   static_cast<__nv_bfloat16*>(copy), skip, n, rate, share,
                                   coupled, decay},
                                  stream);
  if (static_cast<ml::DType>(copy_dtype) != ml::DType::fp16) return ml::kInvalidValue;
  return ml::run<__half>({weight, momentum, grad, clip, static_cast<__half*>(copy), skip, n, rate,
                          share, coupled, decay},
                         stream);
}
