// Values of fp8 codes: code * scale_inv, rounded once to the type of the output.
//
//   codes      [rows, cols]  uint8 (E4M3 or E5M2)
//   scale_inv  as quantize.cu stores it for these codes: tensor [1], rows [ceil(cols/128), rows],
//              square [ceil(rows/128), ceil(cols/128)] fp32; mx [rows, ceil(cols/32)] E8M0
//   out        [rows, cols]  fp32, bf16 or fp16
//
// Transposed codes are the codes of a transposed matrix: the same call (square: with transposed
// scales). A thread takes the codes of one 16-byte store. Memory-bound: 1 + sizeof(out) bytes
// per element and the scales. The product is rounded to fp32 first; NaN leaves as one canonical
// NaN. Elementwise: bitwise repeatable. Limits: rows * cols < 2^63; rows that are no multiples
// of a vector go element by element.
#include "fp8/quantize.cuh"

namespace ml::fp8 {

// As the code itself says; integers and one exact subtraction.
__device__ inline float decode(uint32_t code, const Format& format) {
  const uint32_t value = code & 0x7fu;
  const int shift = 23 - format.mantissa_bits;
  const auto base = static_cast<uint32_t>(format.subnormal_exponent - 1) << 23;
  float out = __uint_as_float((value << shift) + base);
  if (value < (1u << format.mantissa_bits))
    out = __fadd_rn(__uint_as_float((value << shift) + format.least_normal),
                    -__uint_as_float(format.least_normal));
  if (format.e5m2 && value == 0x7cu) out = __uint_as_float(kInfinity);
  if (value > (format.e5m2 ? 0x7cu : 0x7eu)) out = __uint_as_float(0x7fc00000u);
  return __uint_as_float(__float_as_uint(out) | (code & 0x80u) << 24);
}

struct Codes {
  const uint8_t* codes;
  const void* scale_inv;
  int64_t rows, cols;
  Format format;
};

template <Scaling kScaling>
__device__ inline float scale_at(const Codes& a, int64_t row, int64_t col) {
  const auto* scales = static_cast<const float*>(a.scale_inv);
  if constexpr (kScaling == Scaling::tensor) return load_readonly(scales);
  if constexpr (kScaling == Scaling::rows) return load_readonly(scales + col / 128 * a.rows + row);
  if constexpr (kScaling == Scaling::square)
    return load_readonly(scales + row / 128 * ((a.cols + 127) / 128) + col / 128);
  const uint32_t byte = load_readonly(static_cast<const uint8_t*>(a.scale_inv) +
                                      row * ((a.cols + 31) / 32) + col / 32);
  if (byte == 0xffu) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

// Two elements (one fp32) as a word, NaN always the same.
template <class T>
__device__ inline uint32_t canonical_word(const float* values) {
  uint32_t word = pack_word<T>(values);
  if constexpr (sizeof(T) == 4) return isnan(values[0]) ? 0x7fc00000u : word;
  constexpr uint32_t quiet = std::is_same_v<T, __half> ? 0x7e00u : 0x7fc0u;
  if (isnan(values[0])) word = (word & 0xffff0000u) | quiet;
  if (isnan(values[1])) word = (word & 0xffffu) | quiet << 16;
  return word;
}

template <class T, Scaling kScaling>
__device__ inline void vector_at(const Codes& a, T* out, int64_t row, int64_t col) {
  constexpr int kWords = width<T> / 4;
  const int64_t at = row * a.cols + col;
  uint32_t codes[2];
  if constexpr (kWords == 1) {
    codes[0] = load_streaming(reinterpret_cast<const uint32_t*>(a.codes + at));
  } else {
    const uint2 pair = load_streaming(reinterpret_cast<const uint2*>(a.codes + at));
    codes[0] = pair.x;
    codes[1] = pair.y;
  }
  const float scale = scale_at<kScaling>(a, row, col);
  float values[width<T>];
#pragma unroll
  for (int i = 0; i < width<T>; ++i)
    values[i] = __fmul_rn(decode(codes[i / 4] >> (8 * (i % 4)) & 0xffu, a.format), scale);
  constexpr int kStep = width<T> / 4;
  store_bits(reinterpret_cast<uint4*>(out + at),
             make_uint4(canonical_word<T>(values), canonical_word<T>(values + kStep),
                        canonical_word<T>(values + 2 * kStep),
                        canonical_word<T>(values + 3 * kStep)));
}

template <class T, Scaling kScaling>
__device__ inline void element_at(const Codes& a, T* out, int64_t row, int64_t col) {
  const int64_t at = row * a.cols + col;
  const float code = decode(load_global(a.codes + at), a.format);
  const float value = __fmul_rn(code, scale_at<kScaling>(a, row, col));
  const float pair[2] = {value, value};
  const uint32_t word = canonical_word<T>(pair);
  if constexpr (sizeof(T) == 4)
    store_global(reinterpret_cast<uint32_t*>(out + at), word);
  else
    store_global(reinterpret_cast<uint16_t*>(out + at), static_cast<uint16_t>(word));
}

template <class T, Scaling kScaling, bool kVector>
__global__ void __launch_bounds__(kThreads) dequantize(Codes a, T* out) {
  constexpr int n = kVector ? width<T> : 1;
  const int64_t per_row = a.cols / n, total = a.rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / per_row, col = (i - row * per_row) * n;
    if constexpr (kVector)
      vector_at<T, kScaling>(a, out, row, col);
    else
      element_at<T, kScaling>(a, out, row, col);
  }
}

template <class T, Scaling kScaling>
int launch_dequantize(const Codes& a, T* out, void* stream) {
  const bool vectors = vectorizable(out, a.cols) && a.cols % width<T> == 0 &&
                       reinterpret_cast<uintptr_t>(a.codes) % width<T> == 0;
  const int64_t items = a.rows * a.cols / (vectors ? width<T> : 1);
  const unsigned grid = grid_size(ceil_div(items, kThreads));
  return vectors ? ML_LAUNCH((dequantize<T, kScaling, true>), grid, kThreads, 0, stream, a, out)
                 : ML_LAUNCH((dequantize<T, kScaling, false>), grid, kThreads, 0, stream, a, out);
}

}  // namespace ml::fp8

// scaling: 0 tensor, 1 rows, 2 square, 3 mx, as launch_fp8_quantize.
ML_EXPORT int launch_fp8_dequantize(const uint8_t* codes, int64_t e5m2, int64_t scaling,
                                    const void* scale_inv, void* out, int64_t dtype, int64_t rows,
                                    int64_t cols, void* stream) {
  using namespace ml;
  using fp8::Scaling;
  if (rows < 0 || cols < 0) return kInvalidValue;
  const fp8::Codes a{codes, scale_inv, rows, cols, e5m2 != 0 ? fp8::kE5M2 : fp8::kE4M3};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* values = static_cast<T*>(out);
    switch (static_cast<Scaling>(scaling)) {
      case Scaling::tensor: return fp8::launch_dequantize<T, Scaling::tensor>(a, values, stream);
      case Scaling::rows: return fp8::launch_dequantize<T, Scaling::rows>(a, values, stream);
      case Scaling::square: return fp8::launch_dequantize<T, Scaling::square>(a, values, stream);
      case Scaling::mx: return fp8::launch_dequantize<T, Scaling::mx>(a, values, stream);
    }
    return kInvalidValue;
  });
}
