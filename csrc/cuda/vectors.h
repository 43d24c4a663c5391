// Several adjacent entries at once: one word of up to 16 bytes where addresses allow it, one by one where they do not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/fp8.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

template <int kBytes>
using Word = typename WordOf<kBytes>::type;

inline bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

// Two bfloat16 numbers, the first in the low half; float_to_bf16 of each, except that a NaN loses its sign and payload.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
#endif
}

// As integers, magnitudes are ordered as the floats are, with infinity and NaN above all numbers.
__device__ __forceinline__ uint32_t magnitude(float x) { return float_bits(x) & 0x7fffffffu; }

template <int kCount>
__device__ __forceinline__ void fill(float (&to)[kCount], float x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = x;
}

// Copies between memory that is aligned to all kCount entries and registers.
template <int kCount, typename T>
__device__ __forceinline__ void load_word(const T* p, T (&entries)[kCount]) {
  using Bits = Word<kCount * sizeof(T)>;
  const Bits word = *reinterpret_cast<const Bits*>(p);
  memcpy(entries, &word, sizeof(word));
}

template <int kCount, typename T>
__device__ __forceinline__ void store_word(T* p, const T (&entries)[kCount]) {
  using Bits = Word<kCount * sizeof(T)>;
  Bits word;
  memcpy(&word, entries, sizeof(word));
  *reinterpret_cast<Bits*>(p) = word;
}

// The first `left` of kCount entries from p, zeros behind them; `aligned`: p is aligned to all of them.
template <int kCount, typename T>
__device__ __forceinline__ void load_entries(const T* p, int64_t left, bool aligned, T (&entries)[kCount]) {
  if (aligned && left >= kCount) return load_word(p, entries);
#pragma unroll
  for (int i = 0; i < kCount; ++i) entries[i] = i < left ? p[i] : T{0};
}

template <int kCount, typename T>
__device__ __forceinline__ void store_entries(T* p, int64_t left, bool aligned, const T (&entries)[kCount]) {
  if (aligned && left >= kCount) return store_word(p, entries);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < left) p[i] = entries[i];
}

// The first `left` of kCount entries from p as float, zeros behind them; `aligned`: p is aligned to 16 bytes.
template <int kCount, typename T>
__device__ __forceinline__ void load_floats(const T* p, int64_t left, bool aligned, float (&x)[kCount]) {
  constexpr int kStep = 16 / sizeof(T) < kCount ? 16 / sizeof(T) : kCount;
  if (aligned && left >= kCount) {
#pragma unroll
    for (int first = 0; first < kCount; first += kStep) {
      T entries[kStep];
      load_word(p + first, entries);
#pragma unroll
      for (int i = 0; i < kStep; ++i) x[first + i] = widen(entries[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = i < left ? widen(p[i]) : 0.0f;
}

// The first `left` of x to p, rounded to nearest even.
template <int kCount>
__device__ __forceinline__ void store_floats(float* p, int64_t left, bool aligned, const float (&x)[kCount]) {
  static_assert(kCount % 4 == 0);
  if (aligned && left >= kCount) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < left) p[i] = x[i];
}

template <int kCount>
__device__ __forceinline__ void store_floats(uint16_t* p, int64_t left, bool aligned, const float (&x)[kCount]) {
  static_assert(kCount % 8 == 0);
  if (aligned && left >= kCount) {
#pragma unroll
    for (int i = 0; i < kCount; i += 8)
      *reinterpret_cast<uint4*>(p + i) = make_uint4(pack_bf16(x[i], x[i + 1]), pack_bf16(x[i + 2], x[i + 3]),
                                                    pack_bf16(x[i + 4], x[i + 5]), pack_bf16(x[i + 6], x[i + 7]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < left) p[i] = float_to_bf16(x[i]);
}

}  // namespace grpo_mc::cuda
