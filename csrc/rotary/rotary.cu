// Rotary position embedding of queries or keys; its gradient is the opposite rotation.
//
//   x, out        [s, b, n, d]  T, dim d dense, the others at any stride; out may be x
//   cosine, sine  [s, dim / 2]  fp32, dense; dim <= d channels are rotated, the rest copied
//
// Pairs are (i, i + dim/2), or (2i, 2i + 1) when interleaved:
// first' = first cos - second sin, second' = second cos + first sin, in fp32, rounded once.
// A block takes tokens (of s * b) one after the other; its threads share out the heads'
// vectors, pairs first, then the channels that are copied.
// Memory-bound: traffic = 2 * s * b * n * d * sizeof(T) (in place without the copied part);
// the tables come from the caches after the first head. Elements are independent: bitwise
// repeatable.
// Limits: strides, pointers, dim/2 (dim when interleaved) or d that 16-byte vectors cannot use
// are handled by single elements. n * d < 2^31.
#include "vectors.cuh"

namespace ml {
namespace {

struct Strides {
  int64_t s, b, n;
};

template <class T>
struct RotaryArguments {
  const T* x;
  T* out;
  const float *cosine, *sine;
  Strides x_stride, out_stride;
  int64_t s, b, n, d, half;
  float direction;  // 1, or -1 for the gradient
};

// Work items of one head: `pairs` vectors (or pairs of vectors), then `copies` vectors.
struct Items {
  int pairs, copies;
};

template <class T, int N>
__device__ inline void rotate_halves(const RotaryArguments<T>& a, const T* x, T* out,
                                     int64_t table, int64_t i) {
  float first[N], second[N], c[N], s[N];
  load_elements<N>(x + i, first);
  load_elements<N>(x + a.half + i, second);
  load_table(a.cosine + table + i, c);
  load_table(a.sine + table + i, s);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    s[j] *= a.direction;
    const float turned = first[j] * c[j] - second[j] * s[j];
    second[j] = second[j] * c[j] + first[j] * s[j];
    first[j] = turned;
  }
  store_elements<N>(out + i, first);
  store_elements<N>(out + a.half + i, second);
}

template <class T, int N>
__device__ inline void rotate_neighbours(const RotaryArguments<T>& a, const T* x, T* out,
                                         int64_t table, int64_t i) {
  constexpr int M = N == 1 ? 1 : N / 2;  // pairs of an item: item i is a pair or a vector
  const int64_t pair = N == 1 ? i : i / 2;
  float values[2 * M], c[M], s[M];
  if constexpr (N == 1) {
    values[0] = to_float(load_global(x + 2 * pair));
    values[1] = to_float(load_global(x + 2 * pair + 1));
  } else {
    load_elements<N>(x + i, values);
  }
  load_table(a.cosine + table + pair, c);
  load_table(a.sine + table + pair, s);
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s[j] *= a.direction;
    const float turned = values[2 * j] * c[j] - values[2 * j + 1] * s[j];
    values[2 * j + 1] = values[2 * j + 1] * c[j] + values[2 * j] * s[j];
    values[2 * j] = turned;
  }
  if constexpr (N == 1) {
    store_global(out + 2 * pair, from_float<T>(values[0]));
    store_global(out + 2 * pair + 1, from_float<T>(values[1]));
  } else {
    store_elements<N>(out + i, values);
  }
}

template <class T, bool Interleaved, int N>
__global__ void __launch_bounds__(256) rotary(RotaryArguments<T> a, Items items) {
  const int per_head = items.pairs + items.copies;
  const int all = per_head * static_cast<int>(a.n);
  for (int64_t token = blockIdx.x; token < a.s * a.b; token += gridDim.x) {
    const int64_t position = token / a.b, sample = token % a.b;
    const T* x = a.x + position * a.x_stride.s + sample * a.x_stride.b;
    T* out = a.out + position * a.out_stride.s + sample * a.out_stride.b;
    for (int item = static_cast<int>(threadIdx.x); item < all; item += 256) {
      const int64_t head = item / per_head;
      const int64_t i = item % per_head;
      const T* from = x + head * a.x_stride.n;
      T* to = out + head * a.out_stride.n;
      if (i >= items.pairs) {
        if (from == to) continue;
        float values[N];
        const int64_t channel = 2 * a.half + (i - items.pairs) * N;
        load_elements<N>(from + channel, values);
        store_elements<N>(to + channel, values);
      } else if constexpr (Interleaved) {
        rotate_neighbours<T, N>(a, from, to, position * a.half, i * N);
      } else {
        rotate_halves<T, N>(a, from, to, position * a.half, i * N);
      }
    }
  }
}

template <class T>
bool fits(const T* pointer, const Strides& stride) {
  return vectorizable(pointer, stride.s) && stride.b % width<T> == 0 && stride.n % width<T> == 0;
}

template <class T, bool Interleaved>
int run(const RotaryArguments<T>& a, void* stream) {
  constexpr int W = width<T>;
  const bool vector = vectorizable(a.cosine, 0) && vectorizable(a.sine, 0) &&
                      fits(a.x, a.x_stride) && fits(a.out, a.out_stride) && a.d % W == 0 &&
                      (Interleaved ? 2 * a.half : a.half) % W == 0;
  const int64_t step = vector ? W : 1;
  const int64_t pairs = Interleaved && vector ? 2 * a.half / W : a.half / step;
  const Items items{static_cast<int>(pairs), static_cast<int>((a.d - 2 * a.half) / step)};
  const unsigned grid = grid_size(a.s * a.b);
  return vector ? ML_LAUNCH((rotary<T, Interleaved, W>), grid, 256, 0, stream, a, items)
                : ML_LAUNCH((rotary<T, Interleaved, 1>), grid, 256, 0, stream, a, items);
}

}  // namespace
}  // namespace ml

// backward = 1 rotates by the opposite angle: the gradient of x from that of out.
ML_EXPORT int launch_rotary(int64_t dtype, const void* x, int64_t x_stride_s, int64_t x_stride_b,
                            int64_t x_stride_n, const float* cosine, const float* sine, void* out,
                            int64_t out_stride_s, int64_t out_stride_b, int64_t out_stride_n,
                            int64_t s, int64_t b, int64_t n, int64_t d, int64_t dim,
                            int64_t interleaved, int64_t backward, void* stream) {
  const bool legal = dim >= 0 && dim % 2 == 0 && dim <= d && b > 0 && n >= 0 &&
                     (d == 0 || n <= 0x7fffffff / d);
  if (!legal) return ml::kInvalidValue;
  return ml::with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const ml::RotaryArguments<T> a{static_cast<const T*>(x), static_cast<T*>(out), cosine, sine,
                                   {x_stride_s, x_stride_b, x_stride_n},
                                   {out_stride_s, out_stride_b, out_stride_n},
                                   s, b, n, d, dim / 2, backward != 0 ? -1.0f : 1.0f};
    return interleaved != 0 ? ml::run<T, true>(a, stream) : ml::run<T, false>(a, stream);
  });
}
