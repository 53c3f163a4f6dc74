// Cross-entropy over rows of logits: statistics of a shard, loss, and gradient in place.
//
//   logits  [t, stored]  T, rows at any stride; columns [columns, stored) are padding: never
//                        read, their gradient is written as 0
//   target  [t] int64    column of the label in this shard; outside [0, columns): held elsewhere
//   peak    [t]          row maximum m (-inf of no columns)
//   sums    [2 or 3, t]  s = sum exp(x - m); p = x[target] - m (0 where held elsewhere);
//                        q = sum (x - m), where m = -inf counts as 0
//   scale   [t]          gradient of the total with respect to each token's loss
//   loss    [t]          log s - (1 - e) p - e q / classes + z (m + log s)^2
//
// with label smoothing e, z-loss z and all statistics over the whole vocabulary of `classes`;
// the gradient of column j is
//   scale ((1 + 2 z (m + log s)) exp(x_j - m) / s - (1 - e) [j == target] - e / classes),
// rounded once. A row whose scale is 0 gets a gradient of 0 whatever its logits are.
//
// Maximum and sum run together over blocks of columns that fit the first-level cache; the
// gradient finds the row in the second. Arithmetic is float (double): two exponentials per
// logit. Traffic = 2 t stored sizeof(T) bytes (whole), once more where the statistics go first.
// A row is one thread's: the same bits for any number of threads. NaN in a row reaches its loss.
#include "cross_entropy/cpu/cross_entropy.h"

#include <cmath>

#include "cpu/math.h"
#include "cpu/vector.h"

