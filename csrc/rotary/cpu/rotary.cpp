// Rotary position embedding of queries or keys; its gradient is the opposite rotation.
//
//   x             [s, b, n, d]    T, dim d dense, the others at any stride
//   out           [s, b, n, d]    T, contiguous
//   cosine, sine  [s, half]       float (double), dense; 2 * half <= d channels are rotated,
//                                 the rest is copied
//
// Pairs are (i, i + half), or (2i, 2i + 1) when interleaved. Arithmetic is float (double), each
// result is rounded once. Interleaved pairs are not pulled apart: a vector is multiplied by
// cosines twice over, its neighbours exchanged by sines with alternating signs; both tables are
// spread out once per position and serve all its heads. Memory-bound: traffic =
// 2 * s * b * n * d elements. Elements are independent: the same bits for any threads.
#include "rotary/cpu/rotary.h"

#include "cpu/vector.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kChunk = 512;  // channels whose spread tables lie on the stack

ML_INLINE Vector<float> exchange_neighbours(Vector<float> v) {
  typedef uint64_t Pairs __attribute__((vector_size(kVectorBytes)));
  const Pairs pairs = reinterpret_cast<Pairs>(v);
  return reinterpret_cast<Vector<float>>((pairs << 32) | (pairs >> 32));
}
ML_INLINE Vector<double> exchange_neighbours(Vector<double> v) {
  Vector<double> out;
  for (int i = 0; i < kLanes<double>; ++i) out[i] = v[i ^ 1];
  return out;
}

template <class T>
ML_INLINE void rotate_halves(const Rotary& c, int64_t position, const T* x, T* out) {
  using A = Wide<T>;
  const A* cosine = static_cast<const A*>(c.cosine) + position * c.half;
  const A* sine = static_cast<const A*>(c.sine) + position * c.half;
  const A direction = static_cast<A>(c.direction);
  for_each_vector<A>(c.half, [&](int64_t i, int64_t n) {
    const Vector<A> turn = load_part(cosine + i, n), side = load_part(sine + i, n) * direction;
    const Vector<A> first = load_part(x + i, n), second = load_part(x + c.half + i, n);
    store_part(out + i, first * turn - second * side, n);
    store_part(out + c.half + i, second * turn + first * side, n);
  });
}

template <class T>
ML_INLINE void copy_rest(const Rotary& c, const T* x, T* out) {
  const int64_t rest = c.d - 2 * c.half;
  if (rest > 0) std::memcpy(out + 2 * c.half, x + 2 * c.half, rest * sizeof(T));
}

template <class T, class Body>
ML_INLINE void for_each_head(const Rotary& c, int64_t position, const Body& body) {
  for (int64_t sample = 0; sample < c.b; ++sample)
    for (int64_t head = 0; head < c.n; ++head)
      body(static_cast<const T*>(c.x) + position * c.x_stride.s + sample * c.x_stride.b +
               head * c.x_stride.n,
           static_cast<T*>(c.out) + ((position * c.b + sample) * c.n + head) * c.d);
}

template <class T>
void rotate_neighbours(const Rotary& c, int64_t position) {
  using A = Wide<T>;
  A turns[kChunk], sides[kChunk];
  const A* cosine = static_cast<const A*>(c.cosine) + position * c.half;
  const A* sine = static_cast<const A*>(c.sine) + position * c.half;
  const A direction = static_cast<A>(c.direction);
  for (int64_t first = 0; first < 2 * c.half; first += kChunk) {
    const int64_t size = 2 * c.half - first < kChunk ? 2 * c.half - first : kChunk;
    for (int64_t i = 0; i < size; i += 2) {
      turns[i] = turns[i + 1] = cosine[(first + i) / 2];
      sides[i + 1] = sine[(first + i) / 2] * direction;
      sides[i] = -sides[i + 1];
    }
    for_each_head<T>(c, position, [&](const T* x, T* out) {
      for_each_vector<A>(size, [&](int64_t i, int64_t n) {
        const Vector<A> value = load_part(x + first + i, n);
        const Vector<A> other = exchange_neighbours(value);
        store_part(out + first + i,
                   value * load_part(turns + i, n) + other * load_part(sides + i, n), n);
      });
    });
  }
}

template <class T>
void rotate(const Rotary& c, int64_t first, int64_t last) {
  for (int64_t position = first; position < last; ++position) {
    if (c.interleaved) rotate_neighbours<T>(c, position);
    for_each_head<T>(c, position, [&](const T* x, T* out) {
      if (!c.interleaved) rotate_halves(c, position, x, out);
      copy_rest(c, x, out);
    });
  }
}

}  // namespace

void rotate_positions(const Rotary& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { rotate<decltype(element)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
