// 4- and 8-bit codes of a block with one scale, the rest that rounding leaves as 8-bit error feedback, and back.
//
//     h = x + error        y = hadamard(h) or h        q, scale: see common/block_codes.h
//     rest = h - (hadamard of) q * scale, kept as 8-bit codes with a scale of its own
//
// The transform is the 32-point Walsh-Hadamard one over sqrt(32), its own inverse. A block with a NaN or an infinity has
// scale NaN and codes of zero, and its error stays as it was.
#include <algorithm>
#include <cmath>

#include "common/block_codes.h"
#include "common/philox.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, to nearest even
constexpr int64_t kHadamardVectors = kHadamardSize / kLanes;

// 32 numbers in place: butterflies between vectors, then within them.
GRPO_MC_INLINE void hadamard32(float* x) {
  F8 v[kHadamardVectors];
  for (int i = 0; i < kHadamardVectors; ++i) v[i] = load8(x + i * kLanes);
  for (int step = 1; step < kHadamardVectors; step *= 2)
    for (int i = 0; i < kHadamardVectors; ++i)
      if ((i & step) == 0) {
        const F8 a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
  const auto within = [](F8 a, F8 swapped, I8 negative) { return swapped + (F8)((I8)a ^ negative); };
  constexpr int32_t s = static_cast<int32_t>(0x80000000u);
  for (int i = 0; i < kHadamardVectors; ++i) {
    F8 a = v[i];
    a = within(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6), I8{0, s, 0, s, 0, s, 0, s});
    a = within(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5), I8{0, 0, s, s, 0, 0, s, s});
    a = within(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3), I8{0, 0, 0, 0, s, s, s, s});
    store8(x + i * kLanes, a * splat(kHadamardScale));
  }
}

GRPO_MC_INLINE void hadamard(float* x, int64_t length) {
  for (int64_t i = 0; i < length; i += kHadamardSize) hadamard32(x + i);
}

// The largest magnitude; NaN if any number is not finite.
GRPO_MC_INLINE float largest(const float* x, int64_t length) {
  Magnitudes sizes;
  for (int64_t i = 0; i < length; i += kLanes) sizes.add(load8(x + i));
  return sizes.amax();
}

template <typename T>
GRPO_MC_INLINE void load_block(const T* x, int64_t count, int64_t block, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store8(out + i, load8(x + i));
  for (; i < block; ++i) {
    if constexpr (sizeof(T) == 2) out[i] = i < count ? bf16_to_float(x[i]) : 0.0f;
    else out[i] = i < count ? x[i] : 0.0f;
  }
}

GRPO_MC_INLINE F8 widen(const int8_t* p) {
  F8 x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
}

// nearest_code of each entry, in place.
GRPO_MC_INLINE void round_nearest(float* y, int64_t block, float inverse, float levels) {
  for (int64_t i = 0; i < block; i += kLanes) {
    const F8 whole = (load8(y + i) * splat(inverse) + splat(kMagic)) - splat(kMagic);
    store8(y + i, max8(splat(-levels), min8(splat(levels), whole)));
  }
}

// stochastic_code of each entry, in place; the first has random number `first` of the seed.
GRPO_MC_INLINE void round_stochastic(float* y, int64_t block, float inverse, float levels, uint64_t seed, uint64_t first) {
  uint32_t words[4];
  uint64_t have = ~uint64_t{0};
  for (int64_t i = 0; i < block; ++i) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    if (index / 4 != have) philox_block(have = index / 4, seed, words);
    y[i] = stochastic_code(y[i], inverse, levels, unit_float(words[index % 4]));
  }
}

GRPO_MC_INLINE void pack_bytes(const float* q, int64_t block, int8_t* codes) {
  for (int64_t i = 0; i < block; ++i) codes[i] = static_cast<int8_t>(q[i]);
}

GRPO_MC_INLINE void pack_pairs(const float* q, int64_t block, uint8_t* codes) {
  for (int64_t i = 0; i < block / 2; ++i) codes[i] = pack_int4(q[2 * i], q[2 * i + 1]);
}

