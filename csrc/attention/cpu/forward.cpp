// Attention forward on the CPU: blocks of keys x queries, running softmax.
//
// Tensors: attention.h. A piece is up to some hundred queries of one KV head and document; its
// thread packs that head's keys and values once (K as left operand, V transposed) and reuses
// them for all query heads of the group. Per block, with queries in the lanes:
//
//   S^T [128 keys, 64 queries] = K Q^T;  P^T = exp(S^T - running maximum);  O^T += V^T P^T
//
// Bound by arithmetic: 2 (dim + value_dim) FLOPs and one exponential per visible pair (blocks of
// 32 keys x 64 queries that nobody sees are skipped). Scratch per thread: the packed keys and
// values of a head, and 100 KiB. Blocks lie at fixed places inside a document, so results depend
// on neither pieces nor threads.
#include "attention/cpu/block.h"

namespace ml {
namespace ML_ISA {
namespace {

template <class T>
struct Work {
  using A = Wide<T>;
  using O = Operand<T>;
  Scratch scratch;
  O *keys, *values;  // per block of keys: [kKeys, dim], [value_dim, kKeys]
  O *query, *probs;  // right operands [dim, kQueries], [kKeys, kQueries]
  A *scores, *out;   // [kKeys, kQueries], [value_dim, kQueries]
  A *top, *sum, *factors, *dropped;
  int64_t dim, value_dim;  // padded
  int64_t batch = -1, kv_head = -1, k_start = -1, begin = 0, end = 0;  // what is packed

  explicit Work(const AttentionProblem& p) : dim(padded(p.dim)), value_dim(padded(p.value_dim)) {
    const int64_t rows = (p.k_len + kKeys - 1) / kKeys * kKeys;
    for (int pass = 0; pass < 2; ++pass) {
      scratch.place(keys, rows * dim);
      scratch.place(values, rows * value_dim);
      scratch.place(query, dim * kQueries);
      scratch.place(scores, kKeys * kQueries);
      scratch.place(probs, kPaired<T> ? kKeys * kQueries : 0);
      scratch.place(out, value_dim * kQueries);
      scratch.place(top, kQueries);
      scratch.place(sum, kQueries);
      scratch.place(factors, kQueries);
      scratch.place(dropped, kKeys * kQueries);
      if (pass == 0) scratch.allocate();
    }
    if constexpr (!kPaired<T>) probs = scores;
  }

