// Matrix instructions and asynchronous copies that every architecture from sm_80 on has. The emulator of the tests has
// its own of the same names (tests/cuda_emulator/mma_emulation.h).
#pragma once

#include "cuda/launch.h"

#if !defined(GRPO_MC_EMULATED)

namespace grpo_mc::cuda {

// sums [16, 8] += a [16, 16] * b [16, 8], fp16 products that are exact, float32 sums. Of a, lane 4 g + t holds columns
// 2t, 2t + 1 of row g, then of row g + 8, then columns 2t + 8, 2t + 9 of both rows; of b, rows 2t, 2t + 1 and 2t + 8,
// 2t + 9 of column g; of the sums, columns 2t, 2t + 1 of row g and of row g + 8.
__device__ __forceinline__ void mma_16x8x16(float* sums, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Starts copying `bytes` (0 to 16) from global to shared memory and zeros up to 16; both addresses are multiples of 16.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// Ends a group: the copies that this thread started since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way; a barrier then shows their bytes to other
// threads.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace grpo_mc::cuda

#endif
