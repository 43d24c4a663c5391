// Products of few rows with a weight matrix: dot products along K, straight from the weights as they lie in memory.
//
// Every output is summed in one order that depends on K alone: eight lanes over stretches of kRowLinearStretch, a fixed
// tree over the lanes, then stretch after stretch. The tiles only decide what is kept in registers meanwhile.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr int kColumns = 4;  // with 3 rows: 12 sums, 4 weights and 1 input fill the 16 vector registers

GRPO_MC_INLINE F8 load_part(const float* p, int64_t left) { return left >= kLanes ? load8(p) : load_tail(p, left, 0.0f); }

// out[r, c] (+)= x[r] . weight[c] over `length` entries, for kRows rows and kCols columns.
template <int kRows, int kCols>
GRPO_MC_INLINE void tile(const RowLinear& p, int64_t row, int64_t column, int64_t start, int64_t length) {
  const float* x = p.x + row * p.x_stride + start;
  const float* weight = p.weight + column * p.weight_stride + start;
  F8 sums[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) sums[r][c] = splat(0.0f);
  const auto step = [&](int64_t k, auto load) {
    F8 w[kCols];
    for (int c = 0; c < kCols; ++c) w[c] = load(weight + c * p.weight_stride + k);
    for (int r = 0; r < kRows; ++r) {
      const F8 a = load(x + r * p.x_stride + k);
      for (int c = 0; c < kCols; ++c) sums[r][c] = fma8(a, w[c], sums[r][c]);
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= length; k += kLanes) step(k, [](const float* q) { return load8(q); });
  if (k < length) step(k, [left = length - k](const float* q) { return load_part(q, left); });
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) {
      float* out = p.out + (row + r) * p.out_stride + column + c;
      *out = start == 0 ? sum8(sums[r][c]) : *out + sum8(sums[r][c]);
    }
}

template <int kRows>
GRPO_MC_INLINE void columns(const RowLinear& p, int64_t row, int64_t begin, int64_t end, int64_t start, int64_t length) {
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) tile<kRows, kColumns>(p, row, column, start, length);
  for (; column < end; ++column) tile<kRows, 1>(p, row, column, start, length);
}

}  // namespace

void row_linear_columns(const RowLinear& p, int64_t begin, int64_t end) {
  if (p.depth == 0) {
    for (int64_t row = 0; row < p.rows; ++row) std::fill(p.out + row * p.out_stride + begin, p.out + row * p.out_stride + end, 0.0f);
  }
  for (int64_t start = 0; start < p.depth; start += kRowLinearStretch) {
    const int64_t length = std::min(kRowLinearStretch, p.depth - start);
    int64_t row = 0;
    for (; row + 3 <= p.rows; row += 3) columns<3>(p, row, begin, end, start, length);
    for (; row < p.rows; ++row) columns<1>(p, row, begin, end, start, length);
  }
}

}  // namespace grpo_mc::GRPO_MC_ISA
