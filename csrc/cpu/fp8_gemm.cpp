// Products of FP8 matrices with a scale per 128 entries of the depth: exact products, float32 sums over one block of the
// depth, then one fma with both scales per block. Every output is summed in that order alone, whatever the tiles and
// threads, so results are the same bit for bit for any number of threads.
//
// The general path is a packed one: panels of 6 rows of a and 16 columns of b, decoded to float32 with the depth as the
// slow axis, meet in a tile of 12 vector registers. With few rows b is decoded as it streams by and never stored.
#include <algorithm>

#include "cpu/fp8_vec.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr int64_t kPanelRows = kFp8PanelRows, kPanelColumns = 16, kPanels = kFp8GroupColumns / kPanelColumns;
constexpr int64_t kPanelFloats = kFp8Block * kPanelColumns, kTileFloats = kPanelRows * kPanelColumns;

// Up to eight codes from p; the others are zeros.
GRPO_MC_INLINE F8 decode_part(const uint8_t* p, int64_t left) {
  if (left >= kLanes) return decode8(p);
  uint8_t padded[kLanes] = {};
  std::copy(p, p + left, padded);
  return decode8(padded);
}

#if defined(__AVX2__)
// rows[i][j] becomes rows[j][i].
GRPO_MC_INLINE void transpose8(F8* rows) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = (__m256)rows[i];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = (F8)_mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    rows[i + 4] = (F8)_mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}
#else
GRPO_MC_INLINE void transpose8(F8* rows) {
  for (int i = 0; i < 8; ++i)
    for (int j = i + 1; j < 8; ++j) {
      const float moved = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = moved;
    }
}
#endif

// Columns of b [valid, length] codes as panel [length, kPanelColumns] floats; columns past `valid` are zeros.
void pack_columns(const uint8_t* b, int64_t stride, int64_t valid, int64_t length, float* panel) {
  for (int64_t k = 0; k < length; k += kLanes) {
    const int64_t left = std::min(kLanes, length - k);
    for (int64_t half = 0; half < kPanelColumns; half += kLanes) {
      F8 rows[kLanes];
      for (int64_t c = 0; c < kLanes; ++c)
        rows[c] = half + c < valid ? decode_part(b + (half + c) * stride + k, left) : splat(0.0f);
      transpose8(rows);
      for (int64_t i = 0; i < left; ++i) store8(panel + (k + i) * kPanelColumns + half, rows[i]);
    }
  }
}

// sums [6, 16] += (a panel [length, 6] times b panel [length, 16]) * a_scale[row] * b_scale[column].
GRPO_MC_INLINE void multiply_panels(const float* a, const float* b, int64_t length, const float* a_scale, const float* b_scale, float* sums) {
  F8 part[kPanelRows][2] = {};
  for (int64_t k = 0; k < length; ++k) {
    const F8 b0 = load8(b + k * kPanelColumns), b1 = load8(b + k * kPanelColumns + kLanes);
    for (int r = 0; r < kPanelRows; ++r) {
      const F8 x = splat(a[k * kPanelRows + r]);
      part[r][0] = fma8(x, b0, part[r][0]);
      part[r][1] = fma8(x, b1, part[r][1]);
    }
  }
  for (int r = 0; r < kPanelRows; ++r)
    for (int h = 0; h < 2; ++h) {
      float* sum = sums + r * kPanelColumns + h * kLanes;
      store8(sum, fma8(part[r][h], splat(a_scale[r]) * load8(b_scale + h * kLanes), load8(sum)));
    }
}

template <typename T>
GRPO_MC_INLINE void write_row(const float* sums, T* out, int64_t count, bool accumulate) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) store8(out + c, accumulate ? load8(out + c) + load8(sums + c) : load8(sums + c));
  if (c < count) {
    const F8 part = load_tail(sums + c, count - c, 0.0f);
    store_tail(out + c, count - c, accumulate ? load_tail(out + c, count - c, 0.0f) + part : part);
  }
}

void write_out(const Fp8Gemm& p, int64_t row, int64_t column, int64_t count, const float* sums) {
  if (p.dtype == Element::kFloat) write_row(sums, static_cast<float*>(p.out) + row * p.out_stride + column, count, p.accumulate);
  else write_row(sums, static_cast<uint16_t*>(p.out) + row * p.out_stride + column, count, p.accumulate);
}

