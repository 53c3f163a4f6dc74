// Checks and dispatch of attention.
#include "attention/api.h"

#include <cmath>

#include "attention/cpu/attention.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_attention_forward(const void* q, const void* k, const void* v, void* out, float* lse,
                             const int32_t* q_starts, const int32_t* k_starts,
                             const int64_t* problem, int64_t dtype, double scale, double softcap,
                             double dropout, const int64_t* decisions, const uint32_t* samples,
                             void* stream);
int launch_attention_delta(const void* out, const void* dout, const float* dlse, float* delta,
                           const int64_t* problem, int64_t dtype, void* stream);
int launch_attention_backward_query(const void* q, const void* k, const void* v, const void* dout,
                                    const float* lse, const float* delta, void* dq,
                                    const int32_t* q_starts, const int32_t* k_starts,
                                    const int64_t* problem, int64_t dtype, double scale,
                                    double softcap, double dropout, const int64_t* decisions,
                                    const uint32_t* samples, void* stream);
int launch_attention_backward_key(const void* q, const void* k, const void* v, const void* dout,
                                  const float* lse, const float* delta, void* dk, void* dv,
                                  const int32_t* q_starts, const int32_t* k_starts,
                                  const int64_t* problem, int64_t dtype, double scale,
                                  double softcap, double dropout, const int64_t* decisions,
                                  const uint32_t* samples, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kMostLength = int64_t{1} << 30, kMostOffset = int64_t{1} << 60;
constexpr int64_t kRowsOfPiece = 512;  // query heads of a group together
constexpr int64_t kWantedPieces = 16, kMostSlabs = 4;

struct Options {
  bool causal;
  int64_t offset, window;
  double scale, softcap;
  MaybeTensor q_starts, k_starts;
  double dropout;
  std::vector<int64_t> decisions;
  MaybeTensor samples;
};

// [s, b, n, d] with a contiguous last dim; CUDA kernels read rows by 16 bytes.
Tensor readable(const Tensor& x) {
  bool fits = x.size(3) <= 1 || x.stride(3) == 1;
  if (x.is_cuda()) {
    fits = fits && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    for (int64_t dim = 0; dim < 3; ++dim) fits = fits && x.stride(dim) % 8 == 0;
  }
  return fits ? x : torch::stable::contiguous(x);
}

AttentionStrides strides_of(const Tensor& x) { return {x.stride(1), x.stride(0), x.stride(2)}; }

void check_starts(const Tensor& q, const MaybeTensor& starts, const char* name) {
  if (!starts) return;
  ML_CHECK(starts->dim() == 1 && starts->scalar_type() == ScalarType::Int &&
               starts->is_contiguous() && starts->is_cuda() == q.is_cuda(),
           name, ": must be a contiguous int32 vector on the device of q");
}

void check_options(const Tensor& q, const Options& o) {
  ML_CHECK(o.scale > 0.0 && o.scale < 1e30, "scale: must be positive, is ", o.scale);
  ML_CHECK(o.softcap >= 0.0 && o.softcap < 1e30, "softcap: must not be negative, is ", o.softcap);
  ML_CHECK(o.offset > -kMostOffset && o.offset < kMostOffset,
           "offset: must be between -2^60 and 2^60, is ", o.offset);
  ML_CHECK(o.window < kMostLength, "window: must be below 2^30, is ", o.window);
  ML_CHECK(o.dropout >= 0.0 && o.dropout < 1.0, "dropout: must be in [0, 1), is ", o.dropout);
  ML_CHECK(o.q_starts.has_value() == o.k_starts.has_value(),
           "q_starts, k_starts: give both or neither");
  check_starts(q, o.q_starts, "q_starts");
  check_starts(q, o.k_starts, "k_starts");
  if (o.q_starts) {
    ML_CHECK(q.size(1) == 1, "q: documents are packed in one batch entry, there are ", q.size(1));
    ML_CHECK(o.q_starts->numel() == o.k_starts->numel() && o.q_starts->numel() >= 2,
             "q_starts, k_starts: need one more entry than there are documents, both the same");
  }
  if (o.dropout == 0.0) return;
  ML_CHECK(o.decisions.size() == 6, "decisions: needs seed, c3, sequence, first head, query, key");
  ML_CHECK(o.samples && o.samples->scalar_type() == ScalarType::Int &&
               o.samples->is_contiguous() && o.samples->numel() == q.size(1) &&
               o.samples->is_cuda() == q.is_cuda(),
           "samples: needs one int32 per batch entry on the device of q");
}

AttentionProblem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o) {
  check_alike(q, k, "k");
  check_alike(q, v, "v");
  ML_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v: must be [s, b, n, d]");
  AttentionProblem p{};
  p.batch = q.size(1), p.heads = q.size(2), p.kv_heads = k.size(2);
  p.q_len = q.size(0), p.k_len = k.size(0), p.dim = q.size(3), p.value_dim = v.size(3);
  check_shape(k, {p.k_len, p.batch, p.kv_heads, p.dim}, "k");
  check_shape(v, {p.k_len, p.batch, p.kv_heads, p.value_dim}, "v");
  ML_CHECK(p.kv_heads >= 1 && p.heads >= 1 && p.heads % p.kv_heads == 0, "k: ", p.heads,
           " query heads are not a multiple of ", p.kv_heads, " key heads");
  ML_CHECK(p.q_len < kMostLength && p.k_len < kMostLength, "q, k: lengths must be below 2^30");
  ML_CHECK(p.dim >= 1 && p.value_dim >= 1, "q, v: head dims must be at least 1");
  check_options(q, o);
  p.causal = o.causal, p.offset = o.offset, p.window = o.window < 0 ? -1 : o.window;
  p.documents = o.q_starts ? o.q_starts->numel() - 1 : 0;
  p.q = strides_of(q), p.k = strides_of(k), p.v = strides_of(v);
#ifdef ML_WITH_CUDA
  if (q.is_cuda()) {
    const auto type = q.scalar_type();
    ML_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half,
             "q: CUDA kernels take bfloat16 and float16");
    ML_CHECK(p.dim % 8 == 0 && p.value_dim % 8 == 0 && p.dim <= 256 && p.value_dim <= p.dim,
             "q, v: CUDA kernels take head dims in multiples of 8 up to 256, v's at most q's");
  }
