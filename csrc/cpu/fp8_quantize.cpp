// Quantising to FP8 with a scale per tile, and back; see common/fp8.h for the rules.
#include <algorithm>
#include <cmath>

#include "common/fp8.h"
#include "cpu/fp8_vec.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

template <typename T>
GRPO_MC_INLINE F8 load_part(const T* p, int64_t left) {
  return left >= kLanes ? load8(p) : load_tail(p, left, 0.0f);
}

GRPO_MC_INLINE void store_part(uint8_t* p, I8 codes, int64_t left) {
  if (left >= kLanes) store_codes8(p, codes);
  else
    for (int64_t i = 0; i < left; ++i) p[i] = static_cast<uint8_t>(codes[i]);
}

template <typename T>
GRPO_MC_INLINE void encode_row(const T* x, uint8_t* codes, int64_t length, float scale) {
  const F8 inverse = splat(1.0f / scale);
  for (int64_t k = 0; k < length; k += kLanes) store_part(codes + k, encode8(load_part(x + k, length - k) * inverse), length - k);
}

// A tile of rows x length entries with one scale.
template <typename T>
GRPO_MC_INLINE float quantize_block(const T* x, int64_t x_stride, uint8_t* codes, int64_t code_stride, int64_t rows, int64_t length, bool power_of_two) {
  Magnitudes sizes;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < length; k += kLanes) sizes.add(load_part(x + row * x_stride + k, length - k));
  const float scale = tile_scale(sizes.amax(), power_of_two);
  for (int64_t row = 0; row < rows; ++row) encode_row(x + row * x_stride, codes + row * code_stride, length, scale);
  return scale;
}

// Tiles of rows x 1: a scale for every column.
template <typename T>
GRPO_MC_INLINE void quantize_columns(const T* x, int64_t x_stride, uint8_t* codes, int64_t code_stride, float* scales, int64_t rows, int64_t columns, bool power_of_two) {
  for (int64_t first = 0; first < columns; first += kLanes) {
    const int64_t left = columns - first;
    Magnitudes sizes;
    for (int64_t row = 0; row < rows; ++row) sizes.add(load_part(x + row * x_stride + first, left));
    F8 inverse;
    for (int64_t i = 0; i < kLanes; ++i) {
      const float amax = sizes.finite[i] ? sizes.largest[i] : std::numeric_limits<float>::quiet_NaN();
      const float scale = tile_scale(amax, power_of_two);
      if (i < left) scales[first + i] = scale;
      inverse[i] = 1.0f / scale;
    }
    for (int64_t row = 0; row < rows; ++row)
      store_part(codes + row * code_stride + first, encode8(load_part(x + row * x_stride + first, left) * inverse), left);
  }
}

template <typename T>
void quantize_band(const Fp8Quantize& p) {
  const T* x = static_cast<const T*>(p.x);
  if (p.tile_columns == 1) {
    quantize_columns(x, p.x_stride, p.codes, p.columns, p.scales, p.rows, p.columns, p.power_of_two);
    return;
  }
  float* scales = p.scales;
  for (int64_t k = 0; k < p.columns; k += kFp8Block) {
    const int64_t length = std::min<int64_t>(kFp8Block, p.columns - k);
    *scales++ = quantize_block(x + k, p.x_stride, p.codes + k, p.columns, p.rows, length, p.power_of_two);
  }
}

template <typename T>
GRPO_MC_INLINE void dequantize_row_as(const Fp8Dequantize& p, int64_t row) {
  const uint8_t* codes = p.codes + row * p.code_stride;
  T* out = static_cast<T*>(p.out) + row * p.columns;
  for (int64_t k = 0; k < p.columns; k += kLanes) {
    const int64_t left = p.columns - k;
    F8 scale;
    if (p.tile_columns == 1) scale = load_part(p.scales + k, left);
    else scale = splat(p.scales[k / kFp8Block]);  // a vector never crosses a tile: 128 is a multiple of 8
    if (left >= kLanes) store8(out + k, decode8(codes + k) * scale);
    else {
      uint8_t padded[kLanes] = {};
      std::copy(codes + k, codes + p.columns, padded);
      store_tail(out + k, left, decode8(padded) * scale);
    }
  }
}

}  // namespace

void fp8_quantize_band(const Fp8Quantize& p) {
  if (p.dtype == Element::kFloat) quantize_band<float>(p);
  else quantize_band<uint16_t>(p);
}

void fp8_dequantize_band(const Fp8Dequantize& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.dtype == Element::kFloat) dequantize_row_as<float>(p, row);
    else dequantize_row_as<uint16_t>(p, row);
  }
}

}  // namespace grpo_mc::GRPO_MC_ISA
