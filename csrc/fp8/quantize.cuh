// A tile of 128 x 128 elements, read once, written as fp8 codes in both directions.
//
//   Scaling     tensor: one given scale; rows: 1x128 and, for the transposed output, 128x1;
//               square: 128x128; mx: 1x32 and 32x1 with power-of-two scales
//   Arguments   what a launch knows; Tile: the 8 x 8 elements of a thread, in registers
//
// Threads: 8 warps of 16 rows each; lane = 16 * (rows 0-7 or 8-15) + (which 8 columns). So a
// row is 16 lanes and a column of the warp 2 lanes: amax in both directions takes shuffles,
// then, for columns, one step through shared memory. Codes of a row leave as 16 bytes after an
// exchange with the neighbouring lane; transposed codes are collected in shared memory, where
// the word (column, row / 4) lies at row / 4 ^ swizzle(column): no bank conflicts either way.
#pragma once

#include "fp8/rounding.cuh"

namespace ml::fp8 {

enum class Scaling { tensor, rows, square, mx };

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kWarps = 8;
constexpr unsigned kAll = 0xffffffffu;

struct Arguments {
  const void* x;
  int64_t rows, cols, stride;
  uint8_t* codes;          // [rows, cols] or null
  uint8_t* codes_t;        // [cols, rows] or null
  const float* scale;      // tensor: [1]
  void* scale_inv;         // see quantize.cu
  void* scale_inv_t;
  uint32_t* partial;       // tensor: [tiles] or null
  Format format;
  ScaleRule rule;
  Stream stream;
  bool stochastic, vector_loads, vector_codes, vector_codes_t;
};

struct Place {
  int warp, half, group;  // rows 16 * warp + 8 * half, columns 8 * group
  int64_t row, col;       // of the thread's first element
  int64_t tile_row, tile_col;
};

__device__ inline Place place_of_thread(const Arguments& a) {
  const int64_t tiles_wide = (a.cols + kTile - 1) / kTile;
  Place p;
  p.warp = static_cast<int>(threadIdx.x) / 32;
  p.half = static_cast<int>(threadIdx.x) / 16 % 2;
  p.group = static_cast<int>(threadIdx.x) % 16;
  p.tile_row = blockIdx.x / tiles_wide;
  p.tile_col = blockIdx.x % tiles_wide;
  p.row = p.tile_row * kTile + 16 * p.warp + 8 * p.half;
  p.col = p.tile_col * kTile + 8 * p.group;
  return p;
}

template <class T>
struct Tile {
  static constexpr int kVectors = 8 / width<T>;
  uint4 bits[8][kVectors];

  __device__ void load(const Arguments& a, const Place& p) {
    const T* x = static_cast<const T*>(a.x);
    const bool whole = a.vector_loads && p.col + 8 <= a.cols;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const T* source = x + (p.row + i) * a.stride + p.col;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        bits[i][v] = make_uint4(0, 0, 0, 0);
        if (p.row + i >= a.rows) continue;
        if (whole) {
          bits[i][v] = load_streaming(reinterpret_cast<const uint4*>(source) + v);
        } else {
          float values[width<T>];
#pragma unroll
          for (int j = 0; j < width<T>; ++j) {
            const int at = v * width<T> + j;
            values[j] = p.col + at < a.cols ? to_float(load_global(source + at)) : 0.0f;
          }
          bits[i][v] = pack<T>(values);
        }
      }
    }
  }

  // Elements 4 * quarter .. + 3 of row i.
  __device__ float4 four(int i, int quarter) const {
    float values[width<T>];
    unpack<T>(bits[i][4 * quarter / width<T>], values);
    const int first = 4 * quarter % width<T>;
    return make_float4(values[first], values[first + 1], values[first + 2], values[first + 3]);
  }
};

// ---- amax ------------------------------------------------------------------------------
__device__ inline uint4 max4(uint4 a, float4 x) {
  return make_uint4(max(a.x, magnitude(x.x)), max(a.y, magnitude(x.y)), max(a.z, magnitude(x.z)),
                    max(a.w, magnitude(x.w)));
}

// Of each of the thread's rows, over its own 8 columns.
template <class T>
__device__ inline void amax_of_rows(const Tile<T>& tile, uint32_t (&most)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 m = max4(max4(make_uint4(0, 0, 0, 0), tile.four(i, 0)), tile.four(i, 1));
    most[i] = max(max(m.x, m.y), max(m.z, m.w));
  }
}

