// Rows of float, bfloat16 or double, sixteen bytes at a time wherever the addresses allow it.
#pragma once

#include "cuda/launch.h"

namespace grpo_mc::cuda {

// What a stored number is computed in.
template <typename T>
struct WideOf { using Type = float; };
template <>
struct WideOf<double> { using Type = double; };
template <typename T>
using Wide = typename WideOf<T>::Type;

template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));  // entries of sixteen bytes

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(uint16_t x) { return bf16_to_float(x); }

__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(double* to, double x) { *to = x; }
__device__ __forceinline__ void store(uint16_t* to, float x) { *to = float_to_bf16(x); }

// kPack entries from an address that is a multiple of sixteen.
template <typename T>
__device__ __forceinline__ void load_pack(const T* from, Wide<T>* x) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  T entries[kPack<T>];
  memcpy(entries, &bits, sizeof(bits));
#pragma unroll
  for (int k = 0; k < kPack<T>; ++k) x[k] = widen(entries[k]);
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Wide<T>* x) {
  T entries[kPack<T>];
#pragma unroll
  for (int k = 0; k < kPack<T>; ++k) store(entries + k, x[k]);
  uint4 bits;
  memcpy(&bits, entries, sizeof(bits));
  *reinterpret_cast<uint4*>(to) = bits;
}

// A row of n entries as `head` single ones, whole packs from `head` to `end`, and single ones behind: fewer than kPack
// on either side.
template <typename T>
struct Packs {
  __device__ __forceinline__ Packs(const T* row, int64_t n) {
    const int64_t beyond = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = beyond == 0 ? 0 : kPack<T> - beyond;
    head = head < n ? head : n;
    end = head + (n - head) / kPack<T> * kPack<T>;
    singles = n - (end - head);
  }
  // The column of the i-th entry outside the packs.
  __device__ __forceinline__ int64_t single(int64_t i) const { return i < head ? i : end + (i - head); }
  int64_t head, end, singles;
};

}  // namespace grpo_mc::cuda
