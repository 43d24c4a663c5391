// nvcc: sm_80 sm_90 sm_100
// row_linear: a warp takes four columns, its lanes run along the depth, and every weight is loaded once for up to sixteen
// rows.
//
// Few rows are bound by the bytes of the weights, from some 25 rows on the float multiply-adds are. An output is summed in
// one order that depends on the depth alone: lane l adds entries 4 l to 4 l + 3 of every 128, and a fixed tree adds the
// lanes; so a row's result is the same whatever the tile, the other rows and the addresses.
#include "cuda/launchers.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kColumns = 4, kEntries = 4;

// Entries k to k + 3 of a row, zeros past its end.
struct Four {
  __device__ __forceinline__ void load(const float* row, int64_t k, int64_t depth, bool is_aligned) {
    if (is_aligned && k + kEntries <= depth) {
      load_pack(row + k, x);
      return;
    }
#pragma unroll
    for (int i = 0; i < kEntries; ++i) x[i] = k + i < depth ? row[k + i] : 0.0f;
  }
  float x[kEntries];
};

// kRows rows from `row` on times the columns from `column` on; those past the end are taken again and not written.
template <int kRows>
__device__ __forceinline__ void tile(const RowLinear& p, int64_t row, int64_t column, bool is_aligned) {
  const int lane = threadIdx.x % kWarp;
  float sums[kRows][kColumns] = {};
  const float *x[kRows], *weight[kColumns];
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = p.x + (row + r < p.rows ? row + r : p.rows - 1) * p.x_stride;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) weight[c] = p.weight + (column + c < p.columns ? column + c : p.columns - 1) * p.weight_stride;
#pragma unroll(kRows == 1 ? 4 : kRows <= 4 ? 2 : 1)
  for (int64_t k = int64_t{lane} * kEntries; k < p.depth; k += kWarp * kEntries) {
    Four w[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) w[c].load(weight[c], k, p.depth, is_aligned);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Four a;
      a.load(x[r], k, p.depth, is_aligned);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int i = 0; i < kEntries; ++i) sums[r][c] = fmaf(a.x[i], w[c].x[i], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float total = warp_sum(sums[r][c]);
      if (lane == 0 && row + r < p.rows && column + c < p.columns) p.out[(row + r) * p.out_stride + column + c] = total;
    }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1) columns_of_rows(RowLinear p, bool is_aligned) {
  const int64_t step = int64_t{gridDim.x} * kWarps * kColumns;
  for (int64_t column = (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kColumns; column < p.columns; column += step)
    for (int64_t row = 0; row < p.rows; row += kRows) tile<kRows>(p, row, column, is_aligned);
}

bool is_aligned(const float* rows, int64_t stride) { return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % kEntries == 0; }

}  // namespace

const char* row_linear(const RowLinear& p, void* stream) {
  const auto kernel = p.rows > 8   ? columns_of_rows<16>
                      : p.rows > 4 ? columns_of_rows<8>
                      : p.rows > 2 ? columns_of_rows<4>
                      : p.rows > 1 ? columns_of_rows<2>
                                   : columns_of_rows<1>;
  const unsigned blocks = blocks_for((p.columns + kWarps * kColumns - 1) / (kWarps * kColumns));
  return launch(kernel, blocks, kThreads, 0, stream, p, is_aligned(p.x, p.x_stride) && is_aligned(p.weight, p.weight_stride));
}

}  // namespace grpo_mc::cuda
