// From a top-k routing map to an expert-major order of rows: count, sum, place.
//
//   ids      [assignments]  int32; not in [0, experts): dropped
//   counts   [experts]      int64
//   offsets  [experts + 1]  int64, multiples of `align`
//   row_of   [assignments]  int32, -1 when dropped
//   source   [rows]         int32, -1 for padding
//
// The same integers as csrc/moe/routing.cu. One thread walks the assignments twice in order, so
// rows of an expert keep the order of tokens: 12 * assignments + 4 * rows bytes, about 2 ns per
// assignment, little beside the rows that move. Integers: repeatable.
#include "moe/cpu/moe.h"

namespace ml {
namespace ML_ISA {

void moe_route(const MoeRoute& c) {
  const auto valid = [&](int32_t id) { return id >= 0 && id < c.experts; };
  for (int64_t e = 0; e < c.experts; ++e) c.counts[e] = 0;
  for (int64_t a = 0; a < c.assignments; ++a)
    if (valid(c.ids[a])) ++c.counts[c.ids[a]];
  int64_t start = 0;
  for (int64_t e = 0; e < c.experts; ++e) {
    c.offsets[e] = start;
    start += (c.counts[e] + c.align - 1) / c.align * c.align;
  }
  c.offsets[c.experts] = start;
  for (int64_t row = 0; row < c.rows; ++row) c.source[row] = -1;
  for (int64_t a = 0; a < c.assignments; ++a) {
    const int32_t id = c.ids[a];
    const int32_t row = valid(id) ? static_cast<int32_t>(c.offsets[id]++) : -1;
    c.row_of[a] = row;
    if (row >= 0) c.source[row] = static_cast<int32_t>(a);
  }
  for (int64_t e = 0; e < c.experts; ++e) c.offsets[e] -= c.counts[e];
}

}  // namespace ML_ISA
}  // namespace ml
