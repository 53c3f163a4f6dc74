// Attention backward on the CPU: five products per block of keys x queries, no atomics.
//
// Tensors: attention.h. A piece is a range of keys of one KV head and document; it takes rounds
// of kAttentionKeysOfRound keys that its thread keeps packed, and for each goes through the
// query heads of the group and their blocks of queries. Per strip of 32 keys, queries in lanes:
//
//   S^T = K Q^T;  dP^T = V dO^T;  P^T = exp(S^T - lse);  dS^T = P^T (dP^T - delta)
//
// and per block of 128 keys dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T. P^T and dS^T are rounded
// once to T and used by all products. dQ of a block is written at once where one round holds all
// keys of the document, else added to the piece's slab of partial sums in order of keys; slabs
// are summed in order by attention_sum_partial.
// Bound by arithmetic: 2 (3 dim + 2 value_dim) FLOPs and one exponential per visible pair.
// Scratch per thread: 1024 keys packed three ways, their dK and dV in fp32, and 100 KiB.
// Repeatable: rounds and blocks lie at fixed places, sums run in one order.
#include "attention/cpu/block.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kRound = kAttentionKeysOfRound;

template <class T>
struct Work {
  using A = Wide<T>;
  using O = Operand<T>;
  Scratch scratch;
  O *keys, *values, *keys_across;     // [kRound, dim], [kRound, value_dim], [dim, kKeys] a block
  A *dk, *dv;                         // [kRound, dim], [kRound, value_dim]
  O *q_across, *dout_across;          // right operands [dim, kQueries], [value_dim, kQueries]
  O *q_rows, *dout_rows;              // right operands [kQueries, dim], [kQueries, value_dim]
  A *scores, *dprobs;                 // a strip [kUnit, kQueries]
  O *probs, *dscores, *dscores_right; // left [kKeys, kQueries], and dscores as right operand
  A *dq, *exponents, *delta, *dropped, *scales;
  int64_t dim, value_dim;  // padded

  explicit Work(const AttentionProblem& p) : dim(padded(p.dim)), value_dim(padded(p.value_dim)) {
    const int64_t rows = least(kRound, (p.k_len + kKeys - 1) / kKeys * kKeys);
    for (int pass = 0; pass < 2; ++pass) {
      scratch.place(keys, rows * dim);
      scratch.place(values, rows * value_dim);
      scratch.place(keys_across, rows * dim);
      scratch.place(dk, rows * dim);
      scratch.place(dv, rows * value_dim);
      scratch.place(q_across, dim * kQueries);
      scratch.place(dout_across, value_dim * kQueries);
      scratch.place(q_rows, dim * kQueries);
      scratch.place(dout_rows, value_dim * kQueries);
      scratch.place(scores, kPaired<T> ? kUnit * kQueries : 0);
      scratch.place(dprobs, kPaired<T> ? kUnit * kQueries : 0);
      scratch.place(probs, kKeys * kQueries);
      scratch.place(dscores, kKeys * kQueries);
      scratch.place(dscores_right, kPaired<T> ? kKeys * kQueries : 0);
      scratch.place(dq, dim * kQueries);
      scratch.place(exponents, kQueries);
      scratch.place(delta, kQueries);
      scratch.place(scales, kQueries);
      scratch.place(dropped, kUnit * kQueries);
      if (pass == 0) scratch.allocate();
    }
    if constexpr (!kPaired<T>) dscores_right = dscores;
  }

  void pack_keys(const AttentionCall& call, const AttentionPiece& piece, int64_t first,
                 int64_t last) {
    const AttentionProblem& p = call.problem;
    for (int64_t key = first; key < last; key += kKeys) {
      const int64_t rows = least(kKeys, last - key), at = piece.k_start + key, to = key - first;
      const T* const k =
          row_at(static_cast<const T*>(call.k), p.k, piece.batch, at, piece.kv_head);
      const T* const v =
          row_at(static_cast<const T*>(call.v), p.v, piece.batch, at, piece.kv_head);
      pack_left<T>(keys + to * dim, dim, k, p.k.row, rows, p.dim);
      pack_left<T>(values + to * value_dim, value_dim, v, p.v.row, rows, p.value_dim);
      pack_left_transposed<T>(keys_across + to * dim, kKeys, k, p.k.row, p.dim, rows);
    }
    std::memset(dk, 0, padded(last - first) * dim * sizeof(A));
    std::memset(dv, 0, padded(last - first) * value_dim * sizeof(A));
  }

