// Adam with decoupled weight decay (AdamW, arXiv 1711.05101) and its states in 8 or 4 bits, for host and device.
//
//     g = grad * clip_coef / grad_scale            m += (1 - beta1) * (g - m)        v = beta2 * v + (1 - beta2) * g * g
//     param = param * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//
// The factors are computed once, in float64, and rounded to float32; every operation of an entry is rounded to float32 on
// its own (no fused multiply-add), so that all instruction sets and devices agree bit for bit.
//
// States of b bits, in blocks of 128 entries; both moments are rounded at random, without bias (to nearest, a change of
// 0.1 % would never move a second moment off its level, and a first moment at its lowest level would never fade):
//
//     v: 2^b levels from the block's smallest v above 0 (at least 2^-16 of the largest) to its largest, evenly spaced in
//        the bits of the float32, that is almost geometrically. An entry below has the lowest level, so that no entry
//        decodes to 0 beside others that do not.
//     m: in units of the power of two below sqrt(v) (or of half that), so that a block may mix large and small
//        gradients; a sign and b - 1 bits of magnitude times the block's scale. In 8 bits the 128 magnitudes are evenly
//        spaced, in 4 they are those of a 4-bit float, 0 0.5 1 1.5 2 3 4 6.
//
// A block in which a moment is NaN or infinite, or v at least 2^127, has codes 0 and NaN for scales: it decodes to NaN.
// Entries that fill up the last block have moments 0.
#pragma once

#include <cmath>

#include "common/arguments.h"
#include "common/fp8.h"
#include "common/philox.h"

namespace grpo_mc {

inline AdamFactors adam_factors(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
                                double clip_coef) {
  const double count = static_cast<double>(step);
  AdamFactors f{};
  f.grad = static_cast<float>(clip_coef / grad_scale);
  f.decay = static_cast<float>(1.0 - lr * weight_decay);
  f.rest1 = static_cast<float>(1.0 - beta1);
  f.beta2 = static_cast<float>(beta2);
  f.rest2 = static_cast<float>(1.0 - beta2);
  f.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, count)));
  f.root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, count)));
  f.eps = static_cast<float>(eps);
  return f;
}

// One entry's update, in place.
GRPO_MC_HD void adam_update(const AdamFactors& f, float grad, float& param, float& m, float& v) {
  const float g = grad * f.grad;
  m = m + f.rest1 * (g - m);
  v = v * f.beta2 + f.rest2 * g * g;
  param = param * f.decay - f.step_size * (m / (std::sqrt(v) * f.root + f.eps));
}

constexpr int kAdamHalf = kAdamBlock / 2;
constexpr uint32_t kAdamInfinite = 0x7f800000u;  // bits of a magnitude that m must stay below
constexpr uint32_t kAdamLargest = 0x7f000000u;   // bits of 2^127, which v must stay below
constexpr float kAdamRange = 0x1p-16f;           // lowest level of v over the highest, at least

// Random numbers. Entries 32 apart share a word of Philox: the first and the third of them have 16 bits of it each, the
// second and the fourth the same bits times a constant, modulo 2^16. v rounds by these bits, m by them times another. So
// 16 bits serve four roundings, each of them uniform; any two are a lattice that fills the square evenly (its shortest
// vector is 0.85 of the longest that there is or more), so that one tells nothing of the other. Eight words on is the next
// word of the same Philox block: eight lanes of a vector run eight blocks. A step has 2^36 Philox blocks of its own.
constexpr uint32_t kAdamLatticeM = 40503u, kAdamLatticeSecond = 21407u;

GRPO_MC_HD uint64_t adam_philox_block(uint64_t step, uint64_t block, uint64_t lane) { return (step << 36) + block * 8 + lane; }

// The 16 random bits of an entry of the whole tensor, by which v rounds.
GRPO_MC_HD uint32_t adam_random_bits(uint64_t seed, uint64_t step, uint64_t index) {
  const uint64_t entry = index % kAdamBlock, place = entry % 32;
  uint32_t words[4];
  philox_block(adam_philox_block(step, index / kAdamBlock, place % 8), seed, words);
  const uint32_t bits = words[place / 8] >> (entry / kAdamHalf * 16);
  return (entry / 32 % 2 == 0 ? bits : bits * kAdamLatticeSecond) & 0xffffu;
}

