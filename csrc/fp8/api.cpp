// Checks and dispatch of FP8 quantization.
#include "fp8/api.h"

#include <cmath>
#include <limits>

#include "fp8/cpu/fp8.h"

#ifdef ML_WITH_CUDA
extern "C" {
int launch_fp8_amax(const void* x, int64_t dtype, uint32_t* partial, int64_t num_partials,
                    float* amax, int64_t rows, int64_t cols, int64_t stride, void* stream);
int launch_fp8_amax_finish(const uint32_t* partial, int64_t num_partials, float* amax,
                           void* stream);
int launch_fp8_scales(const float* amax, float* scale, float* scale_inv, int64_t n, int64_t e5m2,
                      float epsilon, int64_t power_of_two, void* stream);
int launch_fp8_delayed_update(float* history, float* scale, float* scale_inv, int64_t length,
                              int64_t n, int64_t most_recent, float margin_factor, int64_t e5m2,
                              float epsilon, int64_t power_of_two, void* stream);
int launch_fp8_quantize(const void* x, int64_t dtype, int64_t rows, int64_t cols, int64_t stride,
                        int64_t scaling, int64_t e5m2, uint8_t* codes, uint8_t* codes_t,
                        const float* scale, void* scale_inv, void* scale_inv_t,
                        uint32_t* partial, float epsilon, int64_t power_of_two,
                        int64_t stochastic, int64_t seed, int64_t c2, int64_t c3,
                        int64_t element_start, int64_t element_stride, void* stream);
int launch_fp8_dequantize(const uint8_t* codes, int64_t e5m2, int64_t scaling,
                          const void* scale_inv, void* out, int64_t dtype, int64_t rows,
                          int64_t cols, void* stream);
}
#endif

namespace ml {
namespace {

constexpr int64_t kAmaxPart = 65536;  // elements of a range that lies one behind the other
constexpr int64_t kTile = 128, kTileElements = kTile * kTile;

int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }
float* floats(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }
uint32_t* words(const Tensor& x) { return static_cast<uint32_t*>(x.mutable_data_ptr()); }
uint8_t* bytes(const Tensor& x) { return static_cast<uint8_t*>(x.mutable_data_ptr()); }

DType source_type(const Tensor& x) {
  const DType dtype = element_type(x, "x");
  ML_CHECK(dtype != DType::fp64, "x: dtype must be float32, bfloat16 or float16");
  return dtype;
}

void check_floats(const Tensor& x, const Tensor& like, const char* name) {
  ML_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), name,
           ": must be contiguous float32");
  ML_CHECK(x.is_cuda() == like.is_cuda(), name, ": lies on another device than the input");
}

Fp8Scaling scaling_of(int64_t scaling) {
  ML_CHECK(scaling >= 0 && scaling <= 3,
           "scaling: must be 0 (tensor), 1 (rows), 2 (square) or 3 (mx), not ", scaling);
  return static_cast<Fp8Scaling>(scaling);
}

Fp8ScaleRule rule_of(bool e5m2, double epsilon, bool power_of_two) {
  ML_CHECK(epsilon >= 0.0 && std::isfinite(static_cast<float>(epsilon)),
           "epsilon: must be finite in float32 and not below 0, is ", epsilon);
  return {e5m2 ? 57344.0f : 448.0f, static_cast<float>(epsilon), power_of_two};
}

// Largest of bits of magnitudes as a value; one canonical NaN.
Tensor finish_amax(const Tensor& partial) {
  Tensor amax = new_shape(partial, {1}, ScalarType::Float);
  const int64_t n = partial.numel();
#ifdef ML_WITH_CUDA
  if (partial.is_cuda()) {
    check_launch(launch_fp8_amax_finish(words(partial), n, floats(amax), stream_of(partial)),
                 "fp8_amax");
    return amax;
  }
#endif
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = words(partial)[i] > most ? words(partial)[i] : most;
  *floats(amax) = bits_to_float(most > 0x7f800000u ? 0x7fc00000u : most);
  return amax;
}

// The shape of the inverse scales of a [rows, cols] matrix of codes.
std::vector<int64_t> scale_shape(Fp8Scaling scaling, int64_t rows, int64_t cols) {
  switch (scaling) {
    case Fp8Scaling::tensor: return {1};
    case Fp8Scaling::rows: return {divided(cols, kTile), rows};
    case Fp8Scaling::square: return {divided(rows, kTile), divided(cols, kTile)};
    case Fp8Scaling::mx: break;
  }
  return {rows, divided(cols, 32)};
}

ScalarType scale_type(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::mx ? ScalarType::Float8_e8m0fnu : ScalarType::Float;
}

}  // namespace