  void pack_queries(const AttentionCall& call, const AttentionPiece& piece, int64_t head,
                    int64_t query0, int64_t queries) {
    const AttentionProblem& p = call.problem;
    const int64_t row = piece.q_start + query0;
    const T* const q = row_at(static_cast<const T*>(call.q), p.q, piece.batch, row, head);
    const T* const dout = row_at(static_cast<const T*>(call.dout), p.dout, piece.batch, row, head);
    pack_right_transposed<T>(q_across, right_stride<T>(p.dim, kQueries), q, p.q.row, p.dim,
                             queries);
    pack_right_transposed<T>(dout_across, right_stride<T>(p.value_dim, kQueries), dout, p.dout.row,
                             p.value_dim, queries);
    pack_right<T>(q_rows, right_stride<T>(kQueries, p.dim), q, p.q.row, queries, p.dim);
    pack_right<T>(dout_rows, right_stride<T>(kQueries, p.value_dim), dout, p.dout.row, queries,
                  p.value_dim);
    const A* const lse =
        static_cast<const A*>(call.lse) + (piece.batch * p.heads + head) * p.q_len + row;
    const A* const rows =
        static_cast<const A*>(call.delta) + (piece.batch * p.heads + head) * p.q_len + row;
    const A lowest = -static_cast<A>(INFINITY);
    for (int64_t i = 0; i < kQueries; ++i) {
      const bool real = i < queries && lse[i] != lowest;
      exponents[i] = real ? -lse[i] * kBase<A> : lowest;
      delta[i] = i < queries ? rows[i] : A(0);
    }
  }
};

struct Strip {
  AttentionMask mask;
  int64_t query0, key, row, columns;  // first key, and its row in the block
  double scale, cap_factor;
  bool masked, dropping;
};

// P and dS of one vector of columns and one row.
template <class A>
struct Pair {
  Vector<A> p, ds;
};

template <class T, bool kGeneral>
ML_INLINE Pair<Wide<T>> pair_of(const Work<T>& w, const Strip& strip, const Wide<T>* scores,
                                const Wide<T>* dprobs, int64_t j, int64_t c,
                                Vector<Wide<T>> exponent, Vector<Wide<T>> delta) {
  using A = Wide<T>;
  const A scale = static_cast<A>(strip.scale) * kBase<A>;
  Vector<A> s = load(scores + j * kQueries + c), dp = load(dprobs + j * kQueries + c);
  if constexpr (!kGeneral) {
    const Vector<A> p = power_of(s * scale + exponent);
    return {p, p * (dp - delta)};
  } else {
    if (strip.cap_factor != 0.0) s = tanh_of(s * static_cast<A>(strip.cap_factor));
    Vector<A> p = power_of(s * scale + exponent);
    if (strip.masked) {
      const VisibleColumns<A> seen =
          visible_columns<A>(strip.mask, strip.key + j, strip.query0);
      const Vector<A> lanes = lane_numbers<A>(c), none = splat<A>(0);
      p = lanes < seen.low ? none : (lanes < seen.high ? p : none);
    }
    Vector<A> dropped = splat<A>(1);
    if (strip.dropping) dropped = load(w.dropped + j * kQueries + c);
    Vector<A> ds = p * (dp * dropped - delta);
    // A product with 0 is not 0 where the other side is not finite.
    ds = p == splat<A>(0) ? splat<A>(0) : ds;
    if (strip.cap_factor != 0.0) ds *= splat<A>(1) - s * s;
    return {p * dropped, ds};
  }
}

// A strip's probabilities and gradients of scores to where the products read them.
template <class T, bool kGeneral>
void gradients_of_strip(Work<T>& w, const Strip& strip, const Wide<T>* scores,
                        const Wide<T>* dprobs) {
  using A = Wide<T>;
#if ML_PAIRED
  if constexpr (kPaired<T>) {
    for (int64_t c = 0; c < strip.columns; c += 32) {
      const Vector<A> exponent[2] = {load(w.exponents + c), load(w.exponents + c + 16)};
      const Vector<A> delta[2] = {load(w.delta + c), load(w.delta + c + 16)};
      for (int64_t j = 0; j < kUnit; j += 2) {
        __m512i ds_rows[2];
        for (int r = 0; r < 2; ++r) {
          const Pair<A> a =
              pair_of<T, kGeneral>(w, strip, scores, dprobs, j + r, c, exponent[0], delta[0]);
          const Pair<A> b =
              pair_of<T, kGeneral>(w, strip, scores, dprobs, j + r, c + 16, exponent[1], delta[1]);
          const int64_t at = (strip.row + j + r) * kQueries + c;
          ds_rows[r] = narrow_two(a.ds, b.ds);
          _mm512_store_si512(w.probs + at, narrow_two(a.p, b.p));
          _mm512_store_si512(w.dscores + at, ds_rows[r]);
        }
        __m512i low, high;
        pair_up(ds_rows[0], ds_rows[1], low, high);
        const int64_t row = strip.row + j;
        _mm512_store_si512(w.dscores_right + right_at<T>(row, c, kKeys), low);
        _mm512_store_si512(w.dscores_right + right_at<T>(row, c + 16, kKeys), high);
      }
    }
    return;
  }
#endif
  if constexpr (!kPaired<T>)
    for (int64_t c = 0; c < strip.columns; c += kLanes<A>) {
      const Vector<A> exponent = load(w.exponents + c), delta = load(w.delta + c);
      for (int64_t j = 0; j < kUnit; ++j) {
        const Pair<A> pair =
            pair_of<T, kGeneral>(w, strip, scores, dprobs, j, c, exponent, delta);
        store(w.probs + (strip.row + j) * kQueries + c, pair.p);
        store(w.dscores + (strip.row + j) * kQueries + c, pair.ds);
      }
    }
}

