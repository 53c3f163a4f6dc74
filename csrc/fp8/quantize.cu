// Quantize a matrix to fp8: rowwise and transposed codes and their scales from a single read.
//
//   x            [rows, cols]  fp32, bf16 or fp16, rows `stride` elements apart
//   codes        [rows, cols]  uint8 (E4M3 or E5M2), or null
//   codes_t      [cols, rows]  uint8, or null
//   scales       stored inverted: value = code * scale_inv
//     tensor     scale [1] fp32 is given; partial [tiles] uint32 or null takes the amax of x
//     rows       scale_inv [ceil(cols/128), rows], scale_inv_t [ceil(rows/128), cols] fp32
//     square     scale_inv [ceil(rows/128), ceil(cols/128)] fp32, for both outputs
//     mx         scale_inv [rows, ceil(cols/32)], scale_inv_t [cols, ceil(rows/32)] E8M0
//
// The transposed output with its scales equals the rowwise output of the transposed x.
// A block of 256 threads takes a tile of 128 x 128 (quantize.cuh). Memory-bound: sizeof(x) + 1
// or + 2 bytes per element and the scales (4 / 128, 4 / 16384 or 1 / 32 bytes per output).
// No sums, no atomics: bits depend on x alone, with stochastic rounding also on the seed and
// the logical position of each element. Limits: at most 2^31 - 1 tiles, sizes < 2^63. Rows that
// are no multiples of 16 bytes, in or out, are read or written element by element.
#include "fp8/quantize.cuh"

namespace ml::fp8 {

template <class T, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, 2) quantize(Arguments a) {
  constexpr bool kTwoScales = kScaling == Scaling::rows || kScaling == Scaling::mx;
  ML_SHARED(uint32_t, columns, kTile * kTile / 4);
  const Place p = place_of_thread(a);
  Tile<T> tile;
  tile.load(a, p);

  float row_factor[8];
  float4 col_factor[2];
  if constexpr (kTwoScales) {
    scale_rows<kScaling>(a, tile, p, row_factor);
    if (a.codes_t != nullptr) scale_columns<kScaling>(a, tile, p, col_factor);
  } else {
    float factor;
    if constexpr (kScaling == Scaling::square) {
      factor = scale_from_amax(amax_of_tile(tile), a.rule);
      if (threadIdx.x == 0)
        store_global(static_cast<float*>(a.scale_inv) + blockIdx.x, inverse_scale(factor));
    } else {
      factor = load_global(a.scale);
      if (a.partial != nullptr) {
        const uint32_t most = amax_of_tile(tile);
        if (threadIdx.x == 0) store_global(a.partial + blockIdx.x, most);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) row_factor[i] = factor;
  }

#pragma unroll
  for (int upper = 0; upper < 8; upper += 4) {
    uint32_t codes[4][2];
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint32_t codes_t[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 x = tile.four(upper + i, quarter);
        const float f = row_factor[upper + i];
        const float4 by_row = times(x, make_float4(f, f, f, f));
        if (a.stochastic) {
          const int64_t element = a.stream.start + (p.row + upper + i) * a.stream.row_stride +
                                  p.col + 4 * quarter;
          const uint4 words = words_at(static_cast<uint64_t>(element), a.stream.key, a.stream.c2,
                                       a.stream.c3);
          codes[i][quarter] = encode_stochastic4(by_row, words, a.format.e5m2);
          codes_t[i] = codes[i][quarter];
          if (kTwoScales && a.codes_t != nullptr)
            codes_t[i] =
                encode_stochastic4(times(x, col_factor[quarter]), words, a.format.e5m2);
        } else {
          codes[i][quarter] = encode_nearest4(by_row, a.format.e5m2);
          codes_t[i] = codes[i][quarter];
          if (kTwoScales && a.codes_t != nullptr)
            codes_t[i] = encode_nearest4(times(x, col_factor[quarter]), a.format.e5m2);
        }
      }
      if (a.codes_t != nullptr) {
        const uint4 words = transposed(codes_t);
        const int column = 8 * p.group + 4 * quarter;
        const int word = (4 * p.warp + 2 * p.half + upper / 4) ^ swizzle(p.group);
        store_shared(columns + 32 * column + word, words.x);
        store_shared(columns + 32 * (column + 1) + word, words.y);
        store_shared(columns + 32 * (column + 2) + word, words.z);
        store_shared(columns + 32 * (column + 3) + word, words.w);
      }
    }
    if (a.codes != nullptr) {
      store_row_pair(a, p, upper, codes[0], codes[1]);
      store_row_pair(a, p, upper + 2, codes[2], codes[3]);
    }
  }
  if (a.codes_t == nullptr) return;
  __syncthreads();
  store_transposed(a, p, columns);
}

