// Amax, scales from amax, the update of delayed scaling, and the values of codes.
//
//   x            rows of float, bf16 or fp16; partial [rows] bits of the largest magnitude
//   amax, scale, scale_inv  [n] float;  history [length, n] float
//   codes        [rows, cols] uint8, scale_inv as quantized; out [rows, cols] float, bf16, fp16
//
// The same definitions and bits as csrc/fp8/scaling.cu and dequantize.cu. Memory-bound: amax
// reads x once; values read 1 byte and write an element. No sums: the same for any number of
// threads.
#include "fp8/cpu/rounding.h"

namespace ml {
namespace ML_ISA {
namespace {

template <class T>
ML_INLINE void amax_rows(const Fp8Amax& c, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(c.x) + row * c.stride;
    const int64_t rest = c.limit - row * c.stride, cols = rest < c.cols ? rest : c.cols;
    Words most[4] = {};
    int64_t i = 0;
    for (; i + 4 * kWordLanes <= cols; i += 4 * kWordLanes)
      for (int j = 0; j < 4; ++j)
        most[j] = larger(most[j], magnitude_of(load(x + i + j * kWordLanes)));
    for_each_vector<float>(cols - i, [&](int64_t at, int64_t n) {
      most[0] = larger(most[0], magnitude_of(load_part(x + i + at, n)));
    });
    c.partial[row] = largest_word(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  }
}

ML_INLINE float scale_of(const Fp8Dequantize& c, int64_t row, int64_t col) {
  const float* scales = static_cast<const float*>(c.scale_inv);
  switch (c.scaling) {
    case Fp8Scaling::tensor: return scales[0];
    case Fp8Scaling::rows: return scales[col / 128 * c.rows + row];
    case Fp8Scaling::square: return scales[row / 128 * ((c.cols + 127) / 128) + col / 128];
    case Fp8Scaling::mx: break;
  }
  return value_of_e8m0(
      static_cast<const uint8_t*>(c.scale_inv)[row * ((c.cols + 31) / 32) + col / 32]);
}

template <class T, bool E5m2>
void dequantize_rows(const Fp8Dequantize& c, int64_t first, int64_t last) {
  const int64_t block = c.scaling == Fp8Scaling::mx ? 32 : 128;
  for (int64_t row = first; row < last; ++row) {
    const uint8_t* codes = c.codes + row * c.cols;
    T* out = static_cast<T*>(c.out) + row * c.cols;
    for (int64_t col = 0; col < c.cols; col += block) {
      const float scale = scale_of(c, row, col);
      const int64_t count = c.cols - col < block ? c.cols - col : block;
      for_each_vector<float>(count, [&](int64_t i, int64_t n) {
        const uint8_t* from = codes + col + i;
        uint8_t some[kWordLanes] = {};
        if (n < kWordLanes) {
          for (int64_t j = 0; j < n; ++j) some[j] = from[j];
          from = some;
        }
        const Vector<float> value = decode<E5m2>(from_bytes(from)) * scale;
        const Vector<float> nan = reinterpret_cast<Vector<float>>(splat_words(kQuietNan));
        store_part(out + col + i, value == value ? value : nan, n);
      });
    }
  }
}

template <class T>
ML_INLINE void dequantize_as(const Fp8Dequantize& c, int64_t first, int64_t last) {
  if (c.e5m2) dequantize_rows<T, true>(c, first, last);
  else dequantize_rows<T, false>(c, first, last);
}

}  // namespace

void fp8_amax(const Fp8Amax& call, int64_t first, int64_t last) {
  switch (call.dtype) {
    case DType::fp32: return amax_rows<float>(call, first, last);
    case DType::bf16: return amax_rows<Bf16>(call, first, last);
    case DType::fp16: return amax_rows<Fp16>(call, first, last);
    case DType::fp64: return;  // refused before
  }
}

void fp8_dequantize(const Fp8Dequantize& call, int64_t first, int64_t last) {
  switch (call.dtype) {
    case DType::fp32: return dequantize_as<float>(call, first, last);
    case DType::bf16: return dequantize_as<Bf16>(call, first, last);
    case DType::fp16: return dequantize_as<Fp16>(call, first, last);
    case DType::fp64: return;  // refused before
  }
}

void fp8_scales(const Fp8Scales& c, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    c.scale[i] = scale_from_amax(float_to_bits(c.amax[i]) & 0x7fffffffu, c.rule);
    c.scale_inv[i] = 1.0f / c.scale[i];
  }
}

// The largest finite amax of the history (or the last one) gives the next scale; without one
// above 0 the old scale stays. Then rows move up by one: row 1 is forgotten, row 0 is 0.
void fp8_delayed(const Fp8Delayed& c, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const uint32_t newest = float_to_bits(c.history[i]);
    uint32_t most = (newest & 0x7fffffffu) < kInfinity ? newest & 0x7fffffffu : 0;
    for (int64_t row = 1; row < c.length; ++row) {
      const uint32_t past = float_to_bits(c.history[row * c.n + i]) & 0x7fffffffu;
      if (!c.most_recent && past < kInfinity) most = past > most ? past : most;
      if (row > 1) c.history[(row - 1) * c.n + i] = c.history[row * c.n + i];
    }
    if (c.length > 1) c.history[(c.length - 1) * c.n + i] = bits_to_float(newest);
    c.history[i] = 0.0f;
    float value = c.scale[i];
    if (most != 0) {
      value = scale_from_amax(most, c.rule) * c.margin_factor;
      // A large margin must not leave the range in which the inverse is finite.
      const float least = bits_to_float(0x00800000u), largest = bits_to_float(kLargestFloat);
      value = value < least ? least : value > largest ? largest : value;
    }
    c.scale[i] = value;
    c.scale_inv[i] = 1.0f / value;
  }
}

}  // namespace ML_ISA
}  // namespace ml
