// Checks and dispatch of accumulate_product.
#include "matrix/api.h"

#include "matrix/cpu/accumulate.h"

namespace ml {
namespace {

constexpr int64_t kBlockUnit = 32, kLargestBlock = 512, kSmallestBlock = 64;

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Sizes cut evenly into blocks of at most `largest`.
int64_t even_block(int64_t size, int64_t largest) {
  const int64_t blocks = (size + largest - 1) / largest;
  return round_up((size + blocks - 1) / blocks, kBlockUnit);
}

void check_matrix(const Tensor& x, const char* name) {
  ML_CHECK(x.dim() == 2, name, ": must have two dims");
  ML_CHECK(x.size(1) <= 1 || x.stride(1) == 1, name, ": the last dim must be contiguous");
}

}  // namespace

void accumulate_product_op(Tensor main, Tensor a, Tensor b) {
  const DType dtype = element_type(a, "a");
  check_alike(a, b, "b");
  check_matrix(main, "main");
  check_matrix(a, "a");
  check_matrix(b, "b");
  ML_CHECK(main.scalar_type() == wide_type(a),
           "main: must be float32 (float64 with float64 operands)");
  ML_CHECK(a.size(0) == b.size(0), "a, b: first sizes differ: ", a.size(0), " and ", b.size(0));
  check_shape(main, {a.size(1), b.size(1)}, "main");
  const int64_t m = a.size(1), n = b.size(1), t = a.size(0);
  ML_CHECK(m <= 1 || main.stride(0) >= n, "main: rows must not overlap");
  check_apart(main, a, "main", "a");
  check_apart(main, b, "main", "b");
  if (m == 0 || n == 0 || t == 0) return;
  // Large blocks pack less; smaller ones only where threads would be left without work.
  const int64_t columns = even_block(n, kLargestBlock);
  const int64_t column_blocks = (n + columns - 1) / columns;
  const int64_t threads = torch::stable::get_num_threads();
  int64_t largest = kLargestBlock;
  while (threads > 1 && largest > kSmallestBlock &&
         (m + largest - 1) / largest * column_blocks < 4 * threads)
    largest /= 2;
  const int64_t rows = even_block(m, largest);
  const AccumulateProduct call{dtype,
                               main.mutable_data_ptr(),
                               a.const_data_ptr(),
                               b.const_data_ptr(),
                               main.stride(0),
                               a.stride(0),
                               b.stride(0),
                               t,
                               m,
                               n,
                               rows,
                               columns,
                               column_blocks};
  const int64_t blocks = (m + rows - 1) / rows * column_blocks;
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    accumulate_product(call, first, last);
  });
}

}  // namespace ml
