// How kernels are launched, and what every kernel needs: shared memory by size, sums over a warp and a block.
//
// A kernel is an ordinary __global__ function; launch() takes the place of <<<...>>>, so that the tests can compile the
// same files with a C++ compiler and run them thread by thread on the CPU (tests/cuda_emulator).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/numerics.h"

namespace grpo_mc::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

#if !defined(GRPO_MC_EMULATED)
// The block's dynamic shared memory, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}
#endif

// Queues kernel(args...) on the stream; nullptr, or CUDA's sentence about what is wrong.
template <typename... Parameters, typename... Args>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                   const Args&... args) {
  if (shared_bytes > 48 * 1024) {  // more has to be asked for, kernel by kernel
    const cudaError_t refused =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (refused != cudaSuccess) return cudaGetErrorString(refused);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Blocks for n pieces of work of which a block takes one at a time, in turn: every kernel walks them by gridDim.x.
inline unsigned blocks_for(int64_t n) {
  constexpr int64_t kMost = 1 << 20;
  return static_cast<unsigned>(n < kMost ? n : kMost);
}

// Pieces of `piece` that cover a size.
inline int64_t blocks_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

// A block for rows of so many pieces, each for `lanes` threads: as many threads beside each other as a row has use for,
// a power of two times the lanes; the others have further rows.
inline dim3 block_shape(int64_t pieces, int lanes, int threads) {
  int across = 1;
  while (across * 2 <= pieces && across * 2 * lanes <= threads) across *= 2;
  return dim3(static_cast<unsigned>(across * lanes), static_cast<unsigned>(threads / (across * lanes)));
}

// Blocks across, and down the rows as many as a grid can have: kernels walk further rows by gridDim.y.
inline dim3 grid_shape(int64_t across, int64_t down) {
  constexpr int64_t kMostDown = 65535;
  return dim3(static_cast<unsigned>(across), static_cast<unsigned>(down < kMostDown ? down : kMostDown));
}

// The sum over the lanes of a warp, in every lane; always added in the same order.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// The sum over the block's threads, in every thread; blockDim.x must be a multiple of 32, at most 1024. `scratch` is
// shared memory for 32 values, free again when this returns.
template <typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_sum(lane < warps ? scratch[lane] : T{});
  __syncthreads();
  return value;
}

// The largest of the block's values, in every thread; the rules of block_sum.
template <typename T>
__device__ __forceinline__ T block_max(T value, T* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_max(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_max(scratch[lane < warps ? lane : 0]);
  __syncthreads();
  return value;
}

}  // namespace grpo_mc::cuda
