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

constexpr int64_t kPanelRows = kFp8PanelRows, kPanelColumns = 16, kStripPanels = kFp8StripColumns / kPanelColumns;
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

GRPO_MC_INLINE float scale_at(const Fp8Operand& x, int64_t row, int64_t block) {
  return x.scale[(x.square ? row / kFp8Block : row) * x.scale_stride + block * x.scale_block_stride];
}

// Columns [first, first + valid) of b at depth [start, start + length) as panel [length, kPanelColumns] floats; columns
// past `valid` are zeros.
void pack_columns(const Fp8Operand& b, int64_t first, int64_t valid, int64_t start, int64_t length, float* panel) {
  if (b.by_depth) {
    const uint8_t* codes = b.codes + start * b.stride + first;
    for (int64_t k = 0; k < length; ++k, codes += b.stride)
      for (int64_t half = 0; half < kPanelColumns; half += kLanes)
        store8(panel + k * kPanelColumns + half, half < valid ? decode_part(codes + half, valid - half) : splat(0.0f));
    return;
  }
  const uint8_t* codes = b.codes + first * b.stride + start;
  for (int64_t k = 0; k < length; k += kLanes) {
    const int64_t left = std::min(kLanes, length - k);
    for (int64_t half = 0; half < kPanelColumns; half += kLanes) {
      F8 rows[kLanes];
      for (int64_t c = 0; c < kLanes; ++c)
        rows[c] = half + c < valid ? decode_part(codes + (half + c) * b.stride + k, left) : splat(0.0f);
      transpose8(rows);
      for (int64_t i = 0; i < left; ++i) store8(panel + (k + i) * kPanelColumns + half, rows[i]);
    }
  }
}

// Rows [first, first + valid) of a at depth [start, start + length) as panel [length, kPanelRows] floats; rows past
// `valid` are zeros.
void pack_rows(const Fp8Operand& a, int64_t first, int64_t valid, int64_t start, int64_t length, float* panel) {
  if (a.by_depth) {
    const uint8_t* codes = a.codes + start * a.stride + first;
    const bool may_read_on = valid == kPanelRows && a.stride >= 2;  // two codes past the panel: there is another place
    for (int64_t k = 0; k < length; ++k, codes += a.stride) {
      const F8 x = may_read_on && k + 1 < length ? decode8(codes) : decode_part(codes, valid);
      for (int64_t r = 0; r < kPanelRows; ++r) panel[k * kPanelRows + r] = x[r];
    }
    return;
  }
  for (int64_t r = 0; r < kPanelRows; ++r)
    for (int64_t k = 0; k < length; k += kLanes) {
      const int64_t left = std::min(kLanes, length - k);
      const F8 x = r < valid ? decode_part(a.codes + (first + r) * a.stride + start + k, left) : splat(0.0f);
      for (int64_t i = 0; i < left; ++i) panel[(k + i) * kPanelRows + r] = x[i];
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

// Sums of all rows and of the columns of one strip, from one block of the depth.
void multiply_strip(const Fp8Gemm& p, const float* packed, int64_t block, int64_t first, float* b_panels, float* sums) {
  const int64_t columns = std::min(kFp8StripColumns, p.columns - first), panels = (p.rows + kPanelRows - 1) / kPanelRows;
  const int64_t start = block * kFp8Block, length = std::min<int64_t>(kFp8Block, p.depth - start);
  float b_scale[kFp8StripColumns] = {};
  for (int64_t c = 0; c < columns; ++c) b_scale[c] = scale_at(p.b, first + c, block);
  for (int64_t h = 0; h < kStripPanels; ++h) {
    const int64_t valid = std::clamp<int64_t>(columns - h * kPanelColumns, 0, kPanelColumns);
    pack_columns(p.b, first + h * kPanelColumns, valid, start, length, b_panels + h * kPanelFloats);
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    const float* a = packed + (block * panels + panel) * kFp8Block * kPanelRows;
    float a_scale[kPanelRows] = {};
    const int64_t rows = std::min(kPanelRows, p.rows - panel * kPanelRows);
    for (int64_t r = 0; r < rows; ++r) a_scale[r] = scale_at(p.a, panel * kPanelRows + r, block);
    for (int64_t h = 0; h < kStripPanels; ++h)
      multiply_panels(a, b_panels + h * kPanelFloats, length, a_scale, b_scale + h * kPanelColumns, sums + (panel * kStripPanels + h) * kTileFloats);
  }
}

// out[rows] of one column: the decoded rows against one row of codes.
template <int kRows>
GRPO_MC_INLINE void few_rows_column(const Fp8Gemm& p, const float* rows, int64_t column, int64_t blocks) {
  const uint8_t* codes = p.b.codes + column * p.b.stride;
  const int64_t width = blocks * kFp8Block;
  F8 sums[kRows] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kFp8Block, last = std::min(p.depth, first + kFp8Block);
    F8 part[kRows] = {};
    for (int64_t k = first; k < last; k += kLanes) {
      const F8 w = decode_part(codes + k, last - k);
      for (int r = 0; r < kRows; ++r) part[r] = fma8(load8(rows + r * width + k), w, part[r]);
    }
    const float b_scale = scale_at(p.b, column, block);
    for (int r = 0; r < kRows; ++r) sums[r] = fma8(part[r], splat(scale_at(p.a, r, block) * b_scale), sums[r]);
  }
  for (int r = 0; r < kRows; ++r) {
    const float total = sum8(sums[r]);
    write_out(p, r, column, 1, &total);
  }
}

}  // namespace

