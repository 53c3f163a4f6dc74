// What the lanes of a warp compute together, once all of them have arrived.
#include <cstring>

#include "sim/block.h"

namespace sim {

namespace {

template <class Visit>
void for_lanes(uint32_t mask, Visit visit) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) visit(__builtin_ctz(rest));
}

// ---- shuffles --------------------------------------------------------------------------
// `source(lane, parameter, width)`: the lane that is read; its own where none is.
template <class Source>
void shuffle(uint32_t mask, Arrival* const* arrivals, Source source) {
  uint64_t operands[32];
  for_lanes(mask, [&](int lane) { operands[lane] = arrivals[lane]->bits; });
  for_lanes(mask, [&](int lane) {
    Arrival& arrival = *arrivals[lane];
    const int width = arrival.width;
    if (width < 1 || width > 32 || (width & (width - 1)) != 0)
      fail(arrival.site, "the width of a shuffle is a power of two up to 32");
    const int from = source(lane, arrival.parameter, width);
    if (!(mask >> from & 1)) fail(arrival.site, "a shuffle reads a lane outside of its mask");
    arrival.bits = operands[from];
  });
}

void by_index(uint32_t mask, Arrival* const* arrivals) {
  shuffle(mask, arrivals, [](int lane, int parameter, int width) {
    return (lane & ~(width - 1)) | (parameter & (width - 1));
  });
}
void by_up(uint32_t mask, Arrival* const* arrivals) {
  shuffle(mask, arrivals, [](int lane, int delta, int width) {
    const int from = lane - (delta & 31);
    return from < (lane & ~(width - 1)) ? lane : from;
  });
}
void by_down(uint32_t mask, Arrival* const* arrivals) {
  shuffle(mask, arrivals, [](int lane, int delta, int width) {
    const int from = lane + (delta & 31);
    return from > (lane | (width - 1)) ? lane : from;
  });
}
void by_xor(uint32_t mask, Arrival* const* arrivals) {
  shuffle(mask, arrivals, [](int lane, int lane_mask, int width) {
    const int from = lane ^ (lane_mask & 31);
    return from > (lane | (width - 1)) ? lane : from;
  });
}

// ---- votes, matches, reductions --------------------------------------------------------
void vote(uint32_t mask, Arrival* const* arrivals) {
  uint32_t ballot = 0;
  for_lanes(mask, [&](int lane) { ballot |= static_cast<uint32_t>(arrivals[lane]->bits) << lane; });
  for_lanes(mask, [&](int lane) { arrivals[lane]->bits = ballot; });
}

void find_equal(uint32_t mask, Arrival* const* arrivals) {
  uint32_t equal[32];
  for_lanes(mask, [&](int lane) {
    equal[lane] = 0;
    for_lanes(mask, [&](int other) {
      if (arrivals[other]->bits == arrivals[lane]->bits) equal[lane] |= 1u << other;
    });
  });
  for_lanes(mask, [&](int lane) { arrivals[lane]->bits = equal[lane]; });
}

void all_equal(uint32_t mask, Arrival* const* arrivals) {
  bool equal = true;
  const uint64_t first = arrivals[__builtin_ctz(mask)]->bits;
  for_lanes(mask, [&](int lane) { equal = equal && arrivals[lane]->bits == first; });
  for_lanes(mask, [&](int lane) { arrivals[lane]->bits = equal ? mask : 0; });
}

template <class T, class Combine>
void reduce(uint32_t mask, Arrival* const* arrivals, Combine combine) {
  const int first = __builtin_ctz(mask);
  T total = static_cast<T>(static_cast<uint32_t>(arrivals[first]->bits));
  for_lanes(mask & (mask - 1), [&](int lane) {
    total = combine(total, static_cast<T>(static_cast<uint32_t>(arrivals[lane]->bits)));
  });
  for_lanes(mask, [&](int lane) { arrivals[lane]->bits = static_cast<uint32_t>(total); });
}

