// Weight gradients straight into the main gradient: main [m, n] += a^T b.
//
//   a     [t, m]  T (fp32, bf16, fp16, fp64), rows at any stride
//   b     [t, n]  T
//   main  [m, n]  Wide<T>, rows at any stride
//
// A block of main takes t in pieces of kDepth: a's piece is packed transposed, b's as right
// operand, both stay in the second-level cache; whole 32 x 32 parts of main are accumulated in
// place, the ragged edge through a small block of its own.
// Bound by arithmetic: 2 t m n FLOPs; traffic 8 m n (t / kDepth) + 2 t (m n / block) bytes.
// Repeatable: an element sums over t in one order, whatever blocks and threads there are.
#include "matrix/cpu/accumulate.h"

#include "matrix/cpu/product.h"
#include "matrix/cpu/scratch.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kDepth = 512;

ML_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One piece's product, into rows [m] and columns [n] of main; sizes are not padded.
template <class T>
void add_piece(Wide<T>* main, int64_t main_stride, const Operand<T>* a, const Operand<T>* b,
               int64_t b_stride, int64_t m, int64_t n, int64_t k) {
  const int64_t whole_m = m / kUnit * kUnit, whole_n = n / kUnit * kUnit;
  multiply<T>(main, main_stride, a, kDepth, b, b_stride, whole_m, whole_n, k, true);
  alignas(64) Wide<T> edge[kUnit * kUnit];
  const auto add_edge = [&](int64_t i0, int64_t j0) {
    multiply<T>(edge, kUnit, a + i0 * kDepth, kDepth, b + right_at<T>(0, j0, b_stride), b_stride,
                kUnit, kUnit, k, false);
    for (int64_t i = 0; i < least(kUnit, m - i0); ++i)
      for (int64_t j = 0; j < least(kUnit, n - j0); ++j)
        main[(i0 + i) * main_stride + j0 + j] += edge[i * kUnit + j];
  };
  for (int64_t i = 0; i < m; i += kUnit)
    for (int64_t j = i < whole_m ? whole_n : 0; j < n; j += kUnit) add_edge(i, j);
}

template <class T>
void accumulate_blocks(const AccumulateProduct& call, int64_t first, int64_t last) {
  const MatrixUnit unit;
  Scratch scratch;
  Operand<T>*left, *right;
  for (int pass = 0; pass < 2; ++pass) {
    scratch.place(left, call.block_rows * kDepth);
    scratch.place(right, right_size(kDepth, call.block_columns));
    if (pass == 0) scratch.allocate();
  }
  const T* const a = static_cast<const T*>(call.a);
  const T* const b = static_cast<const T*>(call.b);
  for (int64_t index = first; index < last; ++index) {
    const int64_t i0 = index / call.column_blocks * call.block_rows;
    const int64_t j0 = index % call.column_blocks * call.block_columns;
    const int64_t m = least(call.block_rows, call.m - i0);
    const int64_t n = least(call.block_columns, call.n - j0);
    for (int64_t p = 0; p < call.t; p += kDepth) {
      const int64_t k = least(kDepth, call.t - p);
      const int64_t stride = right_stride<T>(k, n);
      pack_left_transposed<T>(left, kDepth, a + p * call.a_stride + i0, call.a_stride, m, k);
      pack_right<T>(right, stride, b + p * call.b_stride + j0, call.b_stride, k, n);
      add_piece<T>(static_cast<Wide<T>*>(call.main) + i0 * call.main_stride + j0,
                   call.main_stride, left, right, stride, m, n, padded(k));
    }
  }
}

}  // namespace

void accumulate_product(const AccumulateProduct& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto zero) {
    accumulate_blocks<decltype(zero)>(call, first, last);
  });
}

}  // namespace ML_ISA
}  // namespace ml