// The rest as 8-bit codes; `rest` is overwritten.
GRPO_MC_INLINE float keep_rest(float* rest, int64_t block, int8_t* codes) {
  const float scale = code_scale(largest(rest, block), kInt8Levels);
  round_nearest(rest, block, 1.0f / scale, kInt8Levels);
  pack_bytes(rest, block, codes);
  return scale;
}

template <typename T>
GRPO_MC_INLINE void add_to(const float* from, T* to, int64_t count, bool add) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store8(to + i, add ? load8(to + i) + load8(from + i) : load8(from + i));
  if (i < count) {
    const F8 part = load_tail(from + i, count - i, 0.0f);
    store_tail(to + i, count - i, add ? load_tail(to + i, count - i, 0.0f) + part : part);
  }
}

}  // namespace

void quantize_code_block(const CodeQuantize& p, int64_t index) {
  alignas(32) float whole[kCodesMaxBlock], values[kCodesMaxBlock];
  const int64_t first = index * p.block, count = std::min(p.block, p.n - first);
  if (p.dtype == Element::kFloat) load_block(static_cast<const float*>(p.x) + first, count, p.block, whole);
  else load_block(static_cast<const uint16_t*>(p.x) + first, count, p.block, whole);
  int8_t* error = p.error_codes == nullptr ? nullptr : p.error_codes + first;
  if (error != nullptr)
    for (int64_t i = 0; i < p.block; i += kLanes) store8(whole + i, load8(whole + i) + widen(error + i) * splat(p.error_scales[index]));
  std::copy(whole, whole + p.block, values);
  if (p.hadamard) hadamard(values, p.block);
  const float amax = largest(values, p.block);
  const int64_t num_bytes = p.block * p.bits / 8;
  uint8_t* codes = p.codes + index * num_bytes;
  if (std::isnan(amax)) {
    p.scales[index] = amax;
    std::fill(codes, codes + num_bytes, p.bits == 4 ? kInt4Zeros : uint8_t{0});
    return;
  }
  const float levels = p.bits == 4 ? kInt4Levels : kInt8Levels;
  const float scale = code_scale(amax, levels), inverse = 1.0f / scale;
  p.scales[index] = scale;
  if (p.stochastic) round_stochastic(values, p.block, inverse, levels, p.seed, p.offset + static_cast<uint64_t>(first));
  else round_nearest(values, p.block, inverse, levels);
  if (p.bits == 4) pack_pairs(values, p.block, codes);
  else pack_bytes(values, p.block, reinterpret_cast<int8_t*>(codes));
  if (error == nullptr) return;
  for (int64_t i = 0; i < p.block; i += kLanes) store8(values + i, load8(values + i) * splat(scale));
  if (p.hadamard) hadamard(values, p.block);
  for (int64_t i = 0; i < p.block; i += kLanes) store8(whole + i, load8(whole + i) - load8(values + i));
  p.error_scales[index] = keep_rest(whole, p.block, error);
}

void dequantize_code_block(const CodeDequantize& p, int64_t index) {
  alignas(32) float values[kCodesMaxBlock];
  const int64_t first = index * p.block, count = std::min(p.block, p.n - first);
  const uint8_t* codes = p.codes + index * (p.block * p.bits / 8);
  const float scale = p.scales[index];
  if (p.bits == 4) {
    for (int64_t i = 0; i < p.block / 2; ++i) {
      values[2 * i] = first_int4(codes[i]) * scale;
      values[2 * i + 1] = second_int4(codes[i]) * scale;
    }
  } else {
    const int8_t* bytes = reinterpret_cast<const int8_t*>(codes);
    for (int64_t i = 0; i < p.block; i += kLanes) store8(values + i, widen(bytes + i) * splat(scale));
  }
  if (p.hadamard) hadamard(values, p.block);
  if (p.dtype == Element::kFloat) add_to(values, static_cast<float*>(p.out) + first, count, p.add);
  else add_to(values, static_cast<uint16_t*>(p.out) + first, count, p.add);
}

}  // namespace grpo_mc::GRPO_MC_ISA
