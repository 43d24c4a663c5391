// Whole-number codes of a block of entries with one scale, for host and device: one scale rule, one rounding rule.
//
// q = round(y / scale), from -levels to levels: 7 with 4 bits (a 16th level would be one-sided), 127 with 8.
// scale = amax / levels, but at least 2^-126, so that 1 / scale is finite and a block of zeros has codes 0.
// y / scale is y * (1 / scale), the inverse and the product rounded to float32.
#pragma once

#include <cmath>

#include "common/fp8.h"

namespace grpo_mc {

constexpr float kInt4Levels = 7.0f;
constexpr float kInt8Levels = 127.0f;
constexpr int kHadamardSize = 32;
constexpr float kHadamardScale = 0.17677669529663687f;  // 1 / sqrt(32)
constexpr uint8_t kInt4Zeros = 0x88;                     // two codes of 0

// The scale of a block from its amax, a finite number.
GRPO_MC_HD float code_scale(float amax, float levels) {
  const float scale = amax / levels;
  return scale < kLowestScale ? kLowestScale : scale;
}

GRPO_MC_HD float bounded_code(float whole, float levels) { return whole < -levels ? -levels : whole > levels ? levels : whole; }

// To nearest even. 1.5 * 2^23 leaves no room for a fraction.
GRPO_MC_HD float nearest_code(float y, float inverse_scale, float levels) {
  return bounded_code((y * inverse_scale + 12582912.0f) - 12582912.0f, levels);
}

// Up with the probability of the fraction; `unit` is uniform in [0, 1).
GRPO_MC_HD float stochastic_code(float y, float inverse_scale, float levels, float unit) {
  return bounded_code(floorf(y * inverse_scale + unit), levels);
}

// Two 4-bit codes a byte, each q + 8: the first in the low half.
GRPO_MC_HD uint8_t pack_int4(float first, float second) {
  return static_cast<uint8_t>((static_cast<int>(first) + 8) | ((static_cast<int>(second) + 8) << 4));
}

GRPO_MC_HD float first_int4(uint8_t pair) { return static_cast<float>((pair & 15) - 8); }

GRPO_MC_HD float second_int4(uint8_t pair) { return static_cast<float>((pair >> 4) - 8); }

}  // namespace grpo_mc