template <class T>
__device__ inline uint32_t amax_of_tile(const Tile<T>& tile) {
  ML_SHARED(uint32_t, warps, kWarps);
  uint32_t rows[8];
  amax_of_rows(tile, rows);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, rows[i]);
  most = max_over_lanes<1, 32>(most);
  if (threadIdx.x % 32 == 0) store_shared(&warps[threadIdx.x / 32], most);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = max(most, load_shared(&warps[i]));
  return most;
}

// Of each column over the warp's 16 rows, to shared memory. Column 8 * group + 4 * quarter + q
// is at 64 * quarter + 4 * group + q: consecutive lanes write consecutive vectors.
template <class T>
__device__ inline void amax_of_columns(const Tile<T>& tile, const Place& p, uint32_t* shared) {
  uint4 mine = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int quarter = 0; quarter < 2; ++quarter) {
    uint4 m = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) m = max4(m, tile.four(i, quarter));
    m.x = max_over_lanes<16, 32>(m.x);
    m.y = max_over_lanes<16, 32>(m.y);
    m.z = max_over_lanes<16, 32>(m.z);
    m.w = max_over_lanes<16, 32>(m.w);
    if (quarter == p.half) mine = m;
  }
  store_shared(reinterpret_cast<uint4*>(shared + kTile * p.warp + 64 * p.half + 4 * p.group),
               mine);
}

__device__ inline int column_at(int position) {
  return 8 * (position % 64 / 4) + 4 * (position / 64) + position % 4;
}

// ---- scales: from amax to the factors, and to memory -------------------------------------
// Bytes at [row, first .. first + 3] of [rows, per_row] as one word where that is possible.
__device__ inline void store_exponents(uint8_t* out, int64_t row, int64_t first, int64_t per_row,
                                       uint32_t word) {
  uint8_t* at = out + row * per_row + first;
  if (per_row % 4 == 0) {
    store_global(reinterpret_cast<uint32_t*>(at), word);
    return;
  }
  for (int i = 0; i < 4 && first + i < per_row; ++i)
    store_global(at + i, static_cast<uint8_t>(word >> (8 * i)));
}

template <Scaling kScaling, class T>
__device__ inline void scale_rows(const Arguments& a, const Tile<T>& tile, const Place& p,
                                  float (&factor)[8]) {
  uint32_t most[8];
  amax_of_rows(tile, most);
  float inverse = 0.0f;
  uint32_t exponents = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (kScaling == Scaling::rows) {
      factor[i] = scale_from_amax(max_over_lanes<1, 16>(most[i]), a.rule);
      if (p.group == i) inverse = inverse_scale(factor[i]);
    } else {
      const uint32_t byte = e8m0_from_amax(max_over_lanes<1, 4>(most[i]), a.format);
      factor[i] = factor_from_e8m0(byte);
      // The bytes of the row's four blocks, in every lane of the row.
      uint32_t word = byte << (8 * (p.group / 4));
      word |= __shfl_xor_sync(kAll, word, 4);
      word |= __shfl_xor_sync(kAll, word, 8);
      if (p.group == i) exponents = word;
    }
  }
  if (a.codes == nullptr || p.group >= 8 || p.row + p.group >= a.rows) return;
  if constexpr (kScaling == Scaling::rows)
    store_global(static_cast<float*>(a.scale_inv) + p.tile_col * a.rows + p.row + p.group, inverse);
  else
    store_exponents(static_cast<uint8_t*>(a.scale_inv), p.row + p.group, 4 * p.tile_col,
                    (a.cols + 31) / 32, exponents);
}

