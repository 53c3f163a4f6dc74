// RMSNorm and LayerNorm over rows, with an optional residual added first, and their gradients.
//
//   x, residual, grad, grad_sum  [rows, h]  T, rows at any stride
//   weight, bias                 [h]        T; weight_offset 1: the stored weight is w - 1
//   sum, out, grad_x             [rows, h]  T, contiguous
//   mean, inverse                [rows]     float (double of double)
//   parts                        [kinds, num_parts, h]  sums over a part's rows
//
// Arithmetic is float (double); the variance is of two passes. A row stays in the first-level
// cache between its passes. Memory-bound as the CUDA kernels. Parts depend on the sizes only
// and are added in order by the caller: the same bits for any number of threads.
#include "norm/cpu/norm.h"

#include <cmath>

#include "cpu/vector.h"

namespace ml {
namespace ML_ISA {
namespace {

// Sum over i of term(i, count), in four running vectors.
template <class A, class Term>
ML_INLINE A row_sum(int64_t n, const Term& term) {
  constexpr int64_t W = kLanes<A>;
  Vector<A> s[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) s[j] += term(i + j * W, W);
  for (; i + W <= n; i += W) s[0] += term(i, W);
  A tail = 0;
  if (i < n) {
    const Vector<A> last = term(i, n - i);
    for (int64_t j = 0; j < n - i; ++j) tail += last[j];
  }
  return sum<A>((s[0] + s[1]) + (s[2] + s[3])) + tail;
}

template <class T, bool Layer>
void forward_rows(const NormForward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  const int64_t h = c.h;
  const T* weight = static_cast<const T*>(c.weight);
  const T* bias = static_cast<const T*>(c.bias);
  const A offset = static_cast<A>(c.weight_offset);
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
    T* out = static_cast<T*>(c.out) + row * h;
    if (c.residual != nullptr) {
      const T* residual = static_cast<const T*>(c.residual) + row * c.residual_stride;
      T* added = static_cast<T*>(c.sum) + row * h;
      for_each_vector<A>(h, [&](int64_t i, int64_t n) {
        store_part(added + i, load_part(x + i, n) + load_part(residual + i, n), n);
      });
      x = added;
    }
    A mean = 0;
    if (Layer) {
      mean = row_sum<A>(h, [&](int64_t i, int64_t n) { return load_part(x + i, n); }) / A(h);
      static_cast<A*>(c.mean)[row] = mean;
    }
    const A squares = row_sum<A>(h, [&](int64_t i, int64_t n) {
      const Vector<A> centred = load_part(x + i, n) - mean;
      return centred * centred;
    });
    const A inverse = A(1) / std::sqrt(squares / A(h) + static_cast<A>(c.eps));
    static_cast<A*>(c.inverse)[row] = inverse;
    for_each_vector<A>(h, [&](int64_t i, int64_t n) {
      Vector<A> value = (load_part(x + i, n) - mean) * inverse;
      value *= load_part(weight + i, n) + offset;
      if (Layer) value += load_part(bias + i, n);
      store_part(out + i, value, n);
    });
  }
}

template <class T, bool Layer>
ML_INLINE void backward_row(const NormBackward& c, int64_t row, Wide<T>* weight_sum,
                            Wide<T>* bias_sum) {
  using A = Wide<T>;
  const int64_t h = c.h;
  const T* grad = static_cast<const T*>(c.grad) + row * c.grad_stride;
  const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
  const T* weight = static_cast<const T*>(c.weight);
  const A offset = static_cast<A>(c.weight_offset);
  const A mean = Layer ? static_cast<const A*>(c.mean)[row] : A(0);
  const A inverse = static_cast<const A*>(c.inverse)[row];
  const auto normed = [&](int64_t i, int64_t n) { return (load_part(x + i, n) - mean) * inverse; };
  const auto weighted = [&](int64_t i, int64_t n) {
    return load_part(grad + i, n) * (load_part(weight + i, n) + offset);
  };
  const A along = row_sum<A>(h, [&](int64_t i, int64_t n) {
                    return weighted(i, n) * normed(i, n);
                  }) / A(h);
  const A level = Layer ? row_sum<A>(h, weighted) / A(h) : A(0);
  T* grad_x = static_cast<T*>(c.grad_x) + row * h;
  const T* beside = c.grad_sum == nullptr
                        ? nullptr
                        : static_cast<const T*>(c.grad_sum) + row * c.grad_sum_stride;
  for_each_vector<A>(h, [&](int64_t i, int64_t n) {
    const Vector<A> g = load_part(grad + i, n), y = normed(i, n);
    Vector<A> value = (g * (load_part(weight + i, n) + offset) - level - y * along) * inverse;
    if (beside != nullptr) value += load_part(beside + i, n);
    store_part(grad_x + i, value, n);
    store_part(weight_sum + i, load_part(weight_sum + i, n) + g * y, n);
    if (Layer) store_part(bias_sum + i, load_part(bias_sum + i, n) + g, n);
  });
}

template <class T, bool Layer>
void backward_parts(const NormBackward& c, int64_t first, int64_t last) {
  using A = Wide<T>;
  for (int64_t part = first; part < last; ++part) {
    A* weight_sum = static_cast<A*>(c.parts) + part * c.h;
    A* bias_sum = weight_sum + (Layer ? c.num_parts * c.h : 0);
    for (int64_t i = 0; i < c.h; ++i) weight_sum[i] = bias_sum[i] = 0;
    const int64_t begin = c.rows * part / c.num_parts, end = c.rows * (part + 1) / c.num_parts;
    for (int64_t row = begin; row < end; ++row)
      backward_row<T, Layer>(c, row, weight_sum, bias_sum);
  }
}

}  // namespace

void norm_forward(const NormForward& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (call.layer) forward_rows<T, true>(call, first, last);
    else forward_rows<T, false>(call, first, last);
  });
}

void norm_backward(const NormBackward& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    if (call.layer) backward_parts<T, true>(call, first, last);
    else backward_parts<T, false>(call, first, last);
  });
}

}  // namespace ML_ISA
}  // namespace ml