namespace ml {
namespace ML_ISA {
namespace {

constexpr int64_t kBlock = 2048;  // columns

template <class A>
struct Statistics {
  A peak, sum, picked, total;
};

template <class A>
constexpr A kInfinity = static_cast<A>(__builtin_inf());

template <class T>
ML_INLINE Vector<Wide<T>> load_filled(const T* x, int64_t count, Wide<T> fill) {
  Vector<Wide<T>> value = load_some(x, count);
  for (int64_t i = count; i < kLanes<Wide<T>>; ++i) value[i] = fill;
  return value;
}

// Calls body(accumulator, vector) over x[0, n), four vectors side by side; the tail is filled.
template <class T, class Body>
ML_INLINE void over_columns(const T* x, int64_t n, Wide<T> fill, const Body& body) {
  constexpr int64_t W = kLanes<Wide<T>>;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) body(j, load(x + i + j * W));
  for (; i + W <= n; i += W) body(0, load(x + i));
  if (i < n) body(0, load_filled(x + i, n - i, fill));
}

template <class T>
ML_INLINE Wide<T> largest_of(const T* x, int64_t n) {
  using A = Wide<T>;
  const Vector<A> none = splat(-kInfinity<A>);
  Vector<A> most[4] = {none, none, none, none};
  over_columns(x, n, -kInfinity<A>,
               [&](int j, Vector<A> value) { most[j] = maximum<A>(value, most[j]); });
  return largest<A>(maximum<A>(maximum<A>(most[0], most[1]), maximum<A>(most[2], most[3])));
}

template <class T, bool Totals>
ML_INLINE Statistics<Wide<T>> statistics_of(const T* x, int64_t columns, int64_t target) {
  using A = Wide<T>;
  A peak = -kInfinity<A>, base = 0, sum_of_row = 0, total = 0, origin = 0;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const T* block = x + first;
    const int64_t n = columns - first < kBlock ? columns - first : kBlock;
    const A most = largest_of(block, n);
    if (most > peak) {
      sum_of_row *= std::exp(peak - most);
      peak = base = most;
      if (first == 0) origin = most;
    }
    Vector<A> sums[4] = {}, totals[4] = {};
    over_columns(block, n, -kInfinity<A>, [&](int j, Vector<A> value) {
      sums[j] += exp_falling(value - base);
    });
    sum_of_row += sum<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (Totals) {
      // Relative to a logit of the row, so that a large common offset costs no digits.
      over_columns(block, n, origin, [&](int j, Vector<A> value) { totals[j] += value - origin; });
      total += sum<A>((totals[0] + totals[1]) + (totals[2] + totals[3]));
    }
  }
  if (Totals) total += static_cast<A>(columns) * (origin - base);
  const bool held = target >= 0 && target < columns;
  return {peak, sum_of_row, held ? widen_element(x[target]) - base : A(0), total};
}

template <class T>
ML_INLINE Statistics<Wide<T>> statistics_of(const CrossEntropy& c, int64_t row, bool totals) {
  const T* x = static_cast<const T*>(c.logits) + row * c.stride;
  return totals ? statistics_of<T, true>(x, c.columns, c.target[row])
                : statistics_of<T, false>(x, c.columns, c.target[row]);
}

template <class T>
ML_INLINE void write_gradient(const CrossEntropy& c, int64_t row, const Statistics<Wide<T>>& s,
                              Wide<T> log_sum) {
  using A = Wide<T>;
  T* x = static_cast<T*>(c.logits) + row * c.stride;
  const A scale = static_cast<const A*>(c.scale)[row];
  if (scale == A(0)) {
    std::memset(static_cast<void*>(x), 0, sizeof(T) * static_cast<size_t>(c.stored));
    return;
  }
  std::memset(static_cast<void*>(x + c.columns), 0,
              sizeof(T) * static_cast<size_t>(c.stored - c.columns));
  const A smoothing = static_cast<A>(c.label_smoothing), z = static_cast<A>(c.z_loss);
  const A share = scale * (A(1) + A(2) * z * (s.peak + log_sum)) / s.sum;
  const A spread = scale * smoothing / static_cast<A>(c.classes);
  const A peak = s.peak;
  const auto value = [&](Vector<A> logit) { return exp_falling(logit - peak) * share - spread; };
  const int64_t target = c.target[row];
  const bool held = target >= 0 && target < c.columns;
  const Vector<A> label =
      held ? value(splat(widen_element(x[target]))) - scale * (A(1) - smoothing) : Vector<A>{};
  for_each_vector<A>(c.columns, [&](int64_t i, int64_t n) {
    store_part(x + i, value(load_part(x + i, n)), n);
  });
  if (held) store_some(x + target, label, 1);
}

template <class T>
ML_INLINE void finish_row(const CrossEntropy& c, int64_t row, const Statistics<Wide<T>>& s) {
  using A = Wide<T>;
  const A smoothing = static_cast<A>(c.label_smoothing), z = static_cast<A>(c.z_loss);
  const A log_sum = std::log(s.sum);
  A loss = log_sum - (A(1) - smoothing) * s.picked;
  if (smoothing != A(0)) loss -= smoothing * s.total / static_cast<A>(c.classes);
  if (z != A(0)) loss += z * (s.peak + log_sum) * (s.peak + log_sum);
  static_cast<A*>(c.loss)[row] = loss;
  if (c.gradient) write_gradient<T>(c, row, s, log_sum);
}

}  // namespace

void cross_entropy_statistics(const CrossEntropy& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    using A = Wide<T>;
    A* sums = static_cast<A*>(call.sums);
    for (int64_t row = first; row < last; ++row) {
      const Statistics<A> s = statistics_of<T>(call, row, call.totals);
      static_cast<A*>(call.peak)[row] = s.peak;
      sums[row] = s.sum;
      sums[call.rows + row] = s.picked;
      if (call.totals) sums[2 * call.rows + row] = s.total;
    }
  });
}

void cross_entropy_gradient(const CrossEntropy& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    using A = Wide<T>;
    const A* sums = static_cast<const A*>(call.sums);
    for (int64_t row = first; row < last; ++row)
      finish_row<T>(call, row,
                    {static_cast<const A*>(call.peak)[row], sums[row], sums[call.rows + row],
                     call.totals ? sums[2 * call.rows + row] : A(0)});
  });
}

void cross_entropy_whole(const CrossEntropy& call, int64_t first, int64_t last) {
  with_element(call.dtype, [&](auto element) {
    using T = decltype(element);
    for (int64_t row = first; row < last; ++row)
      finish_row<T>(call, row, statistics_of<T>(call, row, call.label_smoothing != 0.0));
  });
}

}  // namespace ML_ISA
}  // namespace ml
