// Activations of the MLP, plain and gated, and their gradients from the saved input.
//
//   x       [rows, f] or, gated, [rows, 2f] (gate before up)  T, rows at any stride
//   out     [rows, f]   T, contiguous:  act(x)  or
//                       act(min(gate, limit)) * (clamp(up, limit) + offset)
//   grad    [rows, f]   T, gradient of out, rows at any stride;  grad_x like x, contiguous
//
// Arithmetic is float (double), each result is rounded once. Where gate or up is beyond the
// limit its gradient is 0. Memory-bound as the CUDA kernel: forward 2 (gated 3) * rows * f
// elements, backward 3 (gated 5). Elements are independent: the same bits for any threads.
#include "activation/cpu/activation.h"

#include "cpu/math.h"

namespace ml {
namespace ML_ISA {
namespace {

template <class A>
struct Point {
  Vector<A> value, slope;
};

// Value and slope of the activation; what is not used is not computed.
template <Activation kind, class A>
ML_INLINE Point<A> activation(Vector<A> x) {
  const Vector<A> one = splat<A>(1);
  if constexpr (kind == Activation::gelu) {
    const Normal<A> normal = normal_of(x);
    const Vector<A> share = x < 0 ? normal.tail : one - normal.tail;
    constexpr A kFar = sizeof(A) == 4 ? 15 : 40;  // the tail beyond is 0
    const Vector<A> near = minimum<A>(splat(kFar), magnitude_of(x));
    return {maximum<A>(Vector<A>{}, x) - near * normal.tail, share + x * normal.density};
  } else if constexpr (kind == Activation::gelu_tanh) {
    constexpr A kScale = A(0.79788456080286535588), kCubic = A(0.044715);
    const A far = A(15);  // the tails are 0 beyond; keeps the cube finite
    const Vector<A> c = minimum<A>(splat(far), maximum<A>(splat(-far), x));
    const Vector<A> twice = 2 * kScale * (c + kCubic * c * c * c);
    const Vector<A> e = exp_falling(minus_magnitude_of(twice));
    // (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), without cancellation in either tail.
    const Vector<A> near = reciprocal_of(one + e), tail = e * near;
    const Vector<A> share = x < 0 ? tail : near;
    const Vector<A> steep = 2 * kScale * (one + 3 * kCubic * c * c);
    return {x * share, share + c * near * tail * steep};
  } else if constexpr (kind == Activation::silu) {
    const Vector<A> e = exp_falling(minus_magnitude_of(x));
    const Vector<A> near = reciprocal_of(one + e), tail = e * near;
    const Vector<A> share = x < 0 ? tail : near, other = x < 0 ? near : tail;
    return {x * share, share * (one + x * other)};
  } else if constexpr (kind == Activation::quick_gelu) {
    const A far = sizeof(A) == 4 ? A(100) : A(800);  // the tails are 0 beyond; keeps y finite
    const Vector<A> y = minimum<A>(splat(far), maximum<A>(splat(-far), A(1.702) * x));
    const Vector<A> e = exp_falling(minus_magnitude_of(y));
    const Vector<A> near = reciprocal_of(one + e), tail = e * near;
    const Vector<A> share = y < 0 ? tail : near, other = y < 0 ? near : tail;
    return {x * share, share * (one + y * other)};
  } else {
    const Vector<A> positive = maximum<A>(Vector<A>{}, x);  // NaN stays
    return {positive * positive, 2 * positive};
  }
}

template <class T, Activation kind, bool Gated>
void forward_rows(const ActivationForward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  const int64_t f = c.f;
  const Vector<A> limit = splat(static_cast<A>(c.limit));
  const Vector<A> offset = splat(static_cast<A>(c.offset));
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
    T* out = static_cast<T*>(c.out) + row * f;
    for_each_vector<A>(f, [&](int64_t i, int64_t n) {
      Vector<A> gate = load_part(x + i, n);
      if constexpr (Gated) {
        Vector<A> up = load_part(x + f + i, n);
        gate = minimum<A>(limit, gate);  // NaN stays
        up = minimum<A>(limit, maximum<A>(-limit, up)) + offset;
        store_part(out + i, activation<kind, A>(gate).value * up, n);
      } else {
        store_part(out + i, activation<kind, A>(gate).value, n);
      }
    });
  }
}

template <class T, Activation kind, bool Gated>
void backward_rows(const ActivationBackward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  const int64_t f = c.f;
  const Vector<A> limit = splat(static_cast<A>(c.limit)), zero{};
  const Vector<A> offset = splat(static_cast<A>(c.offset));
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
    const T* grad = static_cast<const T*>(c.grad) + row * c.grad_stride;
    T* grad_x = static_cast<T*>(c.grad_x) + row * (Gated ? 2 * f : f);
    for_each_vector<A>(f, [&](int64_t i, int64_t n) {
      const Vector<A> gate = load_part(x + i, n), g = load_part(grad + i, n);
      if constexpr (Gated) {
        const Vector<A> up = load_part(x + f + i, n);
        const Point<A> point = activation<kind, A>(minimum<A>(limit, gate));
        const Vector<A> linear = minimum<A>(limit, maximum<A>(-limit, up)) + offset;
        const Vector<A> grad_gate = g * linear * point.slope, grad_up = g * point.value;
        store_part(grad_x + i, gate > limit ? zero : grad_gate, n);
        store_part(grad_x + f + i, magnitude_of(up) > limit ? zero : grad_up, n);
      } else {
        store_part(grad_x + i, g * activation<kind, A>(gate).slope, n);
      }
    });
  }
}

// Calls body with the kind and whether it is gated as constants.
template <class Body>
ML_INLINE void with_kind(Activation kind, bool gated, const Body& body) {
  const auto gate = [&](auto constant) {
    if (gated) body(constant, std::true_type{});
    else body(constant, std::false_type{});
  };
  switch (kind) {
    case Activation::gelu:
      return gate(std::integral_constant<Activation, Activation::gelu>{});
    case Activation::gelu_tanh:
      return gate(std::integral_constant<Activation, Activation::gelu_tanh>{});
    case Activation::silu:
      return gate(std::integral_constant<Activation, Activation::silu>{});
    case Activation::squared_relu:
      return gate(std::integral_constant<Activation, Activation::squared_relu>{});
    case Activation::quick_gelu:
      return gate(std::integral_constant<Activation, Activation::quick_gelu>{});
  }
}

}  // namespace

void activation_forward(const ActivationForward& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    with_kind(call.kind, call.gated, [&](auto kind, auto gated) {
      forward_rows<decltype(element), decltype(kind)::value, decltype(gated)::value>(call, first,
                                                                                     last);
    });
  });
}

void activation_backward(const ActivationBackward& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    with_kind(call.kind, call.gated, [&](auto kind, auto gated) {
      backward_rows<decltype(element), decltype(kind)::value, decltype(gated)::value>(call, first,
                                                                                      last);
    });
  });
}

}  // namespace ML_ISA
}  // namespace ml
