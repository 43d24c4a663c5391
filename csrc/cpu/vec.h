// Eight float lanes for the kernels in csrc/cpu/, which are compiled once per instruction set.
//
// The types are compiler vectors, so the same code gives ymm instructions under -mavx2 and pairs of xmm without it.
// Only fma, min and max are spelt per instruction set. Lane order and the order of reductions are fixed, so a result
// never depends on the number of threads; it may differ in the last bit between instruction sets.
//
// Include only from files that define GRPO_MC_ISA (setup.py does): everything lives in that namespace, so that the
// linker can never pick an AVX2 body for a generic caller.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "common/numerics.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define GRPO_MC_INLINE inline __attribute__((always_inline))

namespace grpo_mc::GRPO_MC_ISA {

using F8 = float __attribute__((vector_size(32)));
using I8 = int32_t __attribute__((vector_size(32)));

constexpr int64_t kLanes = 8;
constexpr float kInf = std::numeric_limits<float>::infinity();

GRPO_MC_INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }

GRPO_MC_INLINE F8 load8(const float* p) {
  F8 x;
  memcpy(&x, p, sizeof(x));
  return x;
}

GRPO_MC_INLINE void store8(float* p, F8 x) { memcpy(p, &x, sizeof(x)); }

GRPO_MC_INLINE F8 load8(const uint16_t* p) {  // bfloat16
#if defined(__AVX2__)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (F8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
  F8 x;
  for (int i = 0; i < kLanes; ++i) x[i] = bf16_to_float(p[i]);
  return x;
#endif
}

GRPO_MC_INLINE void store8(uint16_t* p, F8 x) {  // bfloat16, round to nearest even
#if defined(__AVX2__)
  const __m256i bits = (__m256i)x;
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256 is_nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
  const __m256i picked = _mm256_blendv_epi8(rounded, quiet, (__m256i)is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x[i]);
#endif
}

// First n lanes from p, the others `fill`.
template <typename T>
GRPO_MC_INLINE F8 load_tail(const T* p, int64_t n, float fill) {
  F8 x = splat(fill);
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2) x[i] = bf16_to_float(p[i]);
    else x[i] = p[i];
  }
  return x;
}

template <typename T>
GRPO_MC_INLINE void store_tail(T* p, int64_t n, F8 x) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2) p[i] = float_to_bf16(x[i]);
    else p[i] = x[i];
  }
}

GRPO_MC_INLINE F8 fma8(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// A NaN in b comes through; a NaN in a is dropped (the rule of the x86 instruction).
GRPO_MC_INLINE F8 max8(F8 a, F8 b) {
#if defined(__AVX2__)
  return (F8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

GRPO_MC_INLINE F8 min8(F8 a, F8 b) {
#if defined(__AVX2__)
  return (F8)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

GRPO_MC_INLINE float sum8(F8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// totals[i] = sum8 of the i-th, in the same order of additions.
GRPO_MC_INLINE void sum8x4(F8 x0, F8 x1, F8 x2, F8 x3, float* totals) {
#if defined(__AVX2__)
  const auto halves = [](F8 x) { return _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1)); };
  __m128 a = halves(x0), b = halves(x1), c = halves(x2), d = halves(x3);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(totals, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
#else
  const F8 x[] = {x0, x1, x2, x3};
  for (int i = 0; i < 4; ++i) totals[i] = sum8(x[i]);
#endif
}

GRPO_MC_INLINE float reduce_max8(F8 x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

GRPO_MC_INLINE I8 splat_int(int32_t x) { return I8{x, x, x, x, x, x, x, x}; }

GRPO_MC_INLINE F8 abs8(F8 x) { return (F8)((I8)x & splat_int(0x7fffffff)); }

// The largest magnitudes of several vectors, lane by lane, and which lanes met nothing but finite numbers.
struct Magnitudes {
  F8 largest = splat(0.0f);
  I8 finite = ~I8{};

  GRPO_MC_INLINE void add(F8 x) {
    const F8 size = abs8(x);
    finite &= size <= splat(std::numeric_limits<float>::max());
    largest = max8(largest, size);
  }

  GRPO_MC_INLINE float amax() const {
    for (int i = 0; i < kLanes; ++i)
      if (!finite[i]) return std::numeric_limits<float>::quiet_NaN();
    return reduce_max8(largest);
  }
};

// exp_remainder of each lane.
GRPO_MC_INLINE F8 exp_remainder8(F8 r) {
  F8 poly = fma8(splat(ExpRemainder::c5), r, splat(ExpRemainder::c4));
  poly = fma8(poly, r, splat(ExpRemainder::c3));
  poly = fma8(poly, r, splat(ExpRemainder::c2));
  poly = fma8(poly, r, splat(ExpRemainder::c1));
  return fma8(poly, r, splat(ExpRemainder::c0));
}

// exp(x), relative error below 2e-7 for x in [-87.3, 88.4]; 0 below, saturated above; NaN stays NaN.
// Range reduction by log 2 in two parts, then exp_remainder8.
GRPO_MC_INLINE F8 exp8(F8 x) {
  constexpr float kLowest = -87.3f, kHighest = 88.37f, kMagic = 12582912.0f;  // 1.5 * 2^23 rounds to an integer
  const F8 clamped = max8(splat(kLowest), min8(splat(kHighest), x));
  const F8 shifted = fma8(clamped, splat(1.44269504088896341f), splat(kMagic));
  const F8 n = shifted - splat(kMagic);
  F8 r = fma8(n, splat(-0.693359375f), clamped);
  r = fma8(n, splat(2.12194440e-4f), r);
  const F8 y = fma8(exp_remainder8(r), r * r, r) + splat(1.0f);
  const F8 scaled = (F8)((I8)y + ((I8)shifted << 23));  // the low bits of `shifted` are n
  const I8 below = x < splat(kLowest);
  return (F8)((I8)scaled & ~below);
}

}  // namespace grpo_mc::GRPO_MC_ISA
