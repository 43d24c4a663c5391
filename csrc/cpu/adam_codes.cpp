// Adam steps with states of 8 or 4 bits, a block at a time: decode and update, then v to codes, then m. Everything is what
// common/adam.h says of one entry. Entries j and j + 64 go together, as their codes lie together in 4 bits and their random
// bits in one word.
#include <algorithm>
#include <limits>

#include "cpu/adam_vec.h"
#include "cpu/fp8_vec.h"
#include "cpu/kernels.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

using U8 = uint32_t __attribute__((vector_size(32)));

GRPO_MC_INLINE I8 max_bits(I8 a, I8 b) {
#if defined(__AVX2__)
  return (I8)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return (I8)((U8)a > (U8)b ? (U8)a : (U8)b);
#endif
}

GRPO_MC_INLINE I8 min_bits(I8 a, I8 b) {
#if defined(__AVX2__)
  return (I8)_mm256_min_epu32((__m256i)a, (__m256i)b);
#else
  return (I8)((U8)a < (U8)b ? (U8)a : (U8)b);
#endif
}

GRPO_MC_INLINE uint32_t reduce_max_bits(I8 x) {
  uint32_t lanes[kLanes];
  memcpy(lanes, &x, sizeof(lanes));
  return *std::max_element(lanes, lanes + kLanes);
}

GRPO_MC_INLINE I8 widen8(const uint8_t* p) {
#if defined(__AVX2__)
  return (I8)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = p[i];
  I8 x;
  memcpy(&x, lanes, sizeof(x));
  return x;
#endif
}

// table[index % 8] in every lane.
GRPO_MC_INLINE F8 look_up(F8 table, I8 index) {
#if defined(__AVX2__)
  return (F8)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
  float from[kLanes], to[kLanes];
  int32_t places[kLanes];
  memcpy(from, &table, sizeof(from));
  memcpy(places, &index, sizeof(places));
  for (int i = 0; i < kLanes; ++i) to[i] = from[places[i] & 7];
  return load8(to);
#endif
}

// A block's 32 words, and the 32 that have both halves times kAdamLatticeSecond.
GRPO_MC_INLINE void random_words(uint64_t seed, uint64_t step, uint64_t block, uint32_t* words) {
#if defined(__AVX2__)
  // Each 64-bit lane runs one Philox block; only the lower halves count, what is above them is never looked at. The first
  // counter is a multiple of 8, so the upper word is the same in all of them.
  const uint64_t first = adam_philox_block(step, block, 0);
  const __m256i factor0 = _mm256_set1_epi64x(0xD2511F53), factor1 = _mm256_set1_epi64x(0xCD9E8D57);
  __m256i c0[2], c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; ++i) {
    c0[i] = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first)), _mm256_set_epi64x(4 * i + 3, 4 * i + 2, 4 * i + 1, 4 * i));
    c1[i] = _mm256_set1_epi64x(static_cast<int64_t>(first >> 32));
    c2[i] = c3[i] = _mm256_setzero_si256();
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
    for (int i = 0; i < 2; ++i) {
      const __m256i product0 = _mm256_mul_epu32(c0[i], factor0), product1 = _mm256_mul_epu32(c2[i], factor1);
      c0[i] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), _mm256_xor_si256(c1[i], key0));
      c2[i] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), _mm256_xor_si256(c3[i], key1));
      c1[i] = product1;
      c3[i] = product0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const auto keep = [words](int64_t place, __m256i low, __m256i high) {  // lower halves of four lanes and of four more
    const __m256i mixed = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88));
    const __m256i eight = _mm256_permute4x64_epi64(mixed, 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + place), eight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + place + 32),
                        _mm256_mullo_epi16(eight, _mm256_set1_epi16(static_cast<int16_t>(kAdamLatticeSecond))));
  };
  keep(0, c0[0], c0[1]);
  keep(8, c1[0], c1[1]);
  keep(16, c2[0], c2[1]);
  keep(24, c3[0], c3[1]);