#endif
  return p;
}

// What CPU kernels and CUDA launchers share of a call.
AttentionCall call_of(const Tensor& q, const AttentionProblem& p, const Options& o) {
  AttentionCall call{};
  call.dtype = element_type(q, "q");
  call.problem = p;
  call.scale = o.scale, call.softcap = o.softcap, call.dropout = o.dropout;
  if (o.dropout > 0.0) {
    const std::vector<int64_t>& d = o.decisions;
    call.decisions = {d[0], d[1], d[2], d[3], d[4], d[5]};
    call.samples = static_cast<const int32_t*>(o.samples->const_data_ptr());
  }
  return call;
}

// One document or batch entry; rows behind the last document make one more.
std::vector<AttentionPiece> documents_of(const AttentionProblem& p, const Options& o) {
  std::vector<AttentionPiece> all;
  if (p.documents == 0) {
    for (int64_t batch = 0; batch < p.batch; ++batch)
      all.push_back({batch, 0, 0, 0, p.q_len, p.k_len, 0, 0, 0});
    return all;
  }
  const auto* qs = static_cast<const int32_t*>(o.q_starts->const_data_ptr());
  const auto* ks = static_cast<const int32_t*>(o.k_starts->const_data_ptr());
  ML_CHECK(qs[0] >= 0 && ks[0] >= 0, "q_starts, k_starts: must not be negative");
  for (int64_t i = 0; i < p.documents; ++i) {
    ML_CHECK(qs[i] <= qs[i + 1] && ks[i] <= ks[i + 1] && qs[i + 1] <= p.q_len &&
                 ks[i + 1] <= p.k_len,
             "q_starts, k_starts: must not fall nor exceed the lengths; see document ", i);
    all.push_back({0, 0, qs[i], ks[i], qs[i + 1] - qs[i], ks[i + 1] - ks[i], 0, 0, 0});
  }
  const int64_t q_end = qs[p.documents], k_end = ks[p.documents];
  const auto alone = [&](int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
    if (q0 < q1 || k0 < k1) all.push_back({0, 0, q0, k0, q1 - q0, k1 - k0, 0, 0, 0});
  };
  alone(0, qs[0], 0, 0);
  alone(0, 0, 0, ks[0]);
  alone(q_end, p.q_len, k_end, k_end);
  alone(q_end, q_end, k_end, p.k_len);
  return all;
}