template <class T>
void reduce_min(uint32_t mask, Arrival* const* arrivals) {
  reduce<T>(mask, arrivals, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
void reduce_max(uint32_t mask, Arrival* const* arrivals) {
  reduce<T>(mask, arrivals, [](T a, T b) { return b > a ? b : a; });
}
void reduce_sum(uint32_t mask, Arrival* const* arrivals) {
  reduce<uint32_t>(mask, arrivals, [](uint32_t a, uint32_t b) { return a + b; });
}
void reduce_bits_and(uint32_t mask, Arrival* const* arrivals) {
  reduce<uint32_t>(mask, arrivals, [](uint32_t a, uint32_t b) { return a & b; });
}
void reduce_bits_or(uint32_t mask, Arrival* const* arrivals) {
  reduce<uint32_t>(mask, arrivals, [](uint32_t a, uint32_t b) { return a | b; });
}
void reduce_bits_xor(uint32_t mask, Arrival* const* arrivals) {
  reduce<uint32_t>(mask, arrivals, [](uint32_t a, uint32_t b) { return a ^ b; });
}

// ---- operands of the tensor cores ------------------------------------------------------
float from_bf16(uint32_t bits) {
  const uint32_t word = bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

float scaled(int sign, uint32_t mantissa, int exponent) {
  const float magnitude = __builtin_ldexpf(static_cast<float>(mantissa), exponent);
  return sign != 0 ? -magnitude : magnitude;
}

float from_fp16(uint32_t bits) {
  const int sign = static_cast<int>(bits >> 15 & 1);
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const uint32_t mantissa = bits & 1023;
  if (exponent == 31) {
    if (mantissa != 0) return __builtin_nanf("");
    return sign != 0 ? -__builtin_inff() : __builtin_inff();
  }
  return exponent == 0 ? scaled(sign, mantissa, -24) : scaled(sign, mantissa | 1024, exponent - 25);
}

float from_e4m3(uint32_t bits) {  // no infinity; all ones is NaN
  const int sign = static_cast<int>(bits >> 7 & 1);
  const int exponent = static_cast<int>(bits >> 3 & 15);
  const uint32_t mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return __builtin_nanf("");
  return exponent == 0 ? scaled(sign, mantissa, -9) : scaled(sign, mantissa | 8, exponent - 10);
}

// A table instead of the conversion: filled once, then read by all OS threads.
template <int bits, float (*convert)(uint32_t)>
float by_table(uint32_t value) {
  static const float* const table = [] {
    auto* entries = new float[size_t{1} << bits];
    for (uint32_t i = 0; i < (1u << bits); ++i) entries[i] = convert(i);
    return entries;
  }();
  return table[value];
}

// acc[16, 8] += a[16, k] * b[k, 8] with operands of `bits` bits, packed into registers.
//   lane = 4 * group + member
//   a register r, element e: row group + 8 * (r % 2), column member * p + e + 4 * p * (r / 2)
//   b register r, element e: row member * p + e + 4 * p * r, column group
//   accumulator c: row group + 8 * (c / 2), column 2 * member + c % 2
// where p = 32 / bits elements share a register.
template <int bits, float (*convert)(uint32_t)>
void multiply(uint32_t mask, Arrival* const* arrivals) {
  constexpr int p = 32 / bits;
  constexpr int k = 8 * p;
  constexpr uint32_t element_mask = (1u << bits) - 1;
  typedef float Row __attribute__((vector_size(32)));
  float a[16][k];
  Row b[k];
  if (mask != 0xffffffffu) fail(arrivals[__builtin_ctz(mask)]->site, "mma needs a whole warp");
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4;
    const int member = lane % 4;
    const auto* ra = static_cast<const uint32_t*>(arrivals[lane]->operand);
    const auto* rb = static_cast<const uint32_t*>(arrivals[lane]->operand2);
    for (int e = 0; e < p; ++e) {
      for (int r = 0; r < 4; ++r)
        a[group + 8 * (r % 2)][member * p + e + 4 * p * (r / 2)] =
            convert(ra[r] >> (bits * e) & element_mask);
      for (int r = 0; r < 2; ++r)
        b[member * p + e + 4 * p * r][group] = convert(rb[r] >> (bits * e) & element_mask);
    }
  }
  Row acc[16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* c = static_cast<const float*>(arrivals[lane]->result);
    for (int i = 0; i < 4; ++i) acc[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2] = c[i];
  }
  for (int row = 0; row < 16; row += 2) {  // two chains of sums hide each other's latency
    Row first = acc[row];
    Row second = acc[row + 1];
    for (int i = 0; i < k; ++i) {
      first += a[row][i] * b[i];
      second += a[row + 1][i] * b[i];
    }
    acc[row] = first;
    acc[row + 1] = second;
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto* c = static_cast<float*>(arrivals[lane]->result);
    for (int i = 0; i < 4; ++i) c[i] = acc[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
  current_lane().owner->counters.mma += 1;
}

// ---- ldmatrix --------------------------------------------------------------------------
// Passes that eight 16-byte rows take beyond one: rows in the same four banks, unless equal.
uint64_t replays_of(const char* const* rows) {
  int in_banks[8] = {};
  int most = 1;
  for (int i = 0; i < 8; ++i) {
    const auto group = reinterpret_cast<uintptr_t>(rows[i]) / 16 % 8;
    bool repeated = false;
    if (in_banks[group] != 0)
      for (int before = 0; before < i; ++before) repeated = repeated || rows[before] == rows[i];
    if (!repeated && ++in_banks[group] > most) most = in_banks[group];
  }
  return static_cast<uint64_t>(most - 1);
}

template <int count, bool transposed>
void load_matrices(uint32_t mask, Arrival* const* arrivals) {
  if (mask != 0xffffffffu) fail(arrivals[__builtin_ctz(mask)]->site, "ldmatrix needs a whole warp");
  Counters& counters = current_lane().owner->counters;
  for (int matrix = 0; matrix < count; ++matrix) {
    uint16_t elements[8][8];
    const char* rows[8];
    for (int row = 0; row < 8; ++row) {
      rows[row] = static_cast<const char*>(arrivals[8 * matrix + row]->operand);
      std::memcpy(elements[row], rows[row], 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4;
      const int column = 2 * (lane % 4);
      const uint32_t low = transposed ? elements[column][row] : elements[row][column];
      const uint32_t high = transposed ? elements[column + 1][row] : elements[row][column + 1];
      static_cast<uint32_t*>(arrivals[lane]->result)[matrix] = low | high << 16;
    }
    counters.ldmatrix += 1;
    counters.ldmatrix_replays += replays_of(rows);
  }
}

}  // namespace

const Collective shuffle_index = {"__shfl_sync", false, by_index};
const Collective shuffle_up = {"__shfl_up_sync", false, by_up};
const Collective shuffle_down = {"__shfl_down_sync", false, by_down};
const Collective shuffle_xor = {"__shfl_xor_sync", false, by_xor};
const Collective ballot = {"a vote", false, vote};
const Collective match_any = {"__match_any_sync", false, find_equal};
const Collective match_all = {"__match_all_sync", false, all_equal};
const Collective reduce_add = {"__reduce_add_sync", false, reduce_sum};
const Collective reduce_and = {"__reduce_and_sync", false, reduce_bits_and};
const Collective reduce_or = {"__reduce_or_sync", false, reduce_bits_or};
const Collective reduce_xor = {"__reduce_xor_sync", false, reduce_bits_xor};
const Collective reduce_min_signed = {"__reduce_min_sync", false, reduce_min<int32_t>};
const Collective reduce_max_signed = {"__reduce_max_sync", false, reduce_max<int32_t>};
const Collective reduce_min_unsigned = {"__reduce_min_sync", false, reduce_min<uint32_t>};
const Collective reduce_max_unsigned = {"__reduce_max_sync", false, reduce_max<uint32_t>};
const Collective mma_bf16 = {"mma_bf16_16816", true, multiply<16, from_bf16>};
const Collective mma_fp16 = {"mma_fp16_16816", true, multiply<16, by_table<16, from_fp16>>};
const Collective mma_e4m3 = {"mma_e4m3_16832", true, multiply<8, by_table<8, from_e4m3>>};
const Collective ldmatrix[2][3] = {{{"ldmatrix_x1", true, load_matrices<1, false>},
                                    {"ldmatrix_x2", true, load_matrices<2, false>},
                                    {"ldmatrix_x4", true, load_matrices<4, false>}},
                                   {{"ldmatrix_x1", true, load_matrices<1, true>},
                                    {"ldmatrix_x2", true, load_matrices<2, true>},
                                    {"ldmatrix_x4", true, load_matrices<4, true>}}};

}  // namespace sim