#else
  for (uint64_t lane = 0; lane < 8; ++lane) {
    uint32_t four[4];
    philox_block(adam_philox_block(step, block, lane), seed, four);
    for (uint64_t i = 0; i < 4; ++i) {
      const uint32_t low = (four[i] * kAdamLatticeSecond) & 0xffffu, high = ((four[i] >> 16) * kAdamLatticeSecond) << 16;
      words[8 * i + lane] = four[i];
      words[32 + 8 * i + lane] = high | low;
    }
  }
#endif
}

// Random numbers of entries j (0) or j + 64 (1) of 8 words; a product with a power of two is exact, so fused or not.
GRPO_MC_INLINE F8 random8(I8 words, int half) {
  const I8 bits = half == 0 ? words & splat_int(0xffff) : (I8)((U8)words >> 16);
  return fma8(__builtin_convertvector(bits, F8), splat(0x1p-16f), splat(0x1p-17f));
}

// Both halves of the words times kAdamLatticeM.
GRPO_MC_INLINE I8 words_of_m(I8 words) {
#if defined(__AVX2__)
  return (I8)_mm256_mullo_epi16((__m256i)words, _mm256_set1_epi16(static_cast<int16_t>(kAdamLatticeM)));
#else
  const I8 high = ((I8)((U8)words >> 16) * splat_int(kAdamLatticeM)) << 16;
  return high | ((words * splat_int(kAdamLatticeM)) & splat_int(0xffff));
#endif
}

// adam_unit: half of v's exponent and 127, without its mantissa.
GRPO_MC_INLINE F8 unit8(F8 v) {
  const U8 sum = (U8)v + (U8)splat_int(127 << 23);
  return (F8)((I8)(sum >> 1) & splat_int(0xff << 23));
}

GRPO_MC_INLINE F8 inverse_unit8(F8 v) { return (F8)(splat_int(254 << 23) - (I8)unit8(v)); }

// Codes of entries j and j + 64 on: 8 of each.
template <int kBits>
struct Codes {
  static constexpr int64_t kBytes = kAdamBlock * kBits / 8;

  static GRPO_MC_INLINE void load(const uint8_t* bytes, int64_t j, I8* codes) {
    codes[0] = widen8(bytes + j);
    codes[1] = kBits == 8 ? widen8(bytes + j + kAdamHalf) : codes[0] >> 4;
    if constexpr (kBits == 4) codes[0] &= splat_int(15);
  }

  static GRPO_MC_INLINE void store(uint8_t* bytes, int64_t j, const I8* codes) {
    if constexpr (kBits == 8) {
      store_codes8(bytes + j, codes[0]);
      store_codes8(bytes + j + kAdamHalf, codes[1]);
    } else {
      store_codes8(bytes + j, codes[0] | (codes[1] << 4));
    }
  }
};

// Turns a block's codes into moments.
template <int kBits>
struct Decoder {
  AdamLevels levels;
  F8 scale, sizes;  // sizes: in 4 bits, m's 8 magnitudes times scale

  GRPO_MC_INLINE Decoder(const AdamStep& p, int64_t index) {
    const float* ends = p.exp_avg_sq_scale + 2 * index;
    levels = adam_levels(ends[0], ends[1], (1u << kBits) - 1u);
    scale = splat(p.exp_avg_scale[index]);
    sizes = F8{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f} * scale;
  }

  GRPO_MC_INLINE F8 v(I8 code) const {
    return (F8)(splat_int(static_cast<int32_t>(levels.low)) + code * splat_int(static_cast<int32_t>(levels.gap)));
  }

  GRPO_MC_INLINE F8 m(I8 code, F8 v) const {
    F8 size;
    if constexpr (kBits == 8) size = __builtin_convertvector(code & splat_int(127), F8) * scale;
    else size = look_up(sizes, code);
    const I8 sign = (code >> (kBits - 1)) << 31;
    return (F8)((I8)size | sign) * unit8(v);
  }
};

// A block while it is worked on.
struct Block {
  alignas(32) float m[kAdamBlock], v[kAdamBlock];
  alignas(32) uint32_t words[kAdamHalf];

  GRPO_MC_INLINE I8 words8(int64_t j) const {
    I8 x;
    memcpy(&x, words + j, sizeof(x));
    return x;
  }
};

