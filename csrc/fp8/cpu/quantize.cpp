// Quantize tiles of 128 x 128: rowwise and transposed codes and their scales.
//
//   x             [rows, cols]  float, bf16 or fp16, rows `stride` elements apart
//   codes, codes_t, scale_inv, scale_inv_t, partial: layouts as csrc/fp8/quantize.cu
//
// A tile is read twice from the caches: for its maxima, then for its codes, which are collected
// in a tile of bytes and leave as rows and, transposed in blocks of 8 x 8 bytes, as columns.
// About 0.6 to 1.3 ns per element, 1 to 2 ns with the transposed output (AVX-512). Bits depend on
// x alone, with stochastic rounding also on the seed and each element's logical position; equal
// to the CUDA kernel's. No sums: the same for any number of threads.
#include "fp8/cpu/rounding.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kTile = 128, kGroup = 32, kGroups = kTile / kGroup;

struct Tile {
  int64_t row, col, height, width;
  int64_t across, down;  // its place among the tiles
};

ML_INLINE Tile tile_at(const Fp8Quantize& c, int64_t index) {
  const int64_t tiles_wide = (c.cols + kTile - 1) / kTile;
  Tile t;
  t.down = index / tiles_wide;
  t.across = index % tiles_wide;
  t.row = t.down * kTile;
  t.col = t.across * kTile;
  t.height = c.rows - t.row < kTile ? c.rows - t.row : kTile;
  t.width = c.cols - t.col < kTile ? c.cols - t.col : kTile;
  return t;
}

// Calls body(row in the tile, its elements).
template <class T, class Body>
ML_INLINE void for_each_row(const Fp8Quantize& c, const Tile& t, const Body& body) {
  const T* x = static_cast<const T*>(c.x) + t.row * c.stride + t.col;
  for (int64_t i = 0; i < t.height; ++i) body(i, x + i * c.stride);
}

// ---- maxima, as bits of magnitudes -----------------------------------------------------
template <class T>
ML_INLINE uint32_t amax_of_tile(const Fp8Quantize& c, const Tile& t) {
  Words most{};
  for_each_row<T>(c, t, [&](int64_t, const T* x) {
    for_each_vector<float>(t.width, [&](int64_t col, int64_t n) {
      most = larger(most, magnitude_of(load_part(x + col, n)));
    });
  });
  return largest_word(most);
}

// Of groups of 32: rows[row][group of columns], columns[group of rows][column].
struct Maxima {
  alignas(64) uint32_t columns[kGroups][kTile];
  uint32_t rows[kTile][kGroups];
};

template <class T>
ML_INLINE void measure(const Fp8Quantize& c, const Tile& t, Maxima& maxima) {
  if (c.transposed) std::memset(maxima.columns, 0, sizeof maxima.columns);
  for_each_row<T>(c, t, [&](int64_t i, const T* x) {
    Words most[kGroups] = {};
    uint32_t* columns = maxima.columns[i / kGroup];
    for_each_vector<float>(t.width, [&](int64_t col, int64_t n) {
      const Words value = magnitude_of(load_part(x + col, n));
      most[col / kGroup] = larger(most[col / kGroup], value);
      if (!c.transposed) return;
      Words column;
      std::memcpy(&column, columns + col, sizeof column);
      column = larger(column, value);
      std::memcpy(columns + col, &column, sizeof column);
    });
    if (c.scaling == Fp8Scaling::rows) {
      const Words whole = larger(larger(most[0], most[1]), larger(most[2], most[3]));
      maxima.rows[i][0] = largest_word(whole);
    } else {
      for (int group = 0; group < kGroups; ++group)
        maxima.rows[i][group] = largest_word(most[group]);
    }
  });
}

// ---- factors, and scales to memory -----------------------------------------------------
struct Factors {
  alignas(64) float columns[kGroups][kTile];
  float rows[kTile][kGroups];
};

ML_INLINE void fill(Factors& factors, float value) {
  for (int64_t i = 0; i < kTile; ++i)
    for (int group = 0; group < kGroups; ++group) factors.rows[i][group] = value;
}

