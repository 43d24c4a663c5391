// FP8 codes two at a time: by the instructions that GPUs have from sm_89 on, by common/fp8.h on older ones. Both give
// the same bits.
#pragma once

#include "common/fp8.h"
#include "cuda/launch.h"

namespace grpo_mc::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define GRPO_MC_FP8_INSTRUCTIONS 1
#endif

// The first code in the low byte.
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
#if defined(GRPO_MC_FP8_INSTRUCTIONS)
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return float_to_e4m3(low) | static_cast<uint32_t>(float_to_e4m3(high)) << 8;
#endif
}

__device__ __forceinline__ void decode_pair(uint32_t pair, float& low, float& high) {
#if defined(GRPO_MC_FP8_INSTRUCTIONS)
  uint32_t halves;  // every code is exact in half precision
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<uint16_t>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<uint16_t>(halves >> 16)));
#else
  low = e4m3_to_float(static_cast<uint8_t>(pair));
  high = e4m3_to_float(static_cast<uint8_t>(pair >> 8));
#endif
}

}  // namespace grpo_mc::cuda