// What the new moments of a block range over, as bits.
struct Range {
  I8 largest_m = {}, largest_v = {}, smallest_v = ~I8{};  // smallest_v: of those above 0, less 1

  GRPO_MC_INLINE void add(F8 m, F8 v) {
    largest_m = max_bits(largest_m, (I8)abs8(m));
    largest_v = max_bits(largest_v, (I8)v);
    smallest_v = min_bits(smallest_v, (I8)v - splat_int(1));
  }

  GRPO_MC_INLINE bool is_good() const { return reduce_max_bits(largest_m) < kAdamInfinite && reduce_max_bits(largest_v) < kAdamLargest; }
  GRPO_MC_INLINE float highest() const { return bits_float(reduce_max_bits(largest_v)); }
  GRPO_MC_INLINE float smallest() const { return bits_float(~reduce_max_bits(~smallest_v) + 1u); }
};

template <int kBits, typename T>
GRPO_MC_INLINE Range update(const AdamStep& p, int64_t index, int64_t count, float* params, const T* grads, uint16_t* out, Block& block) {
  const Decoder<kBits> decoder(p, index);
  const AdamFactors f = p.factors;
  const uint8_t* codes_m = static_cast<const uint8_t*>(p.exp_avg) + index * Codes<kBits>::kBytes;
  const uint8_t* codes_v = static_cast<const uint8_t*>(p.exp_avg_sq) + index * Codes<kBits>::kBytes;
  Range range;
  for (int64_t j = 0; j < kAdamHalf; j += kLanes) {
    I8 code_m[2], code_v[2];
    Codes<kBits>::load(codes_m, j, code_m);
    Codes<kBits>::load(codes_v, j, code_v);
    for (int half = 0; half < 2; ++half) {
      const int64_t i = j + half * kAdamHalf;
      F8 v = decoder.v(code_v[half]), m = decoder.m(code_m[half], v), param = load8(params + i);
      update8(f, load8(grads + i), param, m, v);
      store8(params + i, param);
      if (out != nullptr) store8(out + i, param);
      if (count < kAdamBlock) {  // what fills up the last block
        const I8 there = splat_int(static_cast<int32_t>(count - i)) > I8{0, 1, 2, 3, 4, 5, 6, 7};
        m = (F8)((I8)m & there);
        v = (F8)((I8)v & there);
      }
      store8(block.m + i, m);
      store8(block.v + i, v);
      range.add(m, v);
    }
  }
  return range;
}

// Codes of v; block.m becomes m over its unit. Returns the largest of its magnitudes, as bits.
template <int kBits>
GRPO_MC_INLINE uint32_t encode_v(const AdamStep& p, int64_t index, const AdamLevels& levels, Block& block) {
  constexpr int32_t top = (1 << kBits) - 1;
  uint8_t* codes = static_cast<uint8_t*>(p.exp_avg_sq) + index * Codes<kBits>::kBytes;
  const I8 low = splat_int(static_cast<int32_t>(levels.low)), gap = splat_int(static_cast<int32_t>(levels.gap));
  I8 largest = {};
  for (int64_t j = 0; j < kAdamHalf; j += kLanes) {
    const I8 words = block.words8(j);
    I8 code[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t i = j + half * kAdamHalf;
      const F8 v = load8(block.v + i);
      const F8 place = __builtin_convertvector((I8)v - low, F8) * splat(levels.inverse);
      code[half] = __builtin_convertvector(max8(splat(0.0f), min8(splat(static_cast<float>(top - 1)), place)), I8);
      const I8 below = low + code[half] * gap, above = below + gap;
      const I8 up = random8(words, half) * ((F8)above - (F8)below) < v - (F8)below;
      code[half] -= up;
      const F8 decoded = (F8)(below + (gap & up));
      const F8 x = load8(block.m + i) * inverse_unit8(decoded);
      largest = max_bits(largest, (I8)abs8(x));
      store8(block.m + i, x);
    }
    Codes<kBits>::store(codes, j, code);
  }
  return reduce_max_bits(largest);
}

