// Tensor-core instructions: mma.sync and ldmatrix, by PTX's lane layouts.
//
// The accumulator is fp32 and is summed over k in ascending order; a GPU's order differs, so
// results agree to rounding, not to the bit.
#pragma once

#include "sim/runtime.h"

namespace sim {

__attribute__((always_inline)) inline void multiply(const Collective& what, float (&acc)[4],
                                                    const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1, Site site) {
  const uint32_t b[2] = {b0, b1};
  Arrival arrival{&what, 0xffffffffu, site, 0, 0, 32, a, b, acc};
  rendezvous(arrival);
}

template <bool Transposed>
__attribute__((always_inline)) inline void load_matrices(int log2_count, uint32_t* registers,
                                                         const void* row, Site site) {
  note_ldmatrix_row(row, 1 << log2_count, site);
  Arrival arrival{&ldmatrix[Transposed][log2_count], 0xffffffffu, site, 0, 0, 32, row, nullptr,
                  registers};
  rendezvous(arrival);
}

}  // namespace sim

// acc[16, 8] += a[16, 16] * b[16, 8], operands bf16.
inline void mma_bf16_16816(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           sim::Site site = sim::Site::here()) {
  sim::multiply(sim::mma_bf16, acc, a, b0, b1, site);
}
// acc[16, 8] += a[16, 16] * b[16, 8], operands fp16.
inline void mma_fp16_16816(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           sim::Site site = sim::Site::here()) {
  sim::multiply(sim::mma_fp16, acc, a, b0, b1, site);
}
// acc[16, 8] += a[16, 32] * b[32, 8], operands fp8 E4M3 (sm_89 and later).
inline void mma_e4m3_16832(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           sim::Site site = sim::Site::here()) {
  sim::multiply(sim::mma_e4m3, acc, a, b0, b1, site);
}

// Lane i gives the address of row i%8 of matrix i/8; lanes beyond the matrices are ignored.
template <bool Transposed = false>
__attribute__((always_inline)) inline void ldmatrix_x1(uint32_t& r, const void* row,
                                                       sim::Site site = sim::Site::here()) {
  sim::load_matrices<Transposed>(0, &r, row, site);
}
template <bool Transposed = false>
__attribute__((always_inline)) inline void ldmatrix_x2(uint32_t (&r)[2], const void* row,
                                                       sim::Site site = sim::Site::here()) {
  sim::load_matrices<Transposed>(1, r, row, site);
}
template <bool Transposed = false>
__attribute__((always_inline)) inline void ldmatrix_x4(uint32_t (&r)[4], const void* row,
                                                       sim::Site site = sim::Site::here()) {
  sim::load_matrices<Transposed>(2, r, row, site);
}