// out[rows] of one column: the decoded rows against one row of codes.
template <int kRows>
GRPO_MC_INLINE void few_rows_column(const Fp8Gemm& p, const float* rows, int64_t column, int64_t blocks) {
  const uint8_t* codes = p.b + column * p.b_stride;
  const float* b_scale = p.b_scale + column / p.b_scale_rows * blocks;
  const int64_t width = blocks * kFp8Block;
  F8 sums[kRows] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kFp8Block, last = std::min(p.depth, first + kFp8Block);
    F8 part[kRows] = {};
    for (int64_t k = first; k < last; k += kLanes) {
      const F8 w = decode_part(codes + k, last - k);
      for (int r = 0; r < kRows; ++r) part[r] = fma8(load8(rows + r * width + k), w, part[r]);
    }
    for (int r = 0; r < kRows; ++r) sums[r] = fma8(part[r], splat(p.a_scale[r * blocks + block] * b_scale[block]), sums[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    const float total = sum8(sums[r]);
    write_out(p, r, column, 1, &total);
  }
}

}  // namespace

// Panel `panel` of a, decoded, as [block of the depth][panel][kFp8Block, 6]; rows past the end are zeros.
void fp8_pack_panel(const Fp8Gemm& p, int64_t panel, int64_t num_panels, float* packed) {
  const int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, p.rows - first);
  for (int64_t block = 0; block < fp8_blocks(p.depth); ++block) {
    float* out = packed + (block * num_panels + panel) * kFp8Block * kPanelRows;
    const int64_t start = block * kFp8Block, length = std::min<int64_t>(kFp8Block, p.depth - start);
    for (int64_t r = 0; r < kPanelRows; ++r)
      for (int64_t k = 0; k < length; k += kLanes) {
        const int64_t left = std::min(kLanes, length - k);
        const F8 x = r < rows ? decode_part(p.a + (first + r) * p.a_stride + start + k, left) : splat(0.0f);
        for (int64_t i = 0; i < left; ++i) out[(k + i) * kPanelRows + r] = x[i];
      }
  }
}

// Columns [group * kFp8GroupColumns, ...) of all rows. scratch: kPanels panels of b, then the sums of every tile.
void fp8_gemm_group(const Fp8Gemm& p, const float* packed, int64_t group, float* scratch) {
  const int64_t first = group * kFp8GroupColumns, columns = std::min(kFp8GroupColumns, p.columns - first);
  const int64_t panels = (p.rows + kPanelRows - 1) / kPanelRows, blocks = fp8_blocks(p.depth);
  float *b_panels = scratch, *sums = scratch + kPanels * kPanelFloats;
  std::fill(sums, sums + panels * kPanels * kTileFloats, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t start = block * kFp8Block, length = std::min<int64_t>(kFp8Block, p.depth - start);
    float b_scale[kFp8GroupColumns] = {};
    for (int64_t c = 0; c < columns; ++c) b_scale[c] = p.b_scale[(first + c) / p.b_scale_rows * blocks + block];
    for (int64_t h = 0; h < kPanels; ++h) {
      const int64_t valid = std::clamp<int64_t>(columns - h * kPanelColumns, 0, kPanelColumns);
      pack_columns(p.b + (first + h * kPanelColumns) * p.b_stride + start, p.b_stride, valid, length, b_panels + h * kPanelFloats);
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const float* a = packed + (block * panels + panel) * kFp8Block * kPanelRows;
      float a_scale[kPanelRows] = {};
      const int64_t rows = std::min(kPanelRows, p.rows - panel * kPanelRows);
      for (int64_t r = 0; r < rows; ++r) a_scale[r] = p.a_scale[(panel * kPanelRows + r) * blocks + block];
      for (int64_t h = 0; h < kPanels; ++h)
        multiply_panels(a, b_panels + h * kPanelFloats, length, a_scale, b_scale + h * kPanelColumns, sums + (panel * kPanels + h) * kTileFloats);
    }
  }
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t h = 0; h < kPanels && h * kPanelColumns < columns; ++h) {
      const float* tile = sums + (row / kPanelRows * kPanels + h) * kTileFloats + row % kPanelRows * kPanelColumns;
      write_out(p, row, first + h * kPanelColumns, std::min(kPanelColumns, columns - h * kPanelColumns), tile);
    }
}

// The same for few rows, which come decoded: rows [p.rows, whole blocks of the depth].
void fp8_few_rows_group(const Fp8Gemm& p, const float* rows, int64_t group) {
  const int64_t blocks = fp8_blocks(p.depth), last = std::min((group + 1) * kFp8GroupColumns, p.columns);
  for (int64_t column = group * kFp8GroupColumns; column < last; ++column) {
    switch (p.rows) {
      case 1: few_rows_column<1>(p, rows, column, blocks); break;
      case 2: few_rows_column<2>(p, rows, column, blocks); break;
      case 3: few_rows_column<3>(p, rows, column, blocks); break;
      case 4: few_rows_column<4>(p, rows, column, blocks); break;
      case 5: few_rows_column<5>(p, rows, column, blocks); break;
      case 6: few_rows_column<6>(p, rows, column, blocks); break;
      case 7: few_rows_column<7>(p, rows, column, blocks); break;
      default: few_rows_column<8>(p, rows, column, blocks); break;
    }
  }
}

}  // namespace grpo_mc::GRPO_MC_ISA