// Keys [begin, end) of the round (multiples of kUnit inside one block) against the packed block of
// queries.
template <class T>
void backward_block(Work<T>& w, const AttentionProblem& p, Strip strip, const Dropper& dropper,
                    int64_t round, int64_t begin, int64_t end, int64_t last_query, bool first) {
  using A = Wide<T>;
  const int64_t block = begin / kKeys * kKeys, rows = end - begin, columns = strip.columns;
  for (int64_t key = begin; key < end; key += kUnit) {
    strip.row = key - begin;
    strip.key = round + key;
    strip.masked = !all_seen(strip.mask, strip.query0, last_query, strip.key, strip.key + kUnit);
    A* scores = w.scores;
    A* dprobs = w.dprobs;
    if constexpr (!kPaired<T>) {
      scores = w.probs + strip.row * kQueries;
      dprobs = w.dscores + strip.row * kQueries;
    }
    multiply<T>(scores, kQueries, w.keys + key * w.dim, w.dim, w.q_across,
                right_stride<T>(p.dim, kQueries), kUnit, columns, w.dim, false);
    multiply<T>(dprobs, kQueries, w.values + key * w.value_dim, w.value_dim, w.dout_across,
                right_stride<T>(p.value_dim, kQueries), kUnit, columns, w.value_dim, false);
    if (strip.dropping)
      drop_factors<A>(w.dropped, dropper, strip.query0, columns, strip.key, kUnit);
    if (strip.masked || strip.dropping || strip.cap_factor != 0.0)
      gradients_of_strip<T, true>(w, strip, scores, dprobs);
    else
      gradients_of_strip<T, false>(w, strip, scores, dprobs);
  }
  multiply<T>(w.dv + begin * w.value_dim, w.value_dim, w.probs, kQueries, w.dout_rows,
              right_stride<T>(kQueries, p.value_dim), rows, w.value_dim, columns, true);
  multiply<T>(w.dk + begin * w.dim, w.dim, w.dscores, kQueries, w.q_rows,
              right_stride<T>(kQueries, p.dim), rows, w.dim, columns, true);
  multiply<T>(w.dq, kQueries, w.keys_across + block * w.dim + (begin - block), kKeys,
              w.dscores_right, kPaired<T> ? kKeys : kQueries, w.dim, columns, rows, !first);
}

// One block of queries against the keys [round, round + keys) of its document.
template <class T>
void backward_queries(Work<T>& w, const AttentionCall& call, const AttentionPiece& piece,
                      int64_t head, int64_t query0, int64_t round, int64_t keys) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  Strip strip{};
  strip.mask = attention_mask(p, piece);
  strip.query0 = query0;
  strip.scale = call.softcap > 0.0 ? call.softcap : call.scale;
  strip.cap_factor = call.softcap > 0.0 ? call.scale / call.softcap : 0.0;
  const int64_t queries = least(kQueries, piece.q_len - query0), last = query0 + queries - 1;
  strip.columns = padded(queries);
  const KeyRange seen = keys_seen(strip.mask, query0, last);
  const int64_t begin = most(0, seen.begin - round), end = least(padded(keys), seen.end - round);
  const bool whole = call.partial == nullptr;
  if (begin >= end && !whole) return;
  const Dropper dropper = dropper_of(call, piece, head);
  strip.dropping = dropper.threshold != 0;
  if (begin < end) {
    w.pack_queries(call, piece, head, query0, queries);
    for (int64_t block = begin / kKeys * kKeys; block < end; block += kKeys)
      backward_block(w, p, strip, dropper, round, most(begin, block), least(end, block + kKeys),
                     last, block <= begin);
  } else {
    std::memset(w.dq, 0, w.dim * kQueries * sizeof(A));
  }
  const int64_t row = piece.q_start + query0;
  for (int64_t i = 0; i < kQueries; ++i) w.scales[i] = whole ? static_cast<A>(call.scale) : A(1);
  if (whole) {
    T* const to = row_at(static_cast<T*>(call.dq), p.dq, piece.batch, row, head);
    store_transposed<T, false>(to, p.dq.row, w.dq, w.scales, queries, p.dim);
  } else {
    const int64_t at = ((piece.slab * p.batch + piece.batch) * p.heads + head) * p.q_len + row;
    store_transposed<A, true>(static_cast<A*>(call.partial) + at * p.dim, p.dim, w.dq, w.scales,
                              queries, p.dim);
  }
}