template <int kBits>
GRPO_MC_INLINE void encode_m(const AdamStep& p, int64_t index, float scale, const Block& block) {
  constexpr int32_t sign = 1 << (kBits - 1);
  uint8_t* codes = static_cast<uint8_t*>(p.exp_avg) + index * Codes<kBits>::kBytes;
  const F8 inverse = splat(1.0f / scale);
  for (int64_t j = 0; j < kAdamHalf; j += kLanes) {
    const I8 words = words_of_m(block.words8(j));
    I8 code[2];
    for (int half = 0; half < 2; ++half) {
      const F8 x = load8(block.m + j + half * kAdamHalf) * inverse, size = abs8(x);
      const F8 place = kBits == 8 ? size : min8(size + size, min8(size + splat(2.0f), fma8(size, splat(0.5f), splat(4.0f))));
      const F8 bounded = min8(place + random8(words, half), splat(static_cast<float>(sign - 1)));
      code[half] = __builtin_convertvector(bounded, I8) | (((I8)x >> 31) & splat_int(sign));
    }
    Codes<kBits>::store(codes, j, code);
  }
}

template <int kBits>
GRPO_MC_INLINE void spoil(const AdamStep& p, int64_t index) {
  constexpr int64_t bytes = Codes<kBits>::kBytes;
  for (void* codes : {p.exp_avg, p.exp_avg_sq}) memset(static_cast<uint8_t*>(codes) + index * bytes, 0, static_cast<size_t>(bytes));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  p.exp_avg_scale[index] = p.exp_avg_sq_scale[2 * index] = p.exp_avg_sq_scale[2 * index + 1] = nan;
}

// A block whose parameters and gradients are all there.
template <int kBits, typename T>
GRPO_MC_INLINE void step_whole(const AdamStep& p, int64_t index, int64_t count, float* params, const T* grads, uint16_t* out) {
  Block block;
  const Range range = update<kBits>(p, index, count, params, grads, out, block);
  if (!range.is_good()) return spoil<kBits>(p, index);
  random_words(p.seed, p.step, p.offset / kAdamBlock + static_cast<uint64_t>(index), block.words);
  const float highest = range.highest(), lowest = highest == 0.0f ? 0.0f : adam_lowest(range.smallest(), highest);
  const uint32_t largest = encode_v<kBits>(p, index, adam_levels(lowest, highest, (1u << kBits) - 1u), block);
  if (largest >= kAdamInfinite) return spoil<kBits>(p, index);
  const float scale = adam_m_scale<kBits>(bits_float(largest));
  encode_m<kBits>(p, index, scale, block);
  p.exp_avg_scale[index] = scale;
  p.exp_avg_sq_scale[2 * index] = lowest;
  p.exp_avg_sq_scale[2 * index + 1] = highest;
}

// The last block may be short: it is worked on in copies filled up with zeros.
template <int kBits, typename T>
GRPO_MC_INLINE void step_block(const AdamStep& p, int64_t index) {
  const int64_t first = index * kAdamBlock, count = std::min<int64_t>(kAdamBlock, p.n - first);
  const T* grads = static_cast<const T*>(p.grads) + first;
  uint16_t* out = p.out == nullptr ? nullptr : p.out + first;
  if (count == kAdamBlock) return step_whole<kBits>(p, index, kAdamBlock, p.params + first, grads, out);
  float params[kAdamBlock] = {};
  T padded[kAdamBlock] = {};
  std::copy(p.params + first, p.params + first + count, params);
  std::copy(grads, grads + count, padded);
  step_whole<kBits, T>(p, index, count, params, padded, nullptr);
  std::copy(params, params + count, p.params + first);
  if (out != nullptr) std::transform(params, params + count, out, float_to_bf16);
}

}  // namespace

void adam_step_block(const AdamStep& p, int64_t index) {
  const bool is_float = p.dtype == Element::kFloat;
  if (p.bits == 8) return is_float ? step_block<8, float>(p, index) : step_block<8, uint16_t>(p, index);
  return is_float ? step_block<4, float>(p, index) : step_block<4, uint16_t>(p, index);
}

}  // namespace grpo_mc::GRPO_MC_ISA
