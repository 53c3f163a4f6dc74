// dropout(x + bias) + residual and its gradients; the mask is recomputed from its key.
//
//   x, residual, grad  [s, b, h]  T, token rows at any stride; residual null: none
//   out, grad_x        [s, b, h]  T, contiguous
//   bias               [h]        T or null
//   positions          [s] int64  logical position of each row of the sequence
//   sample_ids         [b] int64  consumed-sample index, of which the low 32 bits count
//   parts              [num_parts, h]  float (double): sums over a part's tokens
//
// Decision of an element: position * h + channel, with c2 = sample; kept iff its word >=
// floor(p * 2^32), the very masks of megatron_lite/ops/random.py. Backward: grad_x = mask *
// scale * grad, and the bias's gradient sums the unrounded grad_x; without dropout grad_x is
// grad and need not be written. Words are made a chunk of channels at a time and stay in the
// first-level cache. Memory-bound: 2 or, with a residual, 3 * s * b * h elements; about two
// instructions a word on AVX-512. Arithmetic is float (double). Parts depend on the sizes only
// and are added in order by the caller: the same bits for any number of threads.
#include "dropout/cpu/dropout.h"

#include "dropout/cpu/philox.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kChunk = 2048;  // channels whose words are made at a time

// Words of the decisions element, element + 1, ...; a pointer into `words`.
ML_INLINE const uint32_t* chunk_words(const DropoutKey& key, uint64_t element, uint32_t c2,
                                      int64_t count, uint32_t* words) {
  const int64_t skipped = static_cast<int64_t>(element % 4);
  philox_words({key.seed_low, key.seed_high, c2, key.c3}, element / 4, (skipped + count + 3) / 4,
               words);
  return words + skipped;
}

// value * scale where the word reaches the threshold, else 0. Reads a whole vector of words.
ML_INLINE Vector<float> drop(Vector<float> value, const uint32_t* words, const DropoutKey& key) {
  Words word;
  std::memcpy(&word, words, sizeof word);
  const Words threshold = Words{} + key.threshold;
  return word >= threshold ? value * static_cast<float>(key.scale) : Vector<float>{};
}
ML_INLINE Vector<double> drop(Vector<double> value, const uint32_t* words, const DropoutKey& key) {
  for (int i = 0; i < kLanes<double>; ++i)
    value[i] = words[i] >= key.threshold ? value[i] * key.scale : 0.0;
  return value;
}

// Calls body(first, size, words) per chunk of a token's channels; words null without dropout.
template <class Call, class Body>
ML_INLINE void for_each_chunk(const Call& c, int64_t token, const Body& body) {
  uint32_t words[kChunk + 2 * kWordsOfStep];
  const bool drops = c.key.threshold != 0;
  const uint64_t position = drops ? static_cast<uint64_t>(c.positions[token / c.b]) : 0;
  const uint32_t c2 = drops ? static_cast<uint32_t>(c.sample_ids[token % c.b]) : 0;
  for (int64_t first = 0; first < c.h; first += kChunk) {
    const int64_t size = c.h - first < kChunk ? c.h - first : kChunk;
    const uint64_t element = position * static_cast<uint64_t>(c.h) + static_cast<uint64_t>(first);
    body(first, size, drops ? chunk_words(c.key, element, c2, size, words) : nullptr);
  }
}

template <class T>
void forward_tokens(const DropoutForward& c, int64_t begin, int64_t end) {
  using A = Wide<T>;
  const T* bias = static_cast<const T*>(c.bias);
  for (int64_t token = begin; token < end; ++token) {
    const T* x = static_cast<const T*>(c.x) + token * c.x_stride;
    const T* residual = static_cast<const T*>(c.residual) + token * c.residual_stride;
    T* out = static_cast<T*>(c.out) + token * c.h;
    for_each_chunk(c, token, [&](int64_t first, int64_t size, const uint32_t* words) {
      for_each_vector<A>(size, [&](int64_t i, int64_t n) {
        Vector<A> value = load_part(x + first + i, n);
        if (bias != nullptr) value += load_part(bias + first + i, n);
        if (words != nullptr) value = drop(value, words + i, c.key);
        else if (c.key.scale != 1.0) value *= static_cast<A>(c.key.scale);
        if (c.residual != nullptr) value += load_part(residual + first + i, n);
        store_part(out + first + i, value, n);
      });
    });
  }
}

// sums[i] = sum over tokens of grad, in order: nothing is dropped and only the bias asks.
template <class T>
ML_INLINE void sum_tokens(const DropoutBackward& c, int64_t start, int64_t stop, Wide<T>* sums) {
  using A = Wide<T>;
  constexpr int64_t W = kLanes<A>;
  const T* grad = static_cast<const T*>(c.grad);
  int64_t i = 0;
  for (; i + 4 * W <= c.h; i += 4 * W) {
    Vector<A> s[4] = {};
    for (int64_t token = start; token < stop; ++token)
      for (int j = 0; j < 4; ++j) s[j] += load(grad + token * c.grad_stride + i + j * W);
    for (int j = 0; j < 4; ++j) store(sums + i + j * W, s[j]);
  }
  for (; i < c.h; i += W) {
    const int64_t n = c.h - i < W ? c.h - i : W;
    Vector<A> s{};
    for (int64_t token = start; token < stop; ++token)
      s += load_part(grad + token * c.grad_stride + i, n);
    store_part(sums + i, s, n);
  }
}

template <class T>
void backward_parts(const DropoutBackward& c, int64_t begin, int64_t end) {
  using A = Wide<T>;
  for (int64_t part = begin; part < end; ++part) {
    A* sums = static_cast<A*>(c.parts) + part * c.h;
    const int64_t start = c.tokens * part / c.num_parts;
    const int64_t stop = c.tokens * (part + 1) / c.num_parts;
    if (c.grad_x == nullptr && c.parts != nullptr) {
      sum_tokens<T>(c, start, stop, sums);
      continue;
    }
    if (c.parts != nullptr)
      for (int64_t i = 0; i < c.h; ++i) sums[i] = 0;
    for (int64_t token = start; token < stop; ++token) {
      const T* grad = static_cast<const T*>(c.grad) + token * c.grad_stride;
      T* grad_x = static_cast<T*>(c.grad_x) + token * c.h;
      for_each_chunk(c, token, [&](int64_t first, int64_t size, const uint32_t* words) {
        for_each_vector<A>(size, [&](int64_t i, int64_t n) {
          Vector<A> value = load_part(grad + first + i, n);
          if (words != nullptr) value = drop(value, words + i, c.key);
          else if (c.key.scale != 1.0) value *= static_cast<A>(c.key.scale);
          store_part(grad_x + first + i, value, n);
          if (c.parts != nullptr) {
            A* sum = sums + first + i;
            store_part(sum, load_part(sum, n) + value, n);
          }
        });
      });
    }
  }
}

}  // namespace

void dropout_forward(const DropoutForward& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { forward_tokens<decltype(element)>(call, first, last); });
}

void dropout_backward(const DropoutBackward& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { backward_parts<decltype(element)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