inline bool sixteen(const void* pointer, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && row_bytes % 16 == 0;
}

template <class T>
int launch_quantize(Arguments a, int64_t scaling, void* stream) {
  const int64_t tiles = ceil_div(a.rows, kTile) * ceil_div(a.cols, kTile);
  if (a.rows == 0 || a.cols == 0) return 0;
  if (tiles > 0x7fffffff) return kInvalidValue;
  a.vector_loads = vectorizable(static_cast<const T*>(a.x), a.stride);
  a.vector_codes = sixteen(a.codes, a.cols);
  a.vector_codes_t = sixteen(a.codes_t, a.rows);
  const auto run = [&](auto kernel) {
    return ML_LAUNCH(kernel, static_cast<unsigned>(tiles), kThreads, 0, stream, a);
  };
  switch (static_cast<Scaling>(scaling)) {
    case Scaling::tensor: return run(quantize<T, Scaling::tensor>);
    case Scaling::rows: return run(quantize<T, Scaling::rows>);
    case Scaling::square: return run(quantize<T, Scaling::square>);
    case Scaling::mx: return run(quantize<T, Scaling::mx>);
  }
  return kInvalidValue;
}

}  // namespace ml::fp8

// scaling: 0 tensor, 1 rows, 2 square, 3 mx. epsilon and power_of_two matter for rows and
// square. With stochastic != 0, element (i, j) takes the word of the logical element
// element_start + i * element_stride + j under (seed; c2, c3).
ML_EXPORT int launch_fp8_quantize(const void* x, int64_t dtype, int64_t rows, int64_t cols,
                                  int64_t stride, int64_t scaling, int64_t e5m2, uint8_t* codes,
                                  uint8_t* codes_t, const float* scale, void* scale_inv,
                                  void* scale_inv_t, uint32_t* partial, float epsilon,
                                  int64_t power_of_two, int64_t stochastic, int64_t seed,
                                  int64_t c2, int64_t c3, int64_t element_start,
                                  int64_t element_stride, void* stream) {
  using namespace ml;
  if (rows < 0 || cols < 0 || (rows > 1 && stride < cols)) return kInvalidValue;
  fp8::Arguments a{};
  a.x = x;
  a.rows = rows;
  a.cols = cols;
  a.stride = stride;
  a.codes = codes;
  a.codes_t = codes_t;
  a.scale = scale;
  a.scale_inv = scale_inv;
  a.scale_inv_t = scale_inv_t;
  a.partial = partial;
  a.format = e5m2 != 0 ? fp8::kE5M2 : fp8::kE4M3;
  a.rule = {e5m2 != 0 ? 57344.0f : 448.0f, epsilon, power_of_two != 0};
  const auto bits = static_cast<uint64_t>(seed);
  a.stream = {make_uint2(static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)),
              static_cast<uint32_t>(c2), static_cast<uint32_t>(c3), element_start,
              element_stride};
  a.stochastic = stochastic != 0;
  return with_dtype(dtype, [&](auto zero) {
    return fp8::launch_quantize<decltype(zero)>(a, scaling, stream);
  });
}
