// AdamW and SGD on a flat range: clip scale, update and low-precision copy in one pass.
//
//   weight, exp_avg, exp_avg_sq, momentum  [n] W: float, or double; updated in place
//   grad      [n] G: float, bf16 or fp16 (double with double weights), only read
//   copy      [n] bf16 or fp16 of the new weight, or null
//
// The rules are those of optimizer/adamw.cu and optimizer/sgd.cu; arithmetic is W's. Blocks of
// kBlock elements are updated, then rounded into the copy while they are in the first-level
// cache. Memory-bound: 28 (AdamW), 20 or 12 (SGD) bytes per float element, 2 more with a copy.
// Elements are independent: the same bits whatever the cut into ranges.
#include "cpu/math.h"
#include "optimizer/cpu/update.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kBlock = 2048;

template <class C, class W>
ML_INLINE void round_block(const W* weight, C* copy, int64_t n) {
  for_each_vector<W>(n, [&](int64_t i, int64_t count) {
    store_part(copy + i, load_part(weight + i, count), count);
  });
}

// Calls update(begin, count) for blocks of [first, last), then rounds each into the copy.
template <class W, class Update>
ML_INLINE void for_each_block(const W* weight, void* copy, DType copied, int64_t first,
                              int64_t last, const Update& update) {
  for (int64_t begin = first; begin < last; begin += kBlock) {
    const int64_t count = last - begin < kBlock ? last - begin : kBlock;
    update(begin, count);
    if constexpr (std::is_same_v<W, float>) {
      if (copy == nullptr) continue;
      const W* from = weight + begin;
      if (copied == DType::bf16) round_block(from, static_cast<Bf16*>(copy) + begin, count);
      else round_block(from, static_cast<Fp16*>(copy) + begin, count);
    }
  }
}

template <class G>
void adamw_range(const AdamWUpdate& c, int64_t first, int64_t last) {
  using W = Wide<G>;
  W* weight = static_cast<W*>(c.weight);
  W* exp_avg = static_cast<W*>(c.exp_avg);
  W* exp_avg_sq = static_cast<W*>(c.exp_avg_sq);
  const G* grad = static_cast<const G*>(c.grad);
  const W clip = static_cast<W>(c.clip), first_share = static_cast<W>(1.0 - c.beta1);
  const W beta2 = static_cast<W>(c.beta2), second_share = static_cast<W>(1.0 - c.beta2);
  const W eps = static_cast<W>(c.eps), decay = static_cast<W>(c.decay);
  const W step_size = static_cast<W>(c.step_size), scale = static_cast<W>(c.second_scale);
  const auto update = [&](int64_t begin, int64_t count) {
    for_each_vector<W>(count, [&](int64_t offset, int64_t n) {
      const int64_t i = begin + offset;
      const Vector<W> g = load_part(grad + i, n) * clip;
      Vector<W> m = load_part(exp_avg + i, n);
      m += first_share * (g - m);
      const Vector<W> v = beta2 * load_part(exp_avg_sq + i, n) + second_share * g * g;
      const Vector<W> root = root_of(v) * scale + eps;
      const Vector<W> change = step_size * m / root;
      store_part(exp_avg + i, m, n);
      store_part(exp_avg_sq + i, v, n);
      store_part(weight + i, load_part(weight + i, n) * decay - change, n);
    });
  };
  for_each_block(weight, c.copy, c.copied, first, last, update);
}

template <class G, bool Momentum>
void sgd_range(const SgdUpdate& c, int64_t first, int64_t last) {
  using W = Wide<G>;
  W* weight = static_cast<W*>(c.weight);
  W* momentum = static_cast<W*>(c.momentum);
  const G* grad = static_cast<const G*>(c.grad);
  const W clip = static_cast<W>(c.clip), lr = static_cast<W>(c.lr), mu = static_cast<W>(c.mu);
  const W coupled = static_cast<W>(c.coupled_decay), decay = static_cast<W>(c.decay);
  const auto update = [&](int64_t begin, int64_t count) {
    for_each_vector<W>(count, [&](int64_t offset, int64_t n) {
      const int64_t i = begin + offset;
      const Vector<W> w = load_part(weight + i, n);
      Vector<W> g = load_part(grad + i, n) * clip;
      g += coupled * w;
      if (Momentum) {
        g += mu * load_part(momentum + i, n);
        store_part(momentum + i, g, n);
      }
      store_part(weight + i, w * decay - lr * g, n);
    });
  };
  for_each_block(weight, c.copy, c.copied, first, last, update);
}

}  // namespace

void adamw_update(const AdamWUpdate& call, int64_t first, int64_t last) {
  with_element(call.dtype,
               [&](auto element) { adamw_range<decltype(element)>(call, first, last); });
}

void sgd_update(const SgdUpdate& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    if (call.momentum != nullptr) sgd_range<decltype(element), true>(call, first, last);
    else sgd_range<decltype(element), false>(call, first, last);
  });
}

}  // namespace ML_ISA
}  // namespace ml
