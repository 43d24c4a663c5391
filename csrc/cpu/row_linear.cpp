// Products of few rows with a weight matrix: dot products along K, straight from the weights as they lie in memory.
//
// Every output is summed in one order that depends on K alone: eight lanes over stretches of kRowLinearStretch, a fixed
// tree over the lanes, then stretch after stretch. The tiles only decide what is kept in registers meanwhile.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr int kTileRows = 3, kTileColumns = 4;  // 12 sums, 4 weights and 1 input fill the 16 vector registers
constexpr int64_t kLineFloats = 16;

// Outputs of one group of columns, row by row: the rows of `out` lie far apart, often in the same cache set, so they are
// written once, a whole line at a time.
struct Group {
  float* sums;  // [rows, kRowLinearGroup]
  int64_t first;
};

// The weights of the following columns, fetched line by line while the present ones are multiplied. Bursts would fill the
// core's few slots for outstanding lines and stall it.
template <int kCols>
struct Fetch {
  const float* next;  // nullptr = nothing follows
  int64_t stride, length, interval, wait, done;

  GRPO_MC_INLINE void step() {
    if (--wait > 0) return;
    wait = interval;
    if (next == nullptr || done >= length) return;
    for (int c = 0; c < kCols; ++c) __builtin_prefetch(next + c * stride + done);
    done += kLineFloats;
  }
};

// group.sums[r, c] (+)= x[r] . weight[c] over `length` entries, for kRows rows and kCols columns.
template <int kRows, int kCols>
GRPO_MC_INLINE void tile(const RowLinear& p, const Group& group, int64_t row, int64_t column, int64_t start, int64_t length, Fetch<kCols>& fetch) {
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
  for (; k + kLanes <= length; k += kLanes) {
    step(k, [](const float* q) { return load8(q); });
    fetch.step();
  }
  if (k < length) step(k, [left = length - k](const float* q) { return load_tail(q, left, 0.0f); });
  for (int r = 0; r < kRows; ++r) {
    float* out = group.sums + (row + r) * kRowLinearGroup + column - group.first;
    float totals[kCols];
    if constexpr (kCols == 4) sum8x4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], totals);
    else
      for (int c = 0; c < kCols; ++c) totals[c] = sum8(sums[r][c]);
    for (int c = 0; c < kCols; ++c) out[c] = start == 0 ? totals[c] : out[c] + totals[c];
  }
}

// All rows against kCols columns.
template <int kCols>
GRPO_MC_INLINE void columns(const RowLinear& p, const Group& group, int64_t column, int64_t start, int64_t length, const float* next) {
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows, interval = tiles * kLineFloats / kLanes;
  Fetch<kCols> fetch{next, p.weight_stride, length, interval, 1, 0};
  int64_t row = 0;
  // A single row would leave most sums of a tile idle: the last four rows are two tiles of two.
  for (; row + kTileRows <= p.rows && p.rows - row != kTileRows + 1; row += kTileRows)
    tile<kTileRows, kCols>(p, group, row, column, start, length, fetch);
  for (; row + 2 <= p.rows; row += 2) tile<2, kCols>(p, group, row, column, start, length, fetch);
  for (; row < p.rows; ++row) tile<1, kCols>(p, group, row, column, start, length, fetch);
}

}  // namespace

void row_linear_columns(const RowLinear& p, float* scratch, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kRowLinearGroup) {
    const Group group{scratch, first};
    const int64_t last = std::min(first + kRowLinearGroup, end);
    if (p.depth == 0) std::fill(scratch, scratch + p.rows * kRowLinearGroup, 0.0f);
    for (int64_t start = 0; start < p.depth; start += kRowLinearStretch) {
      const int64_t length = std::min(kRowLinearStretch, p.depth - start);
      int64_t column = first;
      for (; column + kTileColumns <= last; column += kTileColumns) {
        const bool more = column + 2 * kTileColumns <= end;
        columns<kTileColumns>(p, group, column, start, length, more ? p.weight + (column + kTileColumns) * p.weight_stride + start : nullptr);
      }
      for (; column < last; ++column) columns<1>(p, group, column, start, length, nullptr);
    }
    for (int64_t row = 0; row < p.rows; ++row)
      std::copy(scratch + row * kRowLinearGroup, scratch + row * kRowLinearGroup + last - first, p.out + row * p.out_stride + first);
  }
}

}  // namespace grpo_mc::GRPO_MC_ISA