  // Packs the blocks of keys that hold [first, last) of a document.
  void pack(const AttentionCall& call, const AttentionPiece& piece, int64_t first, int64_t last) {
    first = first / kKeys * kKeys;
    last = (last + kKeys - 1) / kKeys * kKeys;
    const bool same = batch == piece.batch && kv_head == piece.kv_head && k_start == piece.k_start;
    if (!same || first > end || first < begin) {
      batch = piece.batch;
      kv_head = piece.kv_head;
      k_start = piece.k_start;
      begin = end = first;
    }
    const AttentionProblem& p = call.problem;
    for (; end < last; end += kKeys) {
      const int64_t rows = least(kKeys, piece.k_len - end), at = piece.k_start + end;
      const T* const k = row_at(static_cast<const T*>(call.k), p.k, batch, at, kv_head);
      const T* const v = row_at(static_cast<const T*>(call.v), p.v, batch, at, kv_head);
      pack_left<T>(keys + end * dim, dim, k, p.k.row, rows, p.dim);
      pack_left_transposed<T>(values + end * value_dim, kKeys, v, p.v.row, p.value_dim, rows);
    }
  }
};

// S^T times its scale, capped and masked, before the maximum is taken.
template <class T>
void cap_and_hide(Work<T>& w, const AttentionMask& mask, double cap_factor, int64_t query0,
                  int64_t key0, int64_t rows, bool masked) {
  using A = Wide<T>;
  if (cap_factor != 0.0)
    for (int64_t i = 0; i < rows * kQueries; i += kLanes<A>)
      store(w.scores + i, tanh_of(load(w.scores + i) * static_cast<A>(cap_factor)));
  if (!masked) return;
  const Vector<A> hidden = splat<A>(-static_cast<A>(INFINITY));
  for (int64_t j = 0; j < rows; ++j) {
    const VisibleColumns<A> seen = visible_columns<A>(mask, key0 + j, query0);
    if (seen.low == 0 && seen.high == kQueries) continue;
    for (int64_t c = 0; c < kQueries; c += kLanes<A>) {
      A* const at = w.scores + j * kQueries + c;
      const Vector<A> lanes = lane_numbers<A>(c), value = load(at);
      store(at, lanes < seen.low ? hidden : (lanes < seen.high ? value : hidden));
    }
  }
}

// P^T of rows j .. j + 4 of one vector of columns; returns their sum before dropout.
template <class T>
ML_INLINE Vector<Wide<T>> exponentials(Work<T>& w, int64_t j, int64_t c, Wide<T> scale,
                                       Vector<Wide<T>> base, bool dropping) {
  using A = Wide<T>;
  Vector<A> p[4];
  for (int r = 0; r < 4; ++r)
    p[r] = power_of(load(w.scores + (j + r) * kQueries + c) * scale - base);
  const Vector<A> sum = (p[0] + p[1]) + (p[2] + p[3]);
  if (dropping)
    for (int r = 0; r < 4; ++r) p[r] *= load(w.dropped + (j + r) * kQueries + c);
#if ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int r = 0; r < 4; r += 2)
      _mm512_store_si512(w.probs + right_at<T>(j + r, c, kKeys), narrow_pairs(p[r], p[r + 1]));
    return sum;
  }
#endif
  if constexpr (!kPaired<T>)
    for (int r = 0; r < 4; ++r) store(w.scores + (j + r) * kQueries + c, p[r]);
  return sum;
}

// Scores to probabilities; rescales what was summed under a lower maximum.
template <class T>
void soften(Work<T>& w, int64_t rows, int64_t columns, Wide<T> scale, bool first, bool dropping) {
  using A = Wide<T>;
  const A lowest = -static_cast<A>(INFINITY);
  for (int64_t c = 0; c < columns; c += kLanes<A>) {
    const Vector<A> old = load(w.top + c);
    Vector<A> tops[4] = {old, old, old, old};
    for (int64_t j = 0; j < rows; j += 4)
      for (int r = 0; r < 4; ++r)
        tops[r] = maximum<A>(tops[r], load(w.scores + (j + r) * kQueries + c));
    const Vector<A> top = maximum<A>(maximum<A>(tops[0], tops[1]), maximum<A>(tops[2], tops[3]));
    const Vector<A> base = top == lowest ? splat<A>(0) : top * scale;
    Vector<A> sum = splat<A>(0);
    for (int64_t j = 0; j < rows; j += 4) sum += exponentials(w, j, c, scale, base, dropping);
    if (!first) {
      const Vector<A> factor = power_of(old * scale - base);
      sum += load(w.sum + c) * factor;
      A changed = 0;
      for (int i = 0; i < kLanes<A>; ++i) changed += top[i] == old[i] ? A(0) : A(1);
      if (changed != 0)
        for (int64_t r = 0; r < w.value_dim; ++r) {
          A* const at = w.out + r * kQueries + c;
          store(at, load(at) * factor);
        }
    }
    store(w.top + c, top);
    store(w.sum + c, sum);
  }
}

template <class T>
void finish(Work<T>& w, const AttentionCall& call, const AttentionPiece& piece, int64_t head,
            int64_t query0, int64_t queries, double scale) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  const int64_t row = piece.q_start + query0;
  A* const lse = static_cast<A*>(call.lse) + (piece.batch * p.heads + head) * p.q_len + row;
  for (int64_t i = 0; i < kQueries; ++i) {
    // Finite scores beyond about 2^30 may round to a sum of 0: then NaN, not "sees nothing".
    const bool empty = w.sum[i] == 0 && w.top[i] == -static_cast<A>(INFINITY);
    w.factors[i] = empty ? A(0) : A(1) / w.sum[i];
    if (i >= queries) continue;
    const double value = static_cast<double>(w.top[i]) * scale +
                         std::log(static_cast<double>(w.sum[i]));
    lse[i] = empty ? -static_cast<A>(INFINITY) : static_cast<A>(value);
  }
  T* const out = row_at(static_cast<T*>(call.out), p.out, piece.batch, row, head);
  store_transposed<T, false>(out, p.out.row, w.out, w.factors, queries, p.value_dim);
}

// One block of queries of one head.
template <class T>
void attend(Work<T>& w, const AttentionCall& call, const AttentionPiece& piece, int64_t head,
            int64_t query0) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  const AttentionMask mask = attention_mask(p, piece);
  const int64_t queries = least(kQueries, piece.last - query0), last = query0 + queries - 1;
  const int64_t columns = padded(queries);
  const KeyRange keys = keys_seen(mask, query0, last);
  const double scale = call.softcap > 0.0 ? call.softcap : call.scale;
  const double cap_factor = call.softcap > 0.0 ? call.scale / call.softcap : 0.0;
  const Dropper dropper = dropper_of(call, piece, head);
  for (int64_t i = 0; i < kQueries; ++i) {
    w.top[i] = -static_cast<A>(INFINITY);
    w.sum[i] = 0;
  }
  if (keys.begin >= keys.end) {
    for (int64_t i = 0; i < w.value_dim * kQueries; ++i) w.out[i] = 0;
    return finish(w, call, piece, head, query0, queries, scale);
  }
  const T* const q =
      row_at(static_cast<const T*>(call.q), p.q, piece.batch, piece.q_start + query0, head);
  const int64_t stride = right_stride<T>(p.dim, kQueries);
  pack_right_transposed<T>(w.query, stride, q, p.q.row, p.dim, queries);
  bool first = true;
  for (int64_t block = keys.begin / kKeys * kKeys; block < keys.end; block += kKeys) {
    const int64_t begin = most(block, keys.begin), end = least(block + kKeys, keys.end);
    const int64_t rows = end - begin;
    multiply<T>(w.scores, kQueries, w.keys + begin * w.dim, w.dim, w.query, stride, rows,
                columns, w.dim, false);
    const bool masked = end > piece.k_len || !all_seen(mask, query0, last, begin, end);
    if (masked || cap_factor != 0.0)
      cap_and_hide(w, mask, cap_factor, query0, begin, rows, masked);
    if (dropper.threshold != 0)
      drop_factors<A>(w.dropped, dropper, query0, columns, begin, rows);
    soften(w, rows, columns, static_cast<A>(scale) * kBase<A>, first, dropper.threshold != 0);
    multiply<T>(w.out, kQueries, w.values + block * w.value_dim + (begin - block), kKeys, w.probs,
                kPaired<T> ? kKeys : kQueries, w.value_dim, columns, rows, !first);
    first = false;
  }
  finish(w, call, piece, head, query0, queries, scale);
}

template <class T>
void run(const AttentionCall& call, int64_t* next) {
  const MatrixUnit unit;
  const AttentionProblem& p = call.problem;
  Work<T> work(p);
  const int64_t group = p.heads / p.kv_heads;
  for (;;) {
    const int64_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (index >= call.num_pieces) return;
    const AttentionPiece& piece = call.pieces[index];
    const AttentionMask mask = attention_mask(p, piece);
    const KeyRange keys = keys_seen(mask, piece.first, piece.last - 1);
    if (keys.begin < keys.end) work.pack(call, piece, keys.begin, keys.end);
    for (int64_t member = 0; member < group; ++member)
      for (int64_t query = piece.first; query < piece.last; query += kQueries)
        attend(work, call, piece, piece.kv_head * group + member, query);
  }
}

}  // namespace

void attention_forward(const AttentionCall& call, int64_t* next) {
  with_element(call.dtype, [&](auto zero) { run<decltype(zero)>(call, next); });
}

}  // namespace ML_ISA
}  // namespace ml