// Panel `panel` of a, decoded, as [block of the depth][panel][kFp8Block, 6]; rows past the end are zeros.
void fp8_pack_panel(const Fp8Gemm& p, int64_t panel, float* packed) {
  const int64_t panels = (p.rows + kPanelRows - 1) / kPanelRows, first = panel * kPanelRows, valid = std::min(kPanelRows, p.rows - first);
  for (int64_t block = 0; block < fp8_blocks(p.depth); ++block) {
    const int64_t start = block * kFp8Block, length = std::min<int64_t>(kFp8Block, p.depth - start);
    pack_rows(p.a, first, valid, start, length, packed + (block * panels + panel) * kFp8Block * kPanelRows);
  }
}

// Columns [group * p.group_columns, ...) of all rows. scratch: a strip of kStripPanels panels of b, then the sums of every tile.
void fp8_gemm_group(const Fp8Gemm& p, const float* packed, int64_t group, float* scratch) {
  const int64_t first = group * p.group_columns, columns = std::min(p.group_columns, p.columns - first);
  const int64_t panels = (p.rows + kPanelRows - 1) / kPanelRows, blocks = fp8_blocks(p.depth);
  const int64_t strips = (columns + kFp8StripColumns - 1) / kFp8StripColumns, strip_floats = panels * kStripPanels * kTileFloats;
  float *b_panels = scratch, *sums = scratch + kStripPanels * kPanelFloats;
  std::fill(sums, sums + strips * strip_floats, 0.0f);
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t strip = 0; strip < strips; ++strip)
      multiply_strip(p, packed, block, first + strip * kFp8StripColumns, b_panels, sums + strip * strip_floats);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t column = 0; column < columns; column += kPanelColumns) {
      const int64_t tile = (column / kFp8StripColumns * panels + row / kPanelRows) * kStripPanels + column % kFp8StripColumns / kPanelColumns;
      write_out(p, row, first + column, std::min(kPanelColumns, columns - column), sums + tile * kTileFloats + row % kPanelRows * kPanelColumns);
    }
}

// Row `row` of a, decoded, up to a whole vector.
void fp8_decode_row(const Fp8Gemm& p, int64_t row, float* decoded) {
  if (p.a.by_depth) {
    for (int64_t k = 0; k < p.depth; ++k) decoded[k] = e4m3_to_float(p.a.codes[k * p.a.stride + row]);
    std::fill(decoded + p.depth, decoded + (p.depth + kLanes - 1) / kLanes * kLanes, 0.0f);
    return;
  }
  const uint8_t* codes = p.a.codes + row * p.a.stride;
  for (int64_t k = 0; k < p.depth; k += kLanes) store8(decoded + k, decode_part(codes + k, p.depth - k));
}

// The same for few rows, which come decoded: rows [p.rows, whole blocks of the depth]. A row of b has adjacent entries.
void fp8_few_rows_group(const Fp8Gemm& p, const float* rows, int64_t group) {
  const int64_t blocks = fp8_blocks(p.depth), last = std::min((group + 1) * p.group_columns, p.columns);
  for (int64_t column = group * p.group_columns; column < last; ++column) {
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
