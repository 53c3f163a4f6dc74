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

int32_t moe_largest(const int32_t* values, int64_t n) {
  int32_t most = -1;
  for (int64_t i = 0; i < n; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

MoePairs moe_pairs(const int32_t* row_of, int64_t assignments, const int32_t* source,
                   int64_t rows) {
  MoePairs found{0, 0, -1};
  for (int64_t a = 0; a < assignments; ++a) found.placed += row_of[a] >= 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (source[row] < 0) continue;
    ++found.filled;
    if (row_of[source[row]] != row && found.wrong < 0) found.wrong = row;
  }
  return found;
}

}  // namespace ML_ISA
}  // namespace ml
