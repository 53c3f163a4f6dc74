// softmax(scale * x) over the last dim, with a causal or a given boolean mask, and its gradient.
//
//   x, grad, y   [b, n, queries, keys]  T, rows of keys at one stride
//   out, grad_x  [b, n, queries, keys]  T, contiguous
//   visible      [b, n, queries, keys]  bytes, 0 hides; strides of b, n, queries may be 0
//
// Arithmetic is float (double), each result is rounded once. causal: query q sees the keys up to
// q + keys - queries (bottom-right). A row without visible keys gives 0. Backward takes the
// stored output: grad_x = scale * y * (grad - sum(grad * y)).
// Exponentials are made once: kept in the output (T float or double) or on the stack; 16-bit
// rows of more than kHeld keys make them again. Memory-bound: traffic 2 (backward 3) * rows *
// keys elements + rows * keys bytes of mask; what is hidden causally is not read. Rows are
// independent: the same bits for any number of threads.
#include "softmax/cpu/softmax.h"

#include "cpu/math.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kHeld = 4096;

template <class A>
constexpr A kNothing = -static_cast<A>(INFINITY);

// Values whose byte is not 0; the others are hidden.
ML_INLINE Vector<float> hide(Vector<float> value, const uint8_t (&visible)[kLanes<float>]) {
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
  Bytes bytes;
  std::memcpy(&bytes, visible, sizeof bytes);
  return __builtin_convertvector(bytes, Ints) != 0 ? value : splat(kNothing<float>);
}
ML_INLINE Vector<double> hide(Vector<double> value, const uint8_t (&visible)[kLanes<double>]) {
  for (int i = 0; i < kLanes<double>; ++i) value[i] = visible[i] != 0 ? value[i] : kNothing<double>;
  return value;
}

// Hides what the mask or the end of the row hides. Whole vectors have n == kLanes<A>.
template <class A>
ML_INLINE Vector<A> hide_some(Vector<A> value, const uint8_t* visible, int64_t n) {
  constexpr int64_t W = kLanes<A>;
  if (visible == nullptr && n == W) return value;
  uint8_t bytes[W];
  if (n == W) {
    std::memcpy(bytes, visible, W);
  } else {
    for (int64_t i = 0; i < W; ++i)
      bytes[i] = i < n ? (visible == nullptr ? uint8_t{1} : visible[i]) : uint8_t{0};
  }
  return hide(value, bytes);
}

template <class T>
ML_INLINE void forward_row(const T* x, const uint8_t* visible, int64_t seen, int64_t keys,
                           Wide<T> scale, T* out) {
  using A = Wide<T>;
  A stack[kHeld];
  A* held = stack;
  if constexpr (sizeof(T) == sizeof(A)) held = out;
  else if (seen > kHeld) held = nullptr;
  const auto value = [&](int64_t i, int64_t n) {
    const uint8_t* bytes = visible == nullptr ? nullptr : visible + i;
    return hide_some<A>(load_part(x + i, n) * scale, bytes, n);
  };
  Vector<A> tops = splat(kNothing<A>);
  for_each_vector<A>(seen, [&](int64_t i, int64_t n) { tops = maximum<A>(value(i, n), tops); });
  A top = largest<A>(tops);
  if (top == kNothing<A>) top = 0;
  Vector<A> sums{};
  for_each_vector<A>(seen, [&](int64_t i, int64_t n) {
    const Vector<A> e = exp_falling(value(i, n) - top);
    if (held != nullptr) store_part(held + i, e, n);
    sums += e;
  });
  const A total = sum<A>(sums), inverse = total == 0 ? A(0) : 1 / total;
  for_each_vector<A>(seen, [&](int64_t i, int64_t n) {
    const Vector<A> e = held != nullptr ? load_part(held + i, n) : exp_falling(value(i, n) - top);
    store_part(out + i, e * inverse, n);
  });
  std::memset(out + seen, 0, static_cast<size_t>(keys - seen) * sizeof(T));
}

template <class T>
void forward_rows(const SoftmaxForward& c, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t q = row % c.queries, head = row / c.queries;
    const uint8_t* visible =
        c.masked ? c.visible + (head / c.n) * c.mask_b + (head % c.n) * c.mask_n + q * c.mask_q
                 : nullptr;
    int64_t seen = c.causal ? q + c.keys - c.queries + 1 : c.keys;
    if (seen < 0) seen = 0;
    forward_row(static_cast<const T*>(c.x) + row * c.x_stride, visible, seen, c.keys,
                static_cast<Wide<T>>(c.scale), static_cast<T*>(c.out) + row * c.keys);
  }
}

template <class T>
void backward_rows(const SoftmaxBackward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  const A scale = static_cast<A>(c.scale);
  for (int64_t row = first; row < last; ++row) {
    const T* grad = static_cast<const T*>(c.grad) + row * c.grad_stride;
    const T* y = static_cast<const T*>(c.y) + row * c.y_stride;
    T* grad_x = static_cast<T*>(c.grad_x) + row * c.keys;
    Vector<A> sums[2] = {};
    int64_t i = 0;
    constexpr int64_t W = kLanes<A>;
    for (; i + 2 * W <= c.keys; i += 2 * W)
      for (int j = 0; j < 2; ++j) sums[j] += load(grad + i + j * W) * load(y + i + j * W);
    for (; i < c.keys; i += W) {
      const int64_t n = c.keys - i < W ? c.keys - i : W;
      sums[0] += load_part(grad + i, n) * load_part(y + i, n);
    }
    const A along = sum<A>(sums[0] + sums[1]);
    for_each_vector<A>(c.keys, [&](int64_t k, int64_t n) {
      store_part(grad_x + k, scale * load_part(y + k, n) * (load_part(grad + k, n) - along), n);
    });
  }
}

}  // namespace

void softmax_forward(const SoftmaxForward& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { forward_rows<decltype(element)>(call, first, last); });
}

void softmax_backward(const SoftmaxBackward& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { backward_rows<decltype(element)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
