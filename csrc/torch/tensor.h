// What every operation's face needs of torch, through its stable ABI only.
//
//   ML_CHECK(condition, ...)   RuntimeError with the given text where it does not hold
//   element_type(x, "x")       DType of a tensor; refuses what kernels do not compute with
//   check_apart(x, y, ...)     what is written to shares no memory with y
//   Rows / rows_of(x, "x")     a tensor as rows of its last dim at one stride; copied only where
//                              its strides do not allow it
//   new_like / new_shape       outputs on the device of an input
//   run_rows(n, cost, body)    body(first, last) over torch's threads
//   stream_of(x)               the current CUDA stream of a tensor's device, where launches go
//                              while the result lives
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "cpu/elements.h"

#ifdef ML_WITH_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#define ML_CHECK(condition, ...) STD_TORCH_CHECK(condition, __VA_ARGS__)

namespace ml {

using Tensor = torch::stable::Tensor;
using MaybeTensor = std::optional<torch::stable::Tensor>;
using torch::headeronly::ScalarType;

inline DType element_type(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::fp32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::fp16;
    case ScalarType::Double: return DType::fp64;
    default: break;
  }
  ML_CHECK(false, name, ": dtype must be float32, bfloat16, float16 or float64");
  return DType::fp32;
}

// Statistics, losses and softmax: fp64 of fp64, else fp32.
inline ScalarType wide_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_alike(const Tensor& x, const Tensor& other, const char* name) {
  ML_CHECK(other.scalar_type() == x.scalar_type(), name, ": dtype differs from the input's");
  ML_CHECK(other.is_cuda() == x.is_cuda() && other.get_device_index() == x.get_device_index(),
           name, ": lies on another device than the input");
}

template <class Sizes>
inline std::string text_of(const Sizes& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline void check_shape(const Tensor& x, std::initializer_list<int64_t> shape, const char* name) {
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  int64_t dim = 0;
  for (const int64_t size : shape) same = same && (dim < x.dim()) && x.size(dim) == size, ++dim;
  ML_CHECK(same, name, ": wrong shape ", text_of(x.sizes()), ", must be ", text_of(shape));
}

// By the memory between first and last element.
inline void check_apart(const Tensor& written, const Tensor& other, const char* name,
                        const char* other_name) {
  if (written.numel() == 0 || other.numel() == 0) return;
  const auto first = [](const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); };
  const auto behind = [&](const Tensor& x) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
    return first(x) + (last + 1) * static_cast<int64_t>(x.element_size());
  };
  ML_CHECK(behind(written) <= first(other) || behind(other) <= first(written), name,
           ": is written to, must not share memory with ", other_name);
}

inline Tensor new_shape(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::new_empty(like, {shape.data(), shape.size()}, dtype);
}
inline std::vector<int64_t> shape_of(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end()};
}
// Contiguous, of the shape and dtype of `like`.
inline Tensor new_like(const Tensor& like) {
  return new_shape(like, shape_of(like), like.scalar_type());
}
inline Tensor nothing_like(const Tensor& like, ScalarType dtype) {
  return new_shape(like, {0}, dtype);
}

struct Rows {
  Tensor held;  // keeps a copy alive
  int64_t rows, columns, stride;
  const void* data() const { return held.const_data_ptr(); }
};

inline Rows rows_of(const Tensor& x, const char* name) {
  ML_CHECK(x.dim() >= 1, name, ": must have at least one dim");
  const int64_t last = x.dim() - 1, columns = x.size(last);
  int64_t rows = 1;
  for (int64_t dim = 0; dim < last; ++dim) rows *= x.size(dim);
  // One stride serves if every dim steps over the whole of the next one that has more than a row.
  bool regular = columns <= 1 || x.stride(last) == 1;
  int64_t stride = columns, expected = -1;
  for (int64_t dim = last - 1; dim >= 0 && regular; --dim) {
    if (x.size(dim) == 1) continue;
    if (expected < 0) {
      stride = x.stride(dim);
      regular = stride >= columns;
    } else {
      regular = x.stride(dim) == expected;
    }
    expected = x.stride(dim) * x.size(dim);
  }
  if (regular) return {x, rows, columns, stride};
  return {torch::stable::contiguous(x), rows, columns, columns};
}

// `cost` in elements per row: ranges get at least about 32k elements.
template <class Body>
inline void run_rows(int64_t rows, int64_t cost, const Body& body) {
  const int64_t grain = cost > 0 ? 32768 / cost + 1 : 1;
  if (rows > 0) torch::stable::parallel_for(0, rows, grain, body);
}

#ifdef ML_WITH_CUDA
// A launch goes to the current device: the tensor's becomes it, until the end of the statement
// that passes this as an argument.
class LaunchStream {
 public:
  explicit LaunchStream(const Tensor& x) : guard_(x.get_device_index()) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream_));
  }
  operator void*() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};
[[nodiscard]] inline LaunchStream stream_of(const Tensor& x) { return LaunchStream(x); }
inline void check_launch(int error, const char* name) {
  ML_CHECK(error == 0, name, ": CUDA launch failed with error ", error);
}
#endif
inline void refuse_fp64_on_cuda(const Tensor& x, const char* name) {
  ML_CHECK(!x.is_cuda() || x.scalar_type() != ScalarType::Double, name,
           ": no CUDA kernel for float64");
}

}  // namespace ml
