// Activations of the MLP, plain and gated, and their gradients from the saved input.
//
//   x      [t, f] or, gated, [t, 2f] (gate before up)  T, rows at any stride
//   out    [t, f]  T:  act(x)  or  act(min(gate, limit)) * (clamp(up, -limit, limit) + offset)
//   grad   [t, f]  T, gradient of out;  grad_x like x
//   kind   0 gelu (erf), 1 gelu_tanh, 2 silu, 3 squared_relu, 4 quick_gelu: x sigmoid(1.702 x)
//   limit  positive, infinity: none; where gate or up is beyond it its gradient is 0
//
// Arithmetic is fp32, each result is rounded once. A block is 32 vectors wide and 4 rows high
// and strides over rows. Memory-bound, traffic in elements of T: forward 2 * t * f (gated
// 3 * t * f), backward 3 * t * f (gated 5 * t * f). Elements are independent: bitwise repeatable.
// Limits: rows (or f) that 16-byte vectors cannot use are read by single elements.
#include "vectors.cuh"

namespace ml {
namespace {

enum class Kind : int { gelu = 0, gelu_tanh = 1, silu = 2, squared_relu = 3, quick_gelu = 4 };

struct Point {
  float value, slope;
};

constexpr float kRootHalf = 0.70710678118654752f;      // sqrt(1/2)
constexpr float kDensity = 0.39894228040143268f;       // 1 / sqrt(2 pi)
constexpr float kTanhScale = 0.79788456080286536f;     // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;
constexpr float kQuick = 1.702f;
constexpr float kFar = 100.0f;  // the sigmoid is 0 or 1 beyond

// Not fminf, fmaxf: they would hide a NaN.
__device__ inline float below(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float within(float x, float limit) {
  return x < -limit ? -limit : below(x, limit);
}

// Value and slope of the activation; what is not used is not computed.
__device__ inline Point activation(Kind kind, float x) {
  switch (kind) {
    case Kind::gelu: {
      // erfc keeps the far left tail, where 1 + erf would cancel.
      const float share = 0.5f * erfcf(-x * kRootHalf);
      return {x * share, share + x * kDensity * expf(-0.5f * x * x)};
    }
    case Kind::gelu_tanh: {
      const float inner = kTanhScale * (x + kTanhCubic * x * x * x);
      // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), again without cancellation.
      const float share = 1.0f / (1.0f + expf(-2.0f * inner));
      const float tail = 1.0f / (1.0f + expf(2.0f * inner));
      const float steep = 2.0f * kTanhScale * (1.0f + 3.0f * kTanhCubic * x * x);
      return {x * share, share + (tail == 0.0f || share == 0.0f ? 0.0f : x * share * tail * steep)};
    }
    case Kind::silu: {
      const float share = 1.0f / (1.0f + expf(-x));
      const float tail = 1.0f / (1.0f + expf(x));
      return {x * share, share * (1.0f + x * tail)};
    }
    case Kind::quick_gelu: {
      const float y = within(kQuick * x, kFar);  // finite, so that 0 * y is 0
      const float share = 1.0f / (1.0f + expf(-y));
      const float tail = 1.0f / (1.0f + expf(y));
      return {x * share, share * (1.0f + y * tail)};
    }
    default: {
      // Not fmaxf: it would hide a NaN.
      const float positive = x < 0.0f ? 0.0f : x;
      return {positive * positive, 2.0f * positive};
    }
  }
}

template <class T>
struct ActivationArguments {
  const T *x, *grad;
  T *out, *grad_x;
  int64_t x_stride, out_stride, grad_x_stride, t, f;  // grad's rows are out_stride apart
  Kind kind;
  float limit, offset;
};

template <class T, bool Gated, int N>
__global__ void __launch_bounds__(128) activate(ActivationArguments<T> a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * N;
  if (i >= a.f) return;
  const int64_t step = 4 * static_cast<int64_t>(gridDim.y);
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * 4 + threadIdx.y; row < a.t; row += step) {
    const T* x = a.x + row * a.x_stride + i;
    float gate[N], up[N];
    load_elements<N>(x, gate);
    if constexpr (Gated) load_elements<N>(x + a.f, up);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Gated)
        gate[j] = activation(a.kind, below(gate[j], a.limit)).value *
                  (within(up[j], a.limit) + a.offset);
      else
        gate[j] = activation(a.kind, gate[j]).value;
    }
    store_elements<N>(a.out + row * a.out_stride + i, gate);
  }
}

