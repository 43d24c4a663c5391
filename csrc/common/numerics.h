// Scalar numerics shared by host and device code: one bfloat16 rounding rule, one exponent bound, exp near 0.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GRPO_MC_HD __host__ __device__ __forceinline__
#else
// Always inlined: csrc/cpu/ is compiled once per instruction set, and one linked copy would be that of some other set.
#define GRPO_MC_HD inline __attribute__((always_inline))
#endif

namespace grpo_mc {

// Log-ratios are clamped to +-kMaxExponent before exp (objective: ratio and k3), so values and gradients stay finite.
constexpr double kMaxExponent = 20.0;

GRPO_MC_HD float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest even; NaN stays NaN (quiet), overflow goes to infinity as IEEE rounding does.
GRPO_MC_HD uint16_t float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// (exp(r) - 1 - r) / r^2 for |r| <= 0.35 (log(2) / 2): the degree-5 polynomial of the Cephes library's expf, the highest
// power first.
struct ExpRemainder {
  static constexpr float c5 = 1.9875691500e-4f, c4 = 1.3981999507e-3f, c3 = 8.3334519073e-3f, c2 = 4.1665795894e-2f,
                         c1 = 1.6666665459e-1f, c0 = 5.0000001201e-1f;
};

GRPO_MC_HD float exp_remainder(float r) {
  float poly = std::fma(ExpRemainder::c5, r, ExpRemainder::c4);
  poly = std::fma(poly, r, ExpRemainder::c3);
  poly = std::fma(poly, r, ExpRemainder::c2);
  poly = std::fma(poly, r, ExpRemainder::c1);
  return std::fma(poly, r, ExpRemainder::c0);
}

}  // namespace grpo_mc