// Later queries first: under a causal mask they see most.
std::vector<AttentionPiece> forward_pieces(const AttentionProblem& p, const Options& o) {
  std::vector<AttentionPiece> pieces;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t rows = group >= kRowsOfPiece / 64 ? 64 : kRowsOfPiece / group / 64 * 64;
  for (AttentionPiece piece : documents_of(p, o))
    for (piece.kv_head = 0; piece.kv_head < p.kv_heads; ++piece.kv_head)
      for (int64_t first = (piece.q_len - 1) / rows * rows; first >= 0 && piece.q_len > 0;
           first -= rows) {
        piece.first = first;
        piece.last = first + rows < piece.q_len ? first + rows : piece.q_len;
        pieces.push_back(piece);
      }
  return pieces;
}

int64_t longest(const std::vector<AttentionPiece>& documents) {
  int64_t most = 0;
  for (const AttentionPiece& piece : documents) most = piece.k_len > most ? piece.k_len : most;
  return most;
}

// Slabs of partial dq: enough pieces for some threads, whatever their number is. 0: none needed.
int64_t slabs_of(const AttentionProblem& p, int64_t longest_keys) {
  constexpr int64_t kRound = kAttentionKeysOfRound;
  if (longest_keys <= kRound) return 0;
  const int64_t rounds = (longest_keys + kRound - 1) / kRound;
  int64_t slabs = kWantedPieces / (p.batch * p.kv_heads);
  slabs = slabs < kMostSlabs ? slabs : kMostSlabs;
  slabs = slabs < rounds ? slabs : rounds;
  return slabs < 1 ? 1 : slabs;
}

std::vector<AttentionPiece> backward_pieces(const std::vector<AttentionPiece>& documents,
                                            const AttentionProblem& p, int64_t slabs) {
  constexpr int64_t kRound = kAttentionKeysOfRound;
  std::vector<AttentionPiece> pieces;
  for (AttentionPiece piece : documents)
    for (piece.kv_head = 0; piece.kv_head < p.kv_heads; ++piece.kv_head) {
      const int64_t rounds = (piece.k_len + kRound - 1) / kRound, parts = slabs < 1 ? 1 : slabs;
      const int64_t keys = rounds == 0 ? 1 : (rounds + parts - 1) / parts * kRound;
      for (piece.slab = 0; piece.slab < parts; ++piece.slab) {
        piece.first = piece.slab * keys;
        piece.last = piece.first + keys < piece.k_len ? piece.first + keys : piece.k_len;
        const bool writes_dq = slabs == 0 && piece.k_len == 0;
        if (piece.first < piece.last || writes_dq) pieces.push_back(piece);
      }
    }
  return pieces;
}

// Every thread takes pieces until there are none.
template <class Kernel>
void run_pieces(const AttentionCall& call, const Kernel& kernel) {
  if (call.num_pieces == 0) return;
  const int64_t threads = torch::stable::get_num_threads();
  int64_t next = 0;
  torch::stable::parallel_for(0, threads < call.num_pieces ? threads : call.num_pieces, 1,
                              [&](int64_t, int64_t) { kernel(call, &next); });
}