Tensor fp8_amax_op(Tensor x) {
  const DType dtype = source_type(x);
  const Rows rows = rows_of(x, "x");
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    constexpr int64_t kMostPartials = 1056;  // eight for each of 132 multiprocessors
    Tensor partial = new_shape(x, {kMostPartials}, ScalarType::Int);
    Tensor amax = new_shape(x, {1}, ScalarType::Float);
    check_launch(launch_fp8_amax(rows.data(), static_cast<int64_t>(dtype), words(partial),
                                 kMostPartials, floats(amax), rows.rows, rows.columns, rows.stride,
                                 stream_of(x)),
                 "fp8_amax");
    return amax;
  }
#endif
  const int64_t n = rows.rows * rows.columns;
  Fp8Amax call{dtype, rows.data(), rows.columns, rows.stride, std::numeric_limits<int64_t>::max(),
               nullptr};
  int64_t parts = n == 0 ? 0 : rows.rows;
  if (rows.stride == rows.columns || rows.rows <= 1) {
    call.cols = call.stride = kAmaxPart;
    call.limit = n;
    parts = divided(n, kAmaxPart);
  }
  Tensor partial = new_shape(x, {parts}, ScalarType::Int);
  call.partial = words(partial);
  run_rows(parts, call.cols, [&](int64_t first, int64_t last) { fp8_amax(call, first, last); });
  return finish_amax(partial);
}

std::tuple<Tensor, Tensor> fp8_scales_op(Tensor amax, bool e5m2, double epsilon,
                                         bool power_of_two) {
  check_floats(amax, amax, "amax");
  const Fp8ScaleRule rule = rule_of(e5m2, epsilon, power_of_two);
  Tensor scale = new_like(amax), scale_inv = new_like(amax);
#ifdef ML_WITH_CUDA
  if (amax.is_cuda()) {
    check_launch(launch_fp8_scales(floats(amax), floats(scale), floats(scale_inv), amax.numel(),
                                   e5m2, rule.epsilon, power_of_two, stream_of(amax)),
                 "fp8_scales");
    return {scale, scale_inv};
  }
#endif
  fp8_scales({floats(amax), floats(scale), floats(scale_inv), rule}, 0, amax.numel());
  return {scale, scale_inv};
}

