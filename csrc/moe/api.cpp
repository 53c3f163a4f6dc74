// Checks and dispatch of MoE routing, gather and combine.
#include "moe/api.h"

#include "moe/cpu/moe.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_moe_route(const int32_t* ids, int64_t assignments, int64_t experts, int64_t align,
                     int64_t rows, int64_t* counts, int64_t* offsets, int32_t* chunks,
                     int32_t* row_of, int32_t* source, void* stream);
int launch_moe_splits(const int64_t* counts, int64_t experts, int64_t ranks, int64_t* splits,
                      void* stream);
int launch_moe_gather(const void* x, int64_t x_stride, const int32_t* source, void* packed,
                      const float* probs, float* packed_probs, int64_t rows, int64_t row_bytes,
                      int64_t k, void* stream);
int launch_moe_scatter_probs(const float* packed, const int32_t* row_of, float* probs,
                             int64_t assignments, void* stream);
int launch_moe_combine(const void* packed, int64_t dtype, const int32_t* row_of,
                       const float* probs, void* out, int64_t tokens, int64_t h, int64_t k,
                       void* stream);
int launch_moe_combine_backward(const void* packed, int64_t dtype, const int32_t* row_of,
                                const int32_t* source, const float* probs, const void* d_out,
                                void* d_packed, float* d_probs, int64_t tokens, int64_t rows,
                                int64_t h, int64_t k, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kMostRows = 0x7fffffff, kMostExperts = 8192, kMostAlign = 1 << 20;
// From here on what reads packed next hardly finds it in a cache: written past them, its lines
// need not be fetched first. Of less, that reader loses more than the gather wins; more is new
// from the system (glibc keeps blocks of at most 32 MiB), which has just zeroed it in the caches.
constexpr int64_t kLeastStreamedBytes = 8 << 20, kMostStreamedBytes = 32 << 20;
constexpr int64_t kChunk = 512;  // of the workspace of csrc/moe/routing.cu

int32_t* ints(const Tensor& x) { return static_cast<int32_t*>(x.mutable_data_ptr()); }
int64_t* longs(const Tensor& x) { return static_cast<int64_t*>(x.mutable_data_ptr()); }
#ifdef ML_WITH_CUDA
float* floats(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }
float* floats(const MaybeTensor& x) { return x ? floats(*x) : nullptr; }
#endif

void check_indices(const Tensor& x, int64_t dims, const Tensor& like, const char* name) {
  ML_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == dims && x.is_contiguous(), name,
           ": must be contiguous int32 with ", dims, dims == 1 ? " dim" : " dims");
  ML_CHECK(x.is_cuda() == like.is_cuda(), name, ": lies on another device than the input");
}

// Values in [-1, bound): on the CPU a wrong index is told, not followed.
void check_below(const Tensor& x, int64_t bound, const char* name) {
  if (x.is_cuda()) return;
  int32_t most = -1;
  moe_largest(ints(x), x.numel(), most);
  ML_CHECK(most < bound, name, ": holds ", most, ", must be below ", bound);
}

// Kernels find the gradients of a row by row_of and what else is to be cleared by source.
void check_paired(const Tensor& row_of, const Tensor& source) {
  if (row_of.is_cuda()) return;
  const int32_t *rows = ints(row_of), *from = ints(source);
  MoePairs found{rows, from, row_of.numel(), source.numel()};
  moe_pairs(found);
  const int64_t wrong = found.wrong;
  ML_CHECK(wrong < 0, "source: row ", wrong, " is assignment ", from[wrong], ", whose row_of is ",
           rows[from[wrong]]);
  ML_CHECK(found.placed == found.filled, "row_of: places ", found.placed,
           " assignments, source has ", found.filled);
}

void check_probs(const Tensor& probs, const Tensor& row_of, const Tensor& like) {
  check_shape(probs, {row_of.size(0), row_of.size(1)}, "probs");
  ML_CHECK(probs.is_contiguous(), "probs: must be contiguous");
  ML_CHECK(probs.is_cuda() == like.is_cuda(), "probs: lies on another device than the input");
}

void check_matrix(const Tensor& x, const char* name) {
  ML_CHECK(x.dim() == 2, name, ": must have 2 dims, not ", x.dim());
}

struct Sizes {
  int64_t tokens, k, rows, h;
};