#ifdef ML_WITH_CUDA
const int32_t* starts_on_device(const MaybeTensor& starts) {
  return starts ? static_cast<const int32_t*>(starts->const_data_ptr()) : nullptr;
}
const int64_t* as_array(const AttentionProblem& p) { return &p.batch; }

void backward_on_cuda(AttentionCall& call, const Options& o, const Tensor& q) {
  const LaunchStream stream = stream_of(q);
  const int64_t* problem = as_array(call.problem);
  const int64_t dtype = static_cast<int64_t>(call.dtype);
  const int32_t* qs = starts_on_device(o.q_starts);
  const int32_t* ks = starts_on_device(o.k_starts);
  const auto* lse = static_cast<const float*>(call.lse);
  auto* delta = static_cast<float*>(call.delta);
  const auto* decisions = &call.decisions.seed;
  const auto* samples = reinterpret_cast<const uint32_t*>(call.samples);
  check_launch(launch_attention_delta(call.out, call.dout, static_cast<const float*>(call.dlse),
                                      delta, problem, dtype, stream),
               "attention_delta");
  check_launch(launch_attention_backward_query(call.q, call.k, call.v, call.dout, lse, delta,
                                               call.dq, qs, ks, problem, dtype, call.scale,
                                               call.softcap, call.dropout, decisions, samples,
                                               stream),
               "attention_backward_query");
  check_launch(launch_attention_backward_key(call.q, call.k, call.v, call.dout, lse, delta,
                                             call.dk, call.dv, qs, ks, problem, dtype, call.scale,
                                             call.softcap, call.dropout, decisions, samples,
                                             stream),
               "attention_backward_key");
}
#endif

void backward_on_cpu(AttentionCall& call, const Options& o, const Tensor& q) {
  const AttentionProblem& p = call.problem;
  const std::vector<AttentionPiece> documents = documents_of(p, o);
  const int64_t slabs = slabs_of(p, longest(documents));
  const int64_t rows = p.batch * p.q_len * p.heads;
  Tensor partial = nothing_like(q, wide_type(q));
  if (slabs > 0) {
    partial = new_shape(q, {slabs, rows, p.dim}, wide_type(q));
    torch::stable::zero_(partial);
    call.partial = partial.mutable_data_ptr();
    call.slabs = slabs;
  }
  run_rows(rows, p.value_dim,
           [&](int64_t first, int64_t last) { attention_delta(call, first, last); });
  const std::vector<AttentionPiece> pieces = backward_pieces(documents, p, slabs);
  call.pieces = pieces.data();
  call.num_pieces = static_cast<int64_t>(pieces.size());
  run_pieces(call, [](const AttentionCall& c, int64_t* next) { attention_backward(c, next); });
  if (slabs > 0)
    run_rows(rows, p.dim * slabs,
             [&](int64_t first, int64_t last) { attention_sum_partial(call, first, last); });
}