GRPO_MC_HD uint32_t adam_bits_of_m(uint32_t bits) { return (bits * kAdamLatticeM) & 0xffffu; }

// Above 0 and below 1.
GRPO_MC_HD float adam_random(uint32_t bits) { return static_cast<float>(bits) * 0x1p-16f + 0x1p-17f; }

// Levels of a block's v: level k is the float of bits low + k * gap.
struct AdamLevels {
  uint32_t low, gap;
  float inverse;  // 1 / gap; 0 without a gap
};

// The lowest level for the smallest v above 0 and the largest.
GRPO_MC_HD float adam_lowest(float smallest, float highest) {
  const float bound = highest * kAdamRange;
  return smallest > bound ? smallest : bound;
}

GRPO_MC_HD AdamLevels adam_levels(float lowest, float highest, uint32_t top_code) {
  AdamLevels levels{};
  levels.low = float_bits(lowest);
  levels.gap = (float_bits(highest) - levels.low + top_code - 1) / top_code;
  levels.inverse = levels.gap == 0 ? 0.0f : 1.0f / static_cast<float>(levels.gap);
  return levels;
}

GRPO_MC_HD float adam_decode_v(const AdamLevels& levels, uint32_t code) { return bits_float(levels.low + code * levels.gap); }

// v is at least 0, and at most the highest level.
GRPO_MC_HD uint32_t adam_encode_v(const AdamLevels& levels, float v, uint32_t top_code, float random) {
  const float place = static_cast<float>(static_cast<int32_t>(float_bits(v) - levels.low)) * levels.inverse;
  const float last = static_cast<float>(top_code - 1);
  const uint32_t code = static_cast<uint32_t>(place < 0.0f ? 0.0f : place > last ? last : place);
  const float below = adam_decode_v(levels, code), above = adam_decode_v(levels, code + 1);
  return code + (random * (above - below) < v - below ? 1u : 0u);
}

// The unit of m: a power of two near sqrt(v), as its exponent bits. 1 / unit has exponent bits 254 - that.
GRPO_MC_HD uint32_t adam_unit_exponent(float v) { return ((float_bits(v) >> 23) + 127u) >> 1; }
GRPO_MC_HD float adam_unit(float v) { return bits_float(adam_unit_exponent(v) << 23); }
GRPO_MC_HD float adam_inverse_unit(float v) { return bits_float((254u - adam_unit_exponent(v)) << 23); }

GRPO_MC_HD float adam_smaller(float a, float b) { return a < b ? a : b; }
GRPO_MC_HD float adam_larger(float a, float b) { return a > b ? a : b; }

// Largest magnitude of m's code, and the scale of a block whose largest |m / unit| is amax.
template <int kBits>
GRPO_MC_HD float adam_m_scale(float amax) {
  return adam_larger(amax / (kBits == 8 ? 127.0f : 6.0f), kLowestScale);
}

// A sign, and a magnitude in bits - 1 bits: the place among the magnitudes of x = m / unit / scale, rounded.
template <int kBits>
GRPO_MC_HD uint32_t adam_encode_m(float x, float random) {
  const float size = bits_float(float_bits(x) & 0x7fffffffu);
  // A product with a power of two is exact, so that its sum may be fused.
  const float place = kBits == 8 ? size : adam_smaller(2.0f * size, adam_smaller(size + 2.0f, 0.5f * size + 4.0f));
  const float top = static_cast<float>((1 << (kBits - 1)) - 1);
  return (float_bits(x) >> 31 << (kBits - 1)) | static_cast<uint32_t>(adam_smaller(place + random, top));
}

template <int kBits>
GRPO_MC_HD float adam_decode_m(uint32_t code) {
  const float place = static_cast<float>(code & ((1u << (kBits - 1)) - 1u));
  const float size = kBits == 8 ? place : adam_larger(0.5f * place, adam_larger(place - 2.0f, 2.0f * place - 8.0f));
  return bits_float(float_bits(size) | (code >> (kBits - 1) << 31));
}

}  // namespace grpo_mc
