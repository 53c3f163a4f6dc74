// Attention on the CPU: what a call consists of, its pieces, and its kernels.
//
//   q    [batch, q_len, heads, dim]           T (bf16, fp16, fp32, fp64), any batch, row and
//   k    [batch, k_len, kv_heads, dim]        T                           head stride, the last
//   v    [batch, k_len, kv_heads, value_dim]  T                           dim contiguous
//   out, dout, dq, dk, dv                     T  as those
//   lse, delta  [batch, heads, q_len]         Wide<T>, contiguous
//
// Semantics are those of the CUDA kernels (csrc/attention/problem.cuh, extras.cuh). Documents
// are cut into pieces by the face, so that kernels see rows of one document only.
#pragma once

#include "cpu/elements.h"
#include "cpu/isa.h"

namespace ml {

struct AttentionStrides {
  int64_t batch, row, head;  // in elements
};

// Field by field what the CUDA launchers take as an array of int64_t.
struct AttentionProblem {
  int64_t batch, heads, kv_heads, q_len, k_len, dim, value_dim;
  int64_t causal, offset, window;  // window < 0: none
  int64_t documents;               // 0: none
  AttentionStrides q, k, v, out, dout, dq, dk, dv;
};

struct AttentionDecisions {
  int64_t seed, c3, sequence, first_head, first_query, first_key;
};

// Rows first .. last of one side of a document: queries in the forward, keys in the backward.
struct AttentionPiece {
  int64_t batch, kv_head;
  int64_t q_start, k_start;  // first row of the document
  int64_t q_len, k_len;      // of the document
  int64_t first, last;       // inside the document
  int64_t slab;              // backward: which of the partial dq
};

struct AttentionCall {
  DType dtype;
  AttentionProblem problem;
  double scale, softcap, dropout;
  AttentionDecisions decisions;
  const int32_t* samples;  // low halves of the samples' indices, one per batch entry
  const AttentionPiece* pieces;
  int64_t num_pieces;
  const void *q, *k, *v, *dout;
  void *out, *lse, *delta;  // backward: read
  void *dq, *dk, *dv;
  const void* dlse;
  void* partial;  // [slabs, batch, heads, q_len, dim] Wide<T>, zeros; null: dq is written at once
  int64_t slabs;
};

constexpr int64_t kAttentionKeysOfRound = 1024;  // keys a thread keeps packed in the backward

// Keys begin(i) <= j < end(i) are visible to query i; see csrc/attention/problem.cuh.
struct AttentionMask {
  int64_t k_len, shift, window;
  bool causal;
  int64_t begin(int64_t i) const {
    const int64_t first = i + shift - window;
    return window >= 0 && first > 0 ? first : 0;
  }
  int64_t end(int64_t i) const {
    const int64_t behind = i + shift + 1;
    if (!causal || behind > k_len) return k_len;
    return behind > 0 ? behind : 0;
  }
  // Queries first_query(j) <= i < last_query(j) see key j.
  int64_t first_query(int64_t j) const { return causal ? j - shift : -(int64_t{1} << 40); }
  int64_t last_query(int64_t j) const {
    return window >= 0 ? j - shift + window + 1 : int64_t{1} << 40;
  }
};

static inline AttentionMask attention_mask(const AttentionProblem& p, const AttentionPiece& piece) {
  const int64_t wanted = piece.k_len - piece.q_len + p.offset;
  const int64_t limit = int64_t{1} << 40;
  const int64_t shift = wanted > limit ? limit : (wanted < -limit ? -limit : wanted);
  return {piece.k_len, shift, p.window, p.causal != 0};
}

}  // namespace ml

// Take pieces from `next` on, each the next one that nobody took, until there are none.
ML_CPU_MATRIX_KERNEL(attention_forward, (const AttentionCall& call, int64_t* next), (call, next))
ML_CPU_MATRIX_KERNEL(attention_backward, (const AttentionCall& call, int64_t* next), (call, next))
// Rows [first, last) of [batch, q_len, heads]: delta = rowsum(dout * out) - dlse.
ML_CPU_MATRIX_KERNEL(attention_delta, (const AttentionCall& call, int64_t first, int64_t last),
                     (call, first, last))
// Rows [first, last) of [batch, q_len, heads]: dq = scale * the sum of the partial dq.
ML_CPU_MATRIX_KERNEL(attention_sum_partial,
                     (const AttentionCall& call, int64_t first, int64_t last),
                     (call, first, last))