// What combine and its backward ask alike; packed is [rows, h].
Sizes check_combine(const Tensor& packed, const MaybeTensor& probs, const Tensor& row_of,
                    const Tensor& source) {
  check_matrix(packed, "packed");
  check_indices(row_of, 2, packed, "row_of");
  check_indices(source, 1, packed, "source");
  ML_CHECK(packed.size(0) == source.size(0), "packed: has ", packed.size(0), " rows, source ",
           source.size(0));
  if (probs) {
    check_probs(*probs, row_of, packed);
    ML_CHECK(probs->scalar_type() == wide_type(packed),
             "probs: dtype must be float32, or float64 of float64 rows");
  }
  refuse_fp64_on_cuda(packed, "moe_combine");
  check_below(row_of, packed.size(0), "row_of");
  return {row_of.size(0), row_of.size(1), packed.size(0), packed.size(1)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_route_op(Tensor ids, int64_t experts, int64_t align,
                                                        int64_t rows) {
  check_indices(ids, 2, ids, "ids");
  ML_CHECK(experts >= 1 && experts <= kMostExperts, "experts: must be in [1, ", kMostExperts,
           "], not ", experts);
  ML_CHECK(align >= 1 && align <= kMostAlign, "align: must be in [1, ", kMostAlign, "], not ",
           align);
  const int64_t n = ids.numel();
  const int64_t least = n + (experts < n ? experts : n) * (align - 1);
  ML_CHECK(rows >= least && rows <= kMostRows, "rows: must be in [", least, ", ", kMostRows,
           "] for ", n, " assignments, not ", rows);
  Tensor counts = new_shape(ids, {experts}, ScalarType::Long);
  Tensor offsets = new_shape(ids, {experts + 1}, ScalarType::Long);
  Tensor row_of = new_like(ids);
  Tensor source = new_shape(ids, {rows}, ScalarType::Int);
#ifdef ML_WITH_CUDA
  if (ids.is_cuda()) {
    Tensor chunks = new_shape(ids, {experts, (n + kChunk - 1) / kChunk}, ScalarType::Int);
    check_launch(launch_moe_route(ints(ids), n, experts, align, rows, longs(counts),
                                  longs(offsets), ints(chunks), ints(row_of), ints(source),
                                  stream_of(ids)),
                 "moe_route");
    return {counts, offsets, row_of, source};
  }
#endif
  moe_route(MoeRoute{ints(ids), n, experts, align, rows, longs(counts), longs(offsets),
                     ints(row_of), ints(source)});
  return {counts, offsets, row_of, source};
}

Tensor moe_splits_op(Tensor counts, int64_t ranks) {
  ML_CHECK(counts.scalar_type() == ScalarType::Long && counts.dim() == 1 && counts.is_contiguous(),
           "counts: must be contiguous int64 with 1 dim");
  const int64_t experts = counts.size(0);
  ML_CHECK(ranks >= 1 && experts % ranks == 0, "ranks: must divide the ", experts,
           " experts, not ", ranks);
  Tensor splits = new_shape(counts, {ranks}, ScalarType::Long);
#ifdef ML_WITH_CUDA
  if (counts.is_cuda()) {
    check_launch(
        launch_moe_splits(longs(counts), experts, ranks, longs(splits), stream_of(counts)),
        "moe_splits");
    return splits;
  }
#endif
  const int64_t share = experts / ranks;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t sum = 0;
    for (int64_t e = 0; e < share; ++e) sum += longs(counts)[rank * share + e];
    longs(splits)[rank] = sum;
  }
  return splits;
}

std::tuple<Tensor, Tensor> moe_gather_op(Tensor x, MaybeTensor probs, Tensor source,
                                         Tensor row_of) {
  check_matrix(x, "x");
  check_indices(row_of, 2, x, "row_of");
  check_indices(source, 1, x, "source");
  ML_CHECK(x.size(0) == row_of.size(0), "x: has ", x.size(0), " tokens, row_of ", row_of.size(0));
  if (probs) check_probs(*probs, row_of, x);
  check_below(source, row_of.numel(), "source");
  const ScalarType prob_type = probs ? probs->scalar_type() : ScalarType::Float;
  ML_CHECK(prob_type == ScalarType::Float || (prob_type == ScalarType::Double && !x.is_cuda()),
           "probs: dtype must be float32 (float64 on the CPU)");
  const Rows tokens = rows_of(x, "x");
  const int64_t rows = source.size(0), size = static_cast<int64_t>(x.element_size());
  const int64_t k = row_of.size(1);
  Tensor packed_probs = new_shape(x, {probs ? rows : 0}, prob_type);
  Tensor packed = new_shape(x, {rows, tokens.columns}, x.scalar_type());
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_moe_gather(tokens.data(), tokens.stride * size, ints(source),
                          packed.mutable_data_ptr(), floats(probs),
                          probs ? floats(packed_probs) : nullptr, rows, tokens.columns * size,
                          k < 1 ? 1 : k, stream_of(x)),
        "moe_gather");
    return {packed, packed_probs};
  }
#endif
  const int64_t row_bytes = tokens.columns * size, packed_bytes = rows * row_bytes;
  const bool whole_lines =
      reinterpret_cast<uintptr_t>(packed.mutable_data_ptr()) % 64 == 0 && row_bytes % 64 == 0;
  const MoeGather call{ints(source),
                       static_cast<const char*>(tokens.data()),
                       static_cast<char*>(packed.mutable_data_ptr()),
                       tokens.stride * size,
                       row_bytes,
                       k,
                       probs ? static_cast<const char*>(probs->const_data_ptr()) : nullptr,
                       static_cast<char*>(packed_probs.mutable_data_ptr()),
                       probs ? static_cast<int64_t>(probs->element_size()) : 0,
                       whole_lines && packed_bytes >= kLeastStreamedBytes &&
                           packed_bytes < kMostStreamedBytes};
  run_rows(rows, tokens.columns,
           [&](int64_t first, int64_t last) { moe_gather(call, first, last); });
  return {packed, packed_probs};
}