// 1 x 128 and 128 x 1.
ML_INLINE void scale_long(const Fp8Quantize& c, const Tile& t, const Maxima& maxima,
                          Factors& factors) {
  for (int64_t i = 0; i < t.height; ++i) {
    const float factor = scale_from_amax(maxima.rows[i][0], c.rule);
    for (int group = 0; group < kGroups; ++group) factors.rows[i][group] = factor;
    if (c.rowwise)
      static_cast<float*>(c.scale_inv)[t.across * c.rows + t.row + i] = 1.0f / factor;
  }
  if (!c.transposed) return;
  for (int64_t j = 0; j < t.width; ++j) {
    uint32_t most = 0;
    for (int group = 0; group < kGroups; ++group)
      most = maxima.columns[group][j] > most ? maxima.columns[group][j] : most;
    const float factor = scale_from_amax(most, c.rule);
    for (int group = 0; group < kGroups; ++group) factors.columns[group][j] = factor;
    static_cast<float*>(c.scale_inv_t)[t.down * c.cols + t.col + j] = 1.0f / factor;
  }
}

// 1 x 32 and 32 x 1, powers of two.
template <bool E5m2>
ML_INLINE void scale_mx(const Fp8Quantize& c, const Tile& t, const Maxima& maxima,
                        Factors& factors) {
  const int64_t per_row = (c.cols + kGroup - 1) / kGroup;
  const int64_t per_col = (c.rows + kGroup - 1) / kGroup;
  for (int64_t i = 0; i < t.height; ++i) {
    const int64_t first = (t.row + i) * per_row + t.col / kGroup;
    for (int64_t group = 0; group * kGroup < t.width; ++group) {
      const uint8_t byte = e8m0_from_amax<E5m2>(maxima.rows[i][group]);
      factors.rows[i][group] = factor_from_e8m0(byte);
      if (c.rowwise) static_cast<uint8_t*>(c.scale_inv)[first + group] = byte;
    }
  }
  if (!c.transposed) return;
  for (int64_t j = 0; j < t.width; ++j) {
    uint8_t* bytes = static_cast<uint8_t*>(c.scale_inv_t) + (t.col + j) * per_col + t.row / kGroup;
    for (int64_t group = 0; group * kGroup < t.height; ++group) {
      const uint8_t byte = e8m0_from_amax<E5m2>(maxima.columns[group][j]);
      factors.columns[group][j] = factor_from_e8m0(byte);
      bytes[group] = byte;
    }
  }
}

// ---- codes -----------------------------------------------------------------------------
// A tile of codes; rows of kTile bytes whatever its width is.
struct Bytes {
  alignas(64) uint8_t at[kTile * kTile];
};

template <class T, bool E5m2, bool Stochastic>
void encode_tile(const Fp8Quantize& c, const Tile& t, const Factors& factors, Bytes* by_row,
                 Bytes* by_column) {
  for_each_row<T>(c, t, [&](int64_t i, const T* x) {
    // The next tile's row: rows lie on pages of their own, where the processor does not look ahead.
    for (int64_t j = 0; j < kTile; j += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(x + kTile + j);
    uint32_t room[kWordRoom];
    const uint32_t* words = nullptr;
    if constexpr (Stochastic) {
      const int64_t first = c.start + (t.row + i) * c.row_stride + t.col;
      words = random_words(static_cast<uint64_t>(first), kTile, c, room);
    }
    const auto encode = [&](Vector<float> value, int64_t col) {
      if constexpr (Stochastic) {
        Words word;
        std::memcpy(&word, words + col, sizeof word);
        return encode_stochastic<E5m2>(value, word);
      } else {
        return encode_nearest<E5m2>(value);
      }
    };
    for_each_vector<float>(t.width, [&](int64_t col, int64_t n) {
      const Vector<float> value = load_part(x + col, n);
      if (by_row != nullptr)
        to_bytes(by_row->at + i * kTile + col,
                 encode(value * factors.rows[i][col / kGroup], col));
      if (by_column != nullptr)
        to_bytes(by_column->at + i * kTile + col,
                 encode(value * load(factors.columns[i / kGroup] + col), col));
    });
  });
}

typedef uint64_t Longs __attribute__((vector_size(kVectorBytes)));

// In 8 x 8 blocks of bytes: byte j of row i becomes byte i of row j.
ML_INLINE void transpose_blocks(Longs (&v)[8]) {
  constexpr uint64_t kMasks[3] = {0x00ff00ff00ff00ffull, 0x0000ffff0000ffffull, 0xffffffffull};
  for (int level = 0; level < 3; ++level) {
    const int step = 1 << level, shift = 8 << level;
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const Longs other = ((v[i] >> shift) ^ v[i + step]) & kMasks[level];
      v[i + step] ^= other;
      v[i] ^= other << shift;
    }
  }
}