void fp8_delayed_update_op(Tensor history, Tensor scale, Tensor scale_inv, bool e5m2,
                           bool most_recent, int64_t margin, double epsilon, bool power_of_two) {
  check_floats(history, history, "history");
  check_floats(scale, history, "scale");
  check_floats(scale_inv, history, "scale_inv");
  ML_CHECK(history.dim() == 2 && history.size(0) >= 1, "history: must be [length, n], length >= 1");
  const int64_t length = history.size(0), n = history.size(1);
  ML_CHECK(scale.numel() == n && scale_inv.numel() == n, "scale, scale_inv: must have ", n,
           " elements as the history's rows");
  check_apart(scale, history, "scale", "history");
  check_apart(scale_inv, history, "scale_inv", "history");
  check_apart(scale, scale_inv, "scale", "scale_inv");
  ML_CHECK(margin > -100 && margin < 100, "margin: must be between -100 and 100, not ", margin);
  const float factor = static_cast<float>(std::ldexp(1.0, static_cast<int>(-margin)));
  const Fp8ScaleRule rule = rule_of(e5m2, epsilon, power_of_two);
#ifdef ML_WITH_CUDA
  if (history.is_cuda()) {
    check_launch(launch_fp8_delayed_update(floats(history), floats(scale), floats(scale_inv),
                                           length, n, most_recent, factor, e5m2, rule.epsilon,
                                           power_of_two, stream_of(history)),
                 "fp8_delayed_update");
    return;
  }
#endif
  fp8_delayed({floats(history), floats(scale), floats(scale_inv), length, n, most_recent, factor,
               rule},
              0, n);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_quantize_op(
    Tensor x, MaybeTensor scale, int64_t scaling, bool e5m2, bool rowwise, bool transposed,
    bool with_amax, double epsilon, bool power_of_two, bool stochastic, int64_t seed, int64_t c2,
    int64_t c3, int64_t start, int64_t row_stride) {
  const DType dtype = source_type(x);
  const Fp8Scaling kind = scaling_of(scaling);
  ML_CHECK(x.dim() == 2, "x: must have 2 dims, not ", x.dim());
  const bool given = kind == Fp8Scaling::tensor;
  ML_CHECK(scale.has_value() == given, "scale: is given with tensor scaling, and only then");
  ML_CHECK(given || !with_amax, "with_amax: is for tensor scaling; blocks have their own");
  if (scale) {
    check_floats(*scale, x, "scale");
    ML_CHECK(scale->numel() == 1, "scale: must be one element");
  }
  const Fp8ScaleRule rule = rule_of(e5m2, epsilon, power_of_two);
  const Rows source = rows_of(x, "x");
  const int64_t rows = source.rows, cols = source.columns;
  const ScalarType code_type = e5m2 ? ScalarType::Float8_e5m2 : ScalarType::Float8_e4m3fn;
  const auto codes_of = [&](bool wanted, int64_t height, int64_t width) {
    return wanted ? new_shape(x, {height, width}, code_type) : nothing_like(x, code_type);
  };
  const auto scales_of = [&](bool wanted, int64_t height, int64_t width) {
    return wanted ? new_shape(x, scale_shape(kind, height, width), scale_type(kind))
                  : nothing_like(x, scale_type(kind));
  };
  const bool square = kind == Fp8Scaling::square;
  Tensor codes = codes_of(rowwise, rows, cols), codes_t = codes_of(transposed, cols, rows);
  Tensor scale_inv = scales_of(!given && (rowwise || square), rows, cols);
  Tensor scale_inv_t = scales_of(!given && !square && transposed, cols, rows);
  const int64_t tiles = divided(rows, kTile) * divided(cols, kTile);
  Tensor partial = new_shape(x, {with_amax ? tiles : 0}, ScalarType::Int);
#ifdef ML_WITH_CUDA
  if (x.is_cuda()) {
    check_launch(
        launch_fp8_quantize(source.data(), static_cast<int64_t>(dtype), rows, cols, source.stride,
                            scaling, e5m2, rowwise ? bytes(codes) : nullptr,
                            transposed ? bytes(codes_t) : nullptr,
                            scale ? floats(*scale) : nullptr, scale_inv.mutable_data_ptr(),
                            scale_inv_t.mutable_data_ptr(), with_amax ? words(partial) : nullptr,
                            rule.epsilon, power_of_two, stochastic, seed, c2, c3, start,
                            row_stride, stream_of(x)),
        "fp8_quantize");
    Tensor amax = with_amax ? finish_amax(partial) : nothing_like(x, ScalarType::Float);
    return {codes, codes_t, scale_inv, scale_inv_t, amax};
  }
#endif
  const Fp8Quantize call{dtype,
                         kind,
                         e5m2,
                         rowwise,
                         transposed,
                         with_amax,
                         stochastic,
                         rule,
                         source.data(),
                         rows,
                         cols,
                         source.stride,
                         bytes(codes),
                         bytes(codes_t),
                         scale ? *floats(*scale) : 1.0f,
                         scale_inv.mutable_data_ptr(),
                         scale_inv_t.mutable_data_ptr(),
                         words(partial),
                         static_cast<uint64_t>(seed),
                         static_cast<uint32_t>(c2),
                         static_cast<uint32_t>(c3),
                         start,
                         row_stride};
  if (rowwise || transposed || with_amax || square)
    run_rows(tiles, kTileElements,
             [&](int64_t first, int64_t last) { fp8_quantize(call, first, last); });
  Tensor amax = with_amax ? finish_amax(partial) : nothing_like(x, ScalarType::Float);
  return {codes, codes_t, scale_inv, scale_inv_t, amax};
}

Tensor fp8_dequantize_op(Tensor codes, Tensor scale_inv, int64_t scaling, ScalarType dtype) {
  const Fp8Scaling kind = scaling_of(scaling);
  const bool e5m2 = codes.scalar_type() == ScalarType::Float8_e5m2;
  ML_CHECK(e5m2 || codes.scalar_type() == ScalarType::Float8_e4m3fn,
           "codes: dtype must be float8_e4m3fn or float8_e5m2");
  ML_CHECK(codes.dim() == 2, "codes: must have 2 dims, not ", codes.dim());
  ML_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 ||
               dtype == ScalarType::Half,
           "dtype: must be float32, bfloat16 or float16");
  ML_CHECK(scale_inv.scalar_type() == scale_type(kind), "scale_inv: dtype must be ",
           kind == Fp8Scaling::mx ? "float8_e8m0fnu" : "float32", " with this scaling");
  ML_CHECK(scale_inv.is_cuda() == codes.is_cuda(), "scale_inv: lies on another device");
  const int64_t rows = codes.size(0), cols = codes.size(1);
  ML_CHECK(kind == Fp8Scaling::tensor ? scale_inv.numel() == 1
                                      : shape_of(scale_inv) == scale_shape(kind, rows, cols),
           "scale_inv: wrong shape for these codes");
  codes = torch::stable::contiguous(codes);
  scale_inv = torch::stable::contiguous(scale_inv);
  Tensor out = new_shape(codes, {rows, cols}, dtype);
  const DType type = element_type(out, "out");
#ifdef ML_WITH_CUDA
  if (codes.is_cuda()) {
    check_launch(launch_fp8_dequantize(bytes(codes), e5m2, scaling, scale_inv.const_data_ptr(),
                                       out.mutable_data_ptr(), static_cast<int64_t>(type), rows,
                                       cols, stream_of(codes)),
                 "fp8_dequantize");
    return out;
  }
#endif
  const Fp8Dequantize call{type, kind, e5m2, bytes(codes), scale_inv.const_data_ptr(),
                           out.mutable_data_ptr(), rows, cols};
  run_rows(rows, cols, [&](int64_t first, int64_t last) { fp8_dequantize(call, first, last); });
  return out;
}

}  // namespace ml
