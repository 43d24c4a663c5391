// Stands in for CUDA's header of the same name when a .cu file is compiled by a C++ compiler: every thread of a block
// is a coroutine on the CPU, switched at barriers and warp operations. Slow, exact about what waits for what, and
// strict: a barrier that some thread never reaches ends the process with a message.
//
// Blocks run one after another. The order in which the threads of a block run between two barriers is set by the
// environment variable GRPO_MC_EMULATOR_ORDER (ascending, descending, or a number: random by that seed), so that a
// missing barrier shows as a difference between orders.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

#define GRPO_MC_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __constant__ static
#define __shared__ static  // blocks run one after another, so one copy is enough
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

struct uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

constexpr int kLanes = 32;
constexpr int kSlotBytes = 128;

void run_grid(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& kernel);
unsigned char* shared_memory();

// Waits until `count` threads of the block wait at the barrier of this number; count 0: all that have not returned.
void wait_at_barrier(int number, int count);

// Lets every other thread run, then goes on: what a spinning wait must call.
void yield_thread();

// What the lanes of a warp brought to one operation.
struct Brought {
  const unsigned char (*slots)[kLanes][kSlotBytes];  // two, used in turn by each lane
  unsigned second;                                   // lanes that used the second one
  const unsigned char* of(int lane) const { return slots[second >> lane & 1u][lane]; }
};

// Every lane of `mask` brings `bytes`; returns when all are there.
Brought exchange(unsigned mask, const void* mine, std::size_t bytes);

int lane();

template <typename T>
T from_lane(unsigned mask, T mine, int source) {
  static_assert(sizeof(T) <= kSlotBytes && std::is_trivially_copyable_v<T>);
  const Brought all = exchange(mask, &mine, sizeof(T));
  T theirs;
  std::memcpy(&theirs, all.of(source & (kLanes - 1)), sizeof(T));
  return theirs;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait_at_barrier(0, 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::from_lane(mask, 0, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulator::yield_thread(); }
[[noreturn]] inline void __trap() {
  std::fprintf(stderr, "emulator: __trap in block %u thread %u\n", blockIdx.x, threadIdx.x);
  std::abort();
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int base = emulator::lane() / width * width;
  return emulator::from_lane(mask, value, base + source % width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step, int width = 32) {
  const int self = emulator::lane(), source = self ^ step;
  return emulator::from_lane(mask, value, source / width == self / width ? source : self);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const int self = emulator::lane(), source = self + static_cast<int>(step);
  return emulator::from_lane(mask, value, source / width == self / width ? source : self);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned step, int width = 32) {
  const int self = emulator::lane(), source = self - static_cast<int>(step);
  return emulator::from_lane(mask, value, source >= self / width * width ? source : self);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const int mine = predicate != 0;
  const emulator::Brought all = emulator::exchange(mask, &mine, sizeof(mine));
  unsigned votes = 0;
  for (int i = 0; i < emulator::kLanes; ++i)
    if ((mask >> i & 1u) != 0 && all.of(i)[0] != 0) votes |= 1u << i;
  return votes;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const emulator::Brought all = emulator::exchange(mask, &value, sizeof(value));
  unsigned same = 0;
  for (int i = 0; i < emulator::kLanes; ++i)
    if ((mask >> i & 1u) != 0 && std::memcmp(all.of(i), &value, sizeof(value)) == 0) same |= 1u << i;
  return same;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline unsigned __activemask() { return 0xffffffffu; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

template <typename T, typename U>
T atomicAdd(T* address, U value) { const T old = *address; *address = static_cast<T>(old + value); return old; }
template <typename T, typename U>
T atomicMax(T* address, U value) { const T old = *address; *address = std::max<T>(old, value); return old; }
template <typename T, typename U>
T atomicMin(T* address, U value) { const T old = *address; *address = std::min<T>(old, value); return old; }
template <typename T, typename U>
T atomicOr(T* address, U value) { const T old = *address; *address = static_cast<T>(old | value); return old; }
template <typename T, typename U>
T atomicExch(T* address, U value) { const T old = *address; *address = static_cast<T>(value); return old; }
template <typename T, typename U, typename V>
T atomicCAS(T* address, U expected, V value) { const T old = *address; if (old == static_cast<T>(expected)) *address = static_cast<T>(value); return old; }

template <typename T>
T __ldg(const T* address) { return *address; }
template <typename T>
T __ldcs(const T* address) { return *address; }
template <typename T>
void __stcs(T* address, T value) { *address = value; }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return out;
}
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaLaunchAttribute {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
// Few multiprocessors, so that persistent blocks take several tiles; GRPO_MC_EMULATED_ARCHITECTURE: 80, 90 (if not
// set), ...
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const char* choice = std::getenv("GRPO_MC_EMULATED_ARCHITECTURE");
  const int architecture = choice == nullptr ? 90 : std::atoi(choice);
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : attribute == cudaDevAttrComputeCapabilityMajor ? architecture / 10 : architecture % 10;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidConfiguration;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) { std::memset(to, value, bytes); return cudaSuccess; }

template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Parameters... args) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  const unsigned long long threads = static_cast<unsigned long long>(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024)
    return cudaErrorInvalidConfiguration;
  emulator::run_grid(grid, block, config->dynamicSmemBytes, [&] { kernel(args...); });
  return cudaSuccess;
}

namespace grpo_mc::cuda {
inline unsigned char* dynamic_shared() { return emulator::shared_memory(); }
}  // namespace grpo_mc::cuda

#include "mma_emulation.h"
#include "hopper_emulation.h"