template <class T, bool Gated, int N>
__global__ void __launch_bounds__(128) activate_backward(ActivationArguments<T> a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * N;
  if (i >= a.f) return;
  const int64_t step = 4 * static_cast<int64_t>(gridDim.y);
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * 4 + threadIdx.y; row < a.t; row += step) {
    const T* x = a.x + row * a.x_stride + i;
    float gate[N], up[N], grad[N];
    load_elements<N>(x, gate);
    if constexpr (Gated) load_elements<N>(x + a.f, up);
    load_elements<N>(a.grad + row * a.out_stride + i, grad);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (Gated) {
        const Point point = activation(a.kind, below(gate[j], a.limit));
        const float slope = gate[j] > a.limit ? 0.0f : point.slope;
        gate[j] = grad[j] * (within(up[j], a.limit) + a.offset) * slope;
        up[j] = fabsf(up[j]) > a.limit ? 0.0f : grad[j] * point.value;
      } else {
        gate[j] = grad[j] * activation(a.kind, gate[j]).slope;
      }
    }
    T* grad_x = a.grad_x + row * a.grad_x_stride + i;
    store_elements<N>(grad_x, gate);
    if constexpr (Gated) store_elements<N>(grad_x + a.f, up);
  }
}

template <class T, bool Gated, bool Backward>
int run(const ActivationArguments<T>& a, void* stream) {
  const bool fits = vectorizable(a.x, a.x_stride) && a.f % width<T> == 0 &&
                    vectorizable(Backward ? a.grad : a.out, a.out_stride) &&
                    (!Backward || vectorizable(a.grad_x, a.grad_x_stride));
  const int columns = 32 * (fits ? width<T> : 1);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.f, columns)),
                  grid_size(ceil_div(a.t, 4), 65535));
  const dim3 block(32, 4);
  if constexpr (Backward)
    return fits ? ML_LAUNCH((activate_backward<T, Gated, width<T>>), grid, block, 0, stream, a)
                : ML_LAUNCH((activate_backward<T, Gated, 1>), grid, block, 0, stream, a);
  else
    return fits ? ML_LAUNCH((activate<T, Gated, width<T>>), grid, block, 0, stream, a)
                : ML_LAUNCH((activate<T, Gated, 1>), grid, block, 0, stream, a);
}

bool legal(int64_t kind, float limit, float offset, int64_t t, int64_t f) {
  return kind >= 0 && kind <= static_cast<int64_t>(Kind::quick_gelu) && limit > 0.0f &&
         offset - offset == 0.0f && t >= 0 && f >= 0;
}

}  // namespace
}  // namespace ml

ML_EXPORT int launch_activation_forward(int64_t dtype, int64_t kind, int64_t gated, float limit,
                                        float offset, const void* x, int64_t x_stride, void* out,
                                        int64_t out_stride, int64_t t, int64_t f, void* stream) {
  if (!ml::legal(kind, limit, offset, t, f)) return ml::kInvalidValue;
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const ml::ActivationArguments<T> a{static_cast<const T*>(x), nullptr, static_cast<T*>(out),
                                       nullptr, x_stride, out_stride, 0, t, f,
                                       static_cast<ml::Kind>(kind), limit, offset};
    return gated != 0 ? ml::run<T, true, false>(a, stream) : ml::run<T, false, false>(a, stream);
  });
}

ML_EXPORT int launch_activation_backward(int64_t dtype, int64_t kind, int64_t gated,
                                         float limit, float offset, const void* grad,
                                         int64_t grad_stride, const void* x, int64_t x_stride,
                                         void* grad_x, int64_t grad_x_stride, int64_t t, int64_t f,
                                         void* stream) {
  if (!ml::legal(kind, limit, offset, t, f)) return ml::kInvalidValue;
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const ml::ActivationArguments<T> a{static_cast<const T*>(x), static_cast<const T*>(grad),
                                       nullptr, static_cast<T*>(grad_x), x_stride, grad_stride,
                                       grad_x_stride, t, f, static_cast<ml::Kind>(kind), limit,
                                       offset};
    return gated != 0 ? ml::run<T, true, true>(a, stream) : ml::run<T, false, true>(a, stream);
  });
}
