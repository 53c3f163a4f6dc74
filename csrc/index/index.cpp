// Sample index and blend index: the loops over documents and samples that numpy cannot
// express without temporaries. Oracles: megatron_lite/data/sample_index.py and blend.py.
//
//   lengths        [S]       int32, tokens per sequence
//   document_index [D]       int32, shuffled sequence numbers, epochs back to back
//   sample_index   [n+1, 2]  int32 or int64, row i = (position in document_index, offset)
//                            of flat token i * seq_length
//   weights        [d]       float64, counts [d] int64, starts [blocks, d] int64
//
// One pass, memory-bound: 8 bytes per document entry read, 8 or 16 bytes per sample written.
// Blends cost O(samples * datasets). Deterministic, single thread, the GIL is released.
// A value that does not fit the chosen type raises; nothing wraps.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

// The greedy choice compares w * i - count in plain doubles; a fused multiply-add would
// round differently on machines that have one.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace py = pybind11;

namespace {

using Int32Array = py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>;
using Int64Array = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
using DoubleArray = py::array_t<double, py::array::c_style | py::array::forcecast>;

template <typename Row>
void fill_sample_index(const std::int32_t* lengths, std::int64_t num_sequences,
                       const std::int32_t* document_index, std::int64_t num_documents,
                       std::int64_t seq_length, std::int64_t num_samples, Row* out) {
  constexpr std::int64_t limit = std::numeric_limits<Row>::max();
  std::int64_t position = 0;   // in document_index
  std::int64_t doc_start = 0;  // flat token at which that document begins
  std::int64_t doc_length = 0;
  auto load = [&](std::int64_t at) {
    if (at >= num_documents) throw std::out_of_range("more samples asked for than tokens exist");
    const std::int64_t sequence = document_index[at];
    if (sequence < 0 || sequence >= num_sequences)
      throw std::out_of_range("document index names sequence " + std::to_string(sequence));
    doc_length = lengths[sequence];
  };
  load(0);
  for (std::int64_t i = 0; i <= num_samples; ++i) {
    const std::int64_t token = i * seq_length;
    while (token >= doc_start + doc_length) {
      doc_start += doc_length;
      load(++position);
    }
    const std::int64_t offset = token - doc_start;
    if (position > limit || offset > limit)
      throw std::overflow_error("sample index does not fit its integer type");
    out[2 * i] = static_cast<Row>(position);
    out[2 * i + 1] = static_cast<Row>(offset);
  }
}

template <typename Row>
py::array sample_index_of(const Int32Array& lengths, const Int32Array& document_index,
                          std::int64_t seq_length, std::int64_t num_samples) {
  py::array_t<Row> out({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  const auto* lengths_at = lengths.data();
  const auto* documents_at = document_index.data();
  const std::int64_t sequences = lengths.size(), documents = document_index.size();
  Row* rows = out.mutable_data();
  {
    py::gil_scoped_release release;
    fill_sample_index<Row>(lengths_at, sequences, documents_at, documents, seq_length, num_samples,
                           rows);
  }
  return out;
}

py::array build_sample_index(const Int32Array& lengths, const Int32Array& document_index,
                             std::int64_t seq_length, std::int64_t num_samples, bool wide) {
  if (seq_length < 1 || num_samples < 0) throw std::invalid_argument("seq_length or num_samples");
  return wide ? sample_index_of<std::int64_t>(lengths, document_index, seq_length, num_samples)
              : sample_index_of<std::int32_t>(lengths, document_index, seq_length, num_samples);
}

// One greedy choice: the dataset that lags its share most; the first of equals wins.
// Datasets that have given `capacity` samples are out (capacity may be null: no limits).
class Greedy {
 public:
  Greedy(const double* weights, const std::int64_t* capacity, std::int64_t num, std::int64_t* counts)
      : weights_(weights), capacity_(capacity), num_(num), counts_(counts), lag_(num) {}

  std::int64_t next(std::int64_t step) {
    const double share = static_cast<double>(std::max<std::int64_t>(step, 1));
    for (std::int64_t d = 0; d < num_; ++d)
      lag_[d] = weights_[d] * share - static_cast<double>(counts_[d]);
    std::int64_t best = -1;
    double best_lag = -std::numeric_limits<double>::infinity();
    for (std::int64_t d = 0; d < num_; ++d) {
      const bool open = capacity_ == nullptr || counts_[d] < capacity_[d];
      if (open && lag_[d] > best_lag) {
        best_lag = lag_[d];
        best = d;
      }
    }
    if (best < 0) throw std::out_of_range("all datasets of the blend are exhausted");
    ++counts_[best];
    return best;
  }

 private:
  const double* weights_;
  const std::int64_t* capacity_;
  std::int64_t num_;
  std::int64_t* counts_;
  std::vector<double> lag_;
};

const std::int64_t* capacity_or_null(const Int64Array& capacity, py::ssize_t num) {
  if (capacity.size() == 0) return nullptr;
  if (capacity.size() != num) throw std::invalid_argument("one capacity per dataset");
  return capacity.data();
}

// Walk the whole blend, keeping only the counts at the start of each block of samples
// (last row: the totals), so a blend of any size costs 8 * d / block bytes per sample.
Int64Array blend_starts(const DoubleArray& weights, const Int64Array& capacity, std::int64_t size,
                        std::int64_t block) {
  if (size < 0 || block < 1) throw std::invalid_argument("size or block");
  const py::ssize_t num = weights.size();
  const std::int64_t blocks = (size + block - 1) / block;
  Int64Array out({static_cast<py::ssize_t>(blocks + 1), num});
  std::vector<std::int64_t> counts(num, 0);
  Greedy greedy(weights.data(), capacity_or_null(capacity, num), num, counts.data());
  std::int64_t* rows = out.mutable_data();
  {
    py::gil_scoped_release release;
    for (std::int64_t b = 0; b < blocks; ++b) {
      std::copy(counts.begin(), counts.end(), rows + b * num);
      const std::int64_t end = std::min(size, (b + 1) * block);
      for (std::int64_t step = b * block; step < end; ++step) greedy.next(step);
    }
    std::copy(counts.begin(), counts.end(), rows + blocks * num);
  }
  return out;
}

// Replay `length` steps from `start` with the counts before it.
py::tuple blend_block(const DoubleArray& weights, const Int64Array& capacity,
                      const Int64Array& counts, std::int64_t start, std::int64_t length) {
  const py::ssize_t num = weights.size();
  if (counts.size() != num) throw std::invalid_argument("one count per dataset");
  if (num > std::numeric_limits<std::int16_t>::max())
    throw std::overflow_error("dataset numbers are 16 bit");
  std::vector<std::int64_t> running(counts.data(), counts.data() + num);
  Greedy greedy(weights.data(), capacity_or_null(capacity, num), num, running.data());
  py::array_t<std::int16_t> datasets(static_cast<py::ssize_t>(length));
  Int64Array samples(static_cast<py::ssize_t>(length));
  auto* datasets_at = datasets.mutable_data();
  auto* samples_at = samples.mutable_data();
  {
    py::gil_scoped_release release;
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int64_t chosen = greedy.next(start + i);
      datasets_at[i] = static_cast<std::int16_t>(chosen);
      samples_at[i] = running[chosen] - 1;
    }
  }
  return py::make_tuple(datasets, samples);
}

}  // namespace

PYBIND11_MODULE(_index, m) {
  m.doc() = "Sample and blend indices; see megatron_lite/data/native.py.";
  m.def("build_sample_index", &build_sample_index, py::arg("lengths"), py::arg("document_index"),
        py::arg("seq_length"), py::arg("num_samples"), py::arg("wide"));
  m.def("blend_starts", &blend_starts, py::arg("weights"), py::arg("capacity"), py::arg("size"),
        py::arg("block"));
  m.def("blend_block", &blend_block, py::arg("weights"), py::arg("capacity"), py::arg("counts"),
        py::arg("start"), py::arg("length"));
}