template <class T>
void backward_piece(Work<T>& w, const AttentionCall& call, const AttentionPiece& piece) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  const int64_t group = p.heads / p.kv_heads;
  // A document without keys still has rows of dq to write.
  const int64_t last = piece.last > piece.first ? piece.last : piece.first + 1;
  for (int64_t round = piece.first; round < last; round += kRound) {
    const int64_t keys = most(0, least(kRound, piece.last - round));
    w.pack_keys(call, piece, round, round + keys);
    for (int64_t member = 0; member < group; ++member)
      for (int64_t query = 0; query < piece.q_len; query += kQueries)
        backward_queries(w, call, piece, piece.kv_head * group + member, query, round, keys);
    const int64_t row = piece.k_start + round;
    T* const dk = row_at(static_cast<T*>(call.dk), p.dk, piece.batch, row, piece.kv_head);
    T* const dv = row_at(static_cast<T*>(call.dv), p.dv, piece.batch, row, piece.kv_head);
    store_scaled<T>(dk, p.dk.row, w.dk, w.dim, static_cast<A>(call.scale), keys, p.dim);
    store_scaled<T>(dv, p.dv.row, w.dv, w.value_dim, A(1), keys, p.value_dim);
  }
}

template <class T>
void run(const AttentionCall& call, int64_t* next) {
  const MatrixUnit unit;
  Work<T> work(call.problem);
  for (;;) {
    const int64_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (index >= call.num_pieces) return;
    backward_piece(work, call, call.pieces[index]);
  }
}

// Calls body(batch, row, head, place in [batch, heads, q_len]).
template <class Body>
ML_INLINE void for_rows(const AttentionProblem& p, int64_t first, int64_t last, const Body& body) {
  for (int64_t index = first; index < last; ++index) {
    const int64_t head = index % p.heads, row = index / p.heads % p.q_len;
    const int64_t batch = index / p.heads / p.q_len;
    body(batch, row, head, (batch * p.heads + head) * p.q_len + row);
  }
}

template <class T>
void delta_rows(const AttentionCall& call, int64_t first, int64_t last) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  for_rows(p, first, last, [&](int64_t batch, int64_t row, int64_t head, int64_t place) {
    const T* const a = row_at(static_cast<const T*>(call.out), p.out, batch, row, head);
    const T* const b = row_at(static_cast<const T*>(call.dout), p.dout, batch, row, head);
    Vector<A> total = splat<A>(0);
    for_each_vector<A>(p.value_dim, [&](int64_t j, int64_t lanes) {
      total += load_part(a + j, lanes) * load_part(b + j, lanes);
    });
    const A* const dlse = static_cast<const A*>(call.dlse);
    static_cast<A*>(call.delta)[place] = sum<A>(total) - (dlse == nullptr ? A(0) : dlse[place]);
  });
}

template <class T>
void sum_partial(const AttentionCall& call, int64_t first, int64_t last) {
  using A = Wide<T>;
  const AttentionProblem& p = call.problem;
  const int64_t slab = p.batch * p.heads * p.q_len * p.dim;
  for_rows(p, first, last, [&](int64_t batch, int64_t row, int64_t head, int64_t place) {
    const A* const from = static_cast<const A*>(call.partial) + place * p.dim;
    T* const to = row_at(static_cast<T*>(call.dq), p.dq, batch, row, head);
    for_each_vector<A>(p.dim, [&](int64_t j, int64_t lanes) {
      Vector<A> total = load_part(from + j, lanes);
      for (int64_t s = 1; s < call.slabs; ++s) total += load_part(from + s * slab + j, lanes);
      store_part(to + j, total * static_cast<A>(call.scale), lanes);
    });
  });
}

}  // namespace

void attention_backward(const AttentionCall& call, int64_t* next) {
  with_element(call.dtype, [&](auto zero) { run<decltype(zero)>(call, next); });
}
void attention_delta(const AttentionCall& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto zero) { delta_rows<decltype(zero)>(call, first, last); });
}
void attention_sum_partial(const AttentionCall& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto zero) { sum_partial<decltype(zero)>(call, first, last); });
}

}  // namespace ML_ISA
}  // namespace ml