void check_row_values(const Tensor& q, const Tensor& x, const char* name) {
  check_shape(x, {q.size(1), q.size(2), q.size(0)}, name);
  ML_CHECK(x.scalar_type() == wide_type(q) && x.is_cuda() == q.is_cuda(), name,
           ": must be float32 (float64 with float64 tensors) on the device of q");
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward_op(Tensor q, Tensor k, Tensor v, bool causal,
                                                int64_t offset, int64_t window, double scale,
                                                double softcap, MaybeTensor q_starts,
                                                MaybeTensor k_starts, double dropout,
                                                std::vector<int64_t> decisions,
                                                MaybeTensor samples) {
  const Options options{causal,   offset,   window,  scale,     softcap,
                        q_starts, k_starts, dropout, decisions, samples};
  ML_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v: must be [s, b, n, d]");
  q = readable(q), k = readable(k), v = readable(v);
  AttentionProblem p = problem_of(q, k, v, options);
  Tensor out = new_shape(q, {p.q_len, p.batch, p.heads, p.value_dim}, q.scalar_type());
  Tensor lse = new_shape(q, {p.batch, p.heads, p.q_len}, wide_type(q));
  p.out = strides_of(out);
  AttentionCall call = call_of(q, p, options);
  call.q = q.const_data_ptr(), call.k = k.const_data_ptr(), call.v = v.const_data_ptr();
  call.out = out.mutable_data_ptr(), call.lse = lse.mutable_data_ptr();
#ifdef ML_WITH_CUDA
  if (q.is_cuda()) {
    if (q_starts) {  // kernels write the rows of documents only
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -INFINITY);
    }
    check_launch(
        launch_attention_forward(call.q, call.k, call.v, call.out, static_cast<float*>(call.lse),
                                 starts_on_device(q_starts), starts_on_device(k_starts),
                                 as_array(call.problem), static_cast<int64_t>(call.dtype), scale,
                                 softcap, dropout, &call.decisions.seed,
                                 reinterpret_cast<const uint32_t*>(call.samples), stream_of(q)),
        "attention_forward");
    return {out, lse};
  }
#endif
  const std::vector<AttentionPiece> pieces = forward_pieces(p, options);
  call.pieces = pieces.data();
  call.num_pieces = static_cast<int64_t>(pieces.size());
  run_pieces(call, [](const AttentionCall& c, int64_t* next) { attention_forward(c, next); });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_op(
    Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, MaybeTensor dlse,
    bool causal, int64_t offset, int64_t window, double scale, double softcap,
    MaybeTensor q_starts, MaybeTensor k_starts, double dropout, std::vector<int64_t> decisions,
    MaybeTensor samples) {
  const Options options{causal,   offset,   window,  scale,     softcap,
                        q_starts, k_starts, dropout, decisions, samples};
  ML_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v: must be [s, b, n, d]");
  q = readable(q), k = readable(k), v = readable(v);
  AttentionProblem p = problem_of(q, k, v, options);
  check_alike(q, dout, "dout");
  check_alike(q, out, "out");
  check_shape(dout, {p.q_len, p.batch, p.heads, p.value_dim}, "dout");
  check_shape(out, {p.q_len, p.batch, p.heads, p.value_dim}, "out");
  check_row_values(q, lse, "lse");
  if (dlse) check_row_values(q, *dlse, "dlse");
  dout = readable(dout), out = readable(out);
  lse = torch::stable::contiguous(lse);
  if (dlse) dlse = torch::stable::contiguous(*dlse);
  Tensor delta = new_like(lse);
  Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
  p.out = strides_of(out), p.dout = strides_of(dout);
  p.dq = strides_of(dq), p.dk = strides_of(dk), p.dv = strides_of(dv);
  AttentionCall call = call_of(q, p, options);
  call.q = q.const_data_ptr(), call.k = k.const_data_ptr(), call.v = v.const_data_ptr();
  call.dout = dout.const_data_ptr(), call.out = const_cast<void*>(out.const_data_ptr());
  call.lse = const_cast<void*>(lse.const_data_ptr()), call.delta = delta.mutable_data_ptr();
  call.dlse = dlse ? dlse->const_data_ptr() : nullptr;
  call.dq = dq.mutable_data_ptr(), call.dk = dk.mutable_data_ptr();
  call.dv = dv.mutable_data_ptr();
#ifdef ML_WITH_CUDA
  if (q.is_cuda()) {
    if (q_starts)
      for (Tensor* x : {&dq, &dk, &dv}) torch::stable::zero_(*x);
    backward_on_cuda(call, options, q);
    return {dq, dk, dv};
  }
#endif
  backward_on_cpu(call, options, q);
  return {dq, dk, dv};
}

}  // namespace ml