void transpose(const Bytes& in, const Tile& t, Bytes& out) {
  for (int64_t row = 0; row < t.height; row += 8) {
    for (int64_t col = 0; col < t.width; col += kVectorBytes) {
      Longs v[8];
      for (int i = 0; i < 8; ++i)
        std::memcpy(&v[i], in.at + (row + i) * kTile + col, sizeof v[i]);
      transpose_blocks(v);
      for (int j = 0; j < 8; ++j) {
        uint64_t parts[kVectorBytes / 8];
        std::memcpy(parts, &v[j], sizeof parts);
        for (int block = 0; block < kVectorBytes / 8; ++block)
          std::memcpy(out.at + (col + 8 * block + j) * kTile + row, &parts[block], 8);
      }
    }
  }
}

ML_INLINE void store_bytes(const Bytes& bytes, uint8_t* out, int64_t stride, int64_t rows,
                           int64_t count) {
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(out + i * stride, bytes.at + i * kTile, static_cast<size_t>(count));
}

template <class T, bool E5m2>
void quantize_tile(const Fp8Quantize& c, int64_t index) {
  const Tile t = tile_at(c, index);
  const bool two_scales = c.scaling == Fp8Scaling::rows || c.scaling == Fp8Scaling::mx;
  Factors factors;
  if (two_scales) {
    Maxima maxima;
    measure<T>(c, t, maxima);
    if (c.scaling == Fp8Scaling::rows) scale_long(c, t, maxima, factors);
    else scale_mx<E5m2>(c, t, maxima, factors);
  } else if (c.scaling == Fp8Scaling::square) {
    const float factor = scale_from_amax(amax_of_tile<T>(c, t), c.rule);
    fill(factors, factor);
    static_cast<float*>(c.scale_inv)[index] = 1.0f / factor;
  } else {
    fill(factors, c.scale);
    if (c.with_amax) c.partial[index] = amax_of_tile<T>(c, t);
  }
  Bytes by_row, by_column, turned;
  if (t.height < kTile || t.width < kTile) {
    std::memset(by_row.at, 0, sizeof by_row);  // what lies beyond is transposed too
    std::memset(by_column.at, 0, sizeof by_column);
  }
  Bytes* first = c.rowwise || !two_scales ? &by_row : nullptr;
  Bytes* second = c.transposed && two_scales ? &by_column : nullptr;
  if (c.stochastic) encode_tile<T, E5m2, true>(c, t, factors, first, second);
  else encode_tile<T, E5m2, false>(c, t, factors, first, second);
  if (c.rowwise)
    store_bytes(by_row, c.codes + t.row * c.cols + t.col, c.cols, t.height, t.width);
  if (!c.transposed) return;
  transpose(two_scales ? by_column : by_row, t, turned);
  store_bytes(turned, c.codes_t + t.col * c.rows + t.row, c.rows, t.width, t.height);
}

template <class T>
ML_INLINE void quantize_tiles(const Fp8Quantize& c, int64_t first, int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    if (c.e5m2) quantize_tile<T, true>(c, index);
    else quantize_tile<T, false>(c, index);
  }
}

}  // namespace

void fp8_quantize(const Fp8Quantize& call, int64_t first, int64_t last) {
  switch (call.dtype) {
    case DType::fp32: return quantize_tiles<float>(call, first, last);
    case DType::bf16: return quantize_tiles<Bf16>(call, first, last);
    case DType::fp16: return quantize_tiles<Fp16>(call, first, last);
    case DType::fp64: return;  // refused before
  }
}

}  // namespace ML_ISA
}  // namespace ml
