// Checks of MoE index maps on the CPU: what would be followed outside its bounds is found first.
//
//   row_of    [assignments]  int32, row of an assignment; -1: dropped
//   source    [rows]         int32, assignment of a row; -1: padding
//
// Memory-bound: 4 bytes per index, of pairs 4 more at a random place. Here, not in the faces,
// because those are compiled without optimization.
#include "moe/cpu/moe.h"

namespace ml {
namespace ML_ISA {

void moe_largest(const int32_t* values, int64_t n, int32_t& most) {
  int32_t found = -1;
  for (int64_t i = 0; i < n; ++i) found = values[i] > found ? values[i] : found;
  most = found;
}

void moe_pairs(MoePairs& pairs) {
  int64_t placed = 0, filled = 0;
  for (int64_t a = 0; a < pairs.assignments; ++a) placed += pairs.row_of[a] >= 0;
  for (int64_t row = 0; row < pairs.rows; ++row) {
    const int32_t a = pairs.source[row];
    filled += a >= 0;
    if (a >= 0 && pairs.row_of[a] != row && pairs.wrong < 0) pairs.wrong = row;
  }
  pairs.placed = placed;
  pairs.filled = filled;
}

}  // namespace ML_ISA
}  // namespace ml
