// FP8 (e4m3, finite: no infinities) and the scale of a tile, for host and device: one rounding rule, one scale rule.
//
// Scale rule. amax is the largest |x| of the tile in float32. scale = amax / 448, but at least 2^-126, so that 1 / scale
// is finite and a tile of zeros has codes 0; with power_of_two it is rounded up to the next power of two. A tile that
// holds a NaN or an infinity has scale NaN and NaN codes throughout: what is computed from it is NaN, nothing else is.
// code = e4m3(x * (1 / scale)), the product and the inverse rounded to float32, then to nearest even, saturated at 448.
#pragma once

#include "common/numerics.h"

namespace grpo_mc {

constexpr int kFp8Block = 128;             // entries of a tile along a quantised axis
constexpr float kFp8Max = 448.0f;          // 1.75 * 2^8
constexpr uint8_t kFp8Nan = 0x7f;
constexpr float kLowestScale = 0x1p-126f;  // the smallest normal float32

// Tiles along a quantised axis; the last may be smaller.
GRPO_MC_HD int64_t fp8_blocks(int64_t size) { return (size + kFp8Block - 1) / kFp8Block; }

// Rows of several experts in one matrix, quantised along the rows: tiles start again at each expert's first row, `offset`.
// Its tiles stand in the scales from row fp8_first_tile on. Between one expert's and the next's there may be a row or more
// without a tile, and in exchange no row depends on how many rows the experts before it have rounded up to.
GRPO_MC_HD int64_t fp8_first_tile(int64_t offset, int64_t expert) { return offset / kFp8Block + expert; }

// Rows of the scales of `rows` rows of `experts` experts.
GRPO_MC_HD int64_t fp8_expert_tiles(int64_t rows, int64_t experts) { return rows / kFp8Block + experts; }

GRPO_MC_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

GRPO_MC_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Round to nearest even, saturated at +-448; a NaN of either sign becomes kFp8Nan.
GRPO_MC_HD uint8_t float_to_e4m3(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7f800000u) return kFp8Nan;
  if (magnitude >= float_bits(kFp8Max)) return static_cast<uint8_t>(sign | 0x7eu);
  if (magnitude < float_bits(0x1p-6f)) {  // below the normal numbers: steps of 2^-9, the last place of 2^14
    const float shifted = bits_float(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (float_bits(shifted) - float_bits(0x1p14f)));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - ((127u - 7u) << 3)));
}

GRPO_MC_HD float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == kFp8Nan) return bits_float(sign | 0x7fc00000u);
  if (magnitude < 8) return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-9f));
  return bits_float(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
}

// The scale of a tile from its amax; NaN for an amax that is NaN or infinite.
GRPO_MC_HD float tile_scale(float amax, bool power_of_two) {
  if (!(float_bits(amax) < 0x7f800000u)) return bits_float(0x7fc00000u);
  float scale = amax / kFp8Max;
  if (scale < kLowestScale) scale = kLowestScale;
  if (power_of_two) {
    const uint32_t bits = float_bits(scale);
    if (bits & 0x7fffffu) scale = bits_float((bits & 0x7f800000u) + 0x800000u);
  }
  return scale;
}

}  // namespace grpo_mc
