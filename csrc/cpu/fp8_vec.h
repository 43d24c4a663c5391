// Eight FP8 codes at a time; bit for bit what common/fp8.h does one by one.
#pragma once

#include "common/fp8.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {

GRPO_MC_INLINE I8 pick(I8 mask, I8 yes, I8 no) { return (mask & yes) | (~mask & no); }

// float_to_e4m3 of eight numbers, each code in a lane of its own.
GRPO_MC_INLINE I8 encode8(F8 x) {
  const I8 sign = ((I8)x >> 24) & splat_int(0x80);
  const F8 size = abs8(x), bounded = min8(size, splat(kFp8Max));
  const I8 bits = (I8)bounded;
  const I8 normal = ((bits + splat_int(0x7ffff) + ((bits >> 20) & splat_int(1))) >> 20) - splat_int((127 - 7) << 3);
  const I8 small = (I8)(bounded + splat(0x1p14f)) - (I8)splat(0x1p14f);
  const I8 code = pick(bounded < splat(0x1p-6f), small, normal);
  return pick(size != size, splat_int(kFp8Nan), code | sign);
}

GRPO_MC_INLINE void store_codes8(uint8_t* p, I8 codes) {
#if defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)codes), high = _mm256_extracti128_si256((__m256i)codes, 1);
  const __m128i words = _mm_packs_epi32(low, high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(codes[i]);
#endif
}

// e4m3_to_float of eight codes.
GRPO_MC_INLINE F8 decode8(const uint8_t* p) {
#if defined(__F16C__)
  // As a half float the seven bits of magnitude, shifted up, mean 2^-8 of their value; that is exact for all but NaN.
  const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x80)), 8);
  const F8 x = (F8)_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7))) * splat(256.0f);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(kFp8Nan));
  return (F8)_mm256_or_si256((__m256i)x, _mm256_cvtepi16_epi32(nan));
#else
  F8 x;
  for (int i = 0; i < kLanes; ++i) x[i] = e4m3_to_float(p[i]);
  return x;
#endif
}

}  // namespace grpo_mc::GRPO_MC_ISA