Tensor moe_scatter_probs_op(Tensor packed_probs, Tensor row_of) {
  check_indices(row_of, 2, packed_probs, "row_of");
  ML_CHECK(packed_probs.dim() == 1 && packed_probs.is_contiguous(),
           "packed_probs: must be contiguous with 1 dim");
  const ScalarType dtype = packed_probs.scalar_type();
  ML_CHECK(dtype == ScalarType::Float || (dtype == ScalarType::Double && !row_of.is_cuda()),
           "packed_probs: dtype must be float32 (float64 on the CPU)");
  check_below(row_of, packed_probs.size(0), "row_of");
  Tensor probs = new_shape(packed_probs, shape_of(row_of), dtype);
#ifdef ML_WITH_CUDA
  if (row_of.is_cuda()) {
    check_launch(launch_moe_scatter_probs(floats(packed_probs), ints(row_of), floats(probs),
                                          row_of.numel(), stream_of(row_of)),
                 "moe_scatter_probs");
    return probs;
  }
#endif
  moe_scatter_probs(packed_probs.const_data_ptr(), ints(row_of), probs.mutable_data_ptr(),
                    row_of.numel(), static_cast<int64_t>(packed_probs.element_size()));
  return probs;
}

Tensor moe_combine_op(Tensor packed, MaybeTensor probs, Tensor row_of, Tensor source) {
  const DType dtype = element_type(packed, "packed");
  const Sizes sizes = check_combine(packed, probs, row_of, source);
  packed = torch::stable::contiguous(packed);
  Tensor out = new_shape(packed, {sizes.tokens, sizes.h}, packed.scalar_type());
#ifdef ML_WITH_CUDA
  if (packed.is_cuda()) {
    ML_CHECK(sizes.k >= 1, "row_of: must have at least one slot");
    check_launch(launch_moe_combine(packed.const_data_ptr(), static_cast<int64_t>(dtype),
                                    ints(row_of), floats(probs), out.mutable_data_ptr(),
                                    sizes.tokens, sizes.h, sizes.k, stream_of(packed)),
                 "moe_combine");
    return out;
  }
#endif
  const MoeCombine call{dtype,
                        probs.has_value(),
                        ints(row_of),
                        packed.const_data_ptr(),
                        probs ? probs->const_data_ptr() : nullptr,
                        out.mutable_data_ptr(),
                        sizes.h,
                        sizes.k};
  run_rows(sizes.tokens, sizes.h * sizes.k,
           [&](int64_t first, int64_t last) { moe_combine(call, first, last); });
  return out;
}

std::tuple<Tensor, Tensor> moe_combine_backward_op(Tensor grad, Tensor packed, MaybeTensor probs,
                                                   Tensor row_of, Tensor source) {
  const DType dtype = element_type(packed, "packed");
  const Sizes sizes = check_combine(packed, probs, row_of, source);
  check_alike(packed, grad, "grad");
  check_shape(grad, {sizes.tokens, sizes.h}, "grad");
  check_below(source, row_of.numel(), "source");
  check_paired(row_of, source);
  packed = torch::stable::contiguous(packed);
  grad = torch::stable::contiguous(grad);
  Tensor d_packed = new_like(packed);
  Tensor d_probs = new_shape(packed, {probs ? sizes.tokens : 0, probs ? sizes.k : 0},
                             wide_type(packed));
#ifdef ML_WITH_CUDA
  if (packed.is_cuda()) {
    ML_CHECK(sizes.k >= 1, "row_of: must have at least one slot");
    check_launch(
        launch_moe_combine_backward(packed.const_data_ptr(), static_cast<int64_t>(dtype),
                                    ints(row_of), ints(source), floats(probs),
                                    grad.const_data_ptr(), d_packed.mutable_data_ptr(),
                                    probs ? floats(d_probs) : nullptr, sizes.tokens, sizes.rows,
                                    sizes.h, sizes.k, stream_of(packed)),
        "moe_combine_backward");
    return {d_packed, d_probs};
  }
#endif
  const MoeCombineBackward call{dtype,
                                probs.has_value(),
                                ints(row_of),
                                packed.const_data_ptr(),
                                probs ? probs->const_data_ptr() : nullptr,
                                grad.const_data_ptr(),
                                d_packed.mutable_data_ptr(),
                                d_probs.mutable_data_ptr(),
                                sizes.h,
                                sizes.k};
  run_rows(sizes.tokens, sizes.h * sizes.k,
           [&](int64_t first, int64_t last) { moe_combine_backward(call, first, last); });
  moe_clear_padding(ints(source), sizes.rows, d_packed.mutable_data_ptr(),
                    sizes.h * static_cast<int64_t>(packed.element_size()));
  return {d_packed, d_probs};
}

}  // namespace ml