// Factors of the thread's 8 columns: for all 128 rows, or for the 32 rows its warp belongs to.
template <Scaling kScaling, class T>
__device__ inline void scale_columns(const Arguments& a, const Tile<T>& tile, const Place& p,
                                     float4 (&factor)[2]) {
  constexpr int kBlocks = kScaling == Scaling::rows ? 1 : 4;
  ML_SHARED(uint32_t, most, kWarps * kTile);
  ML_SHARED(float, factors, kBlocks * kTile);
  amax_of_columns(tile, p, most);
  __syncthreads();
  if (threadIdx.x < kTile) {
    const int position = static_cast<int>(threadIdx.x);
    const int64_t col = p.tile_col * kTile + column_at(position);
    uint32_t exponents = 0;
    float inverse = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t amax = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps / kBlocks; ++warp)
        amax = max(amax, load_shared(&most[(block * kWarps / kBlocks + warp) * kTile + position]));
      float value;
      if constexpr (kScaling == Scaling::rows) {
        value = scale_from_amax(amax, a.rule);
        inverse = inverse_scale(value);
      } else {
        const uint32_t byte = e8m0_from_amax(amax, a.format);
        value = factor_from_e8m0(byte);
        exponents |= byte << (8 * block);
      }
      store_shared(&factors[block * kTile + position], value);
    }
    if (col < a.cols) {
      if constexpr (kScaling == Scaling::rows)
        store_global(static_cast<float*>(a.scale_inv_t) + p.tile_row * a.cols + col, inverse);
      else
        store_exponents(static_cast<uint8_t*>(a.scale_inv_t), col, 4 * p.tile_row,
                        (a.rows + 31) / 32, exponents);
    }
  }
  __syncthreads();
  const int block = kBlocks == 1 ? 0 : p.warp / 2;
#pragma unroll
  for (int quarter = 0; quarter < 2; ++quarter)
    factor[quarter] = load_shared(reinterpret_cast<const float4*>(
        &factors[block * kTile + 64 * quarter + 4 * p.group]));
}

// ---- codes -----------------------------------------------------------------------------
__device__ inline float4 times(float4 x, float4 y) {
  return make_float4(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y), __fmul_rn(x.z, y.z),
                     __fmul_rn(x.w, y.w));
}

// Rows of four bytes to columns of four bytes.
__device__ inline uint4 transposed(const uint32_t (&row)[4]) {
  const uint32_t a = __byte_perm(row[0], row[1], 0x5140);
  const uint32_t b = __byte_perm(row[2], row[3], 0x5140);
  const uint32_t c = __byte_perm(row[0], row[1], 0x7362);
  const uint32_t d = __byte_perm(row[2], row[3], 0x7362);
  return make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                    __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632));
}

__device__ inline int swizzle(int group) { return (group & 1) | ((group & 14) << 1); }

// Sixteen codes at out[0..], of which `valid` exist.
__device__ inline void store_codes(uint8_t* out, uint4 codes, int64_t valid, bool vector) {
  if (vector && valid >= 16) {
    store_streaming(reinterpret_cast<uint4*>(out), codes);
    return;
  }
#pragma unroll 1
  for (int64_t i = 0; i < min(valid, static_cast<int64_t>(16)); ++i) {
    store_global(out + i, static_cast<uint8_t>(codes.x));
    codes.x = __funnelshift_r(codes.x, codes.y, 8);
    codes.y = __funnelshift_r(codes.y, codes.z, 8);
    codes.z = __funnelshift_r(codes.z, codes.w, 8);
    codes.w >>= 8;
  }
}

// Rows `i` and `i + 1` of the thread and its neighbour: 16 columns of one row for each.
__device__ inline void store_row_pair(const Arguments& a, const Place& p, int i,
                                      const uint32_t (&first)[2], const uint32_t (&second)[2]) {
  const bool odd = p.group % 2 != 0;
  const uint32_t x = __shfl_xor_sync(kAll, odd ? first[0] : second[0], 1);
  const uint32_t y = __shfl_xor_sync(kAll, odd ? first[1] : second[1], 1);
  const uint4 codes =
      odd ? make_uint4(x, y, second[0], second[1]) : make_uint4(first[0], first[1], x, y);
  const int64_t row = p.row + i + (odd ? 1 : 0);
  const int64_t col = p.col - (odd ? 8 : 0);
  if (row < a.rows) store_codes(a.codes + row * a.cols + col, codes, a.cols - col, a.vector_codes);
}

__device__ inline void store_transposed(const Arguments& a, const Place& p,
                                        const uint32_t* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int column = 32 * pass + 4 * p.warp + lane / 8;
    const int swizzled = swizzle(column / 8);
    const int word = 4 * (lane % 8);
    uint4 codes = load_shared(
        reinterpret_cast<const uint4*>(shared + 32 * column + (word ^ (swizzled & ~3))));
    if (swizzled & 1) codes = make_uint4(codes.y, codes.x, codes.w, codes.z);
    const int64_t col = p.tile_col * kTile + column;
    const int64_t row = p.tile_row * kTile + 4 * word;
    if (col < a.cols)
      store_codes(a.codes_t + col * a.rows + row, codes, a.rows - row, a.vector_codes_t);
  }
}

}  // namespace ml::fp8
