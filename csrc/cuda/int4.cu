// nvcc: sm_80 sm_90 sm_100
// 4- and 8-bit codes of blocks with one scale each, 8-bit error feedback, and back; see common/block_codes.h and
// csrc/cpu/int4.cpp.
//
// A thread has eight adjacent entries and a team of threads has a block of codes, all in registers: x is read once,
// codes and scales are written once, and the error codes are read and written once. Memory bounds it: 4 + 1/2 (or 1)
// bytes a float32 entry, 2 more with feedback. A team is a part of a warp for blocks up to 256 entries, which needs no
// barrier, and a whole CUDA block for larger ones. Four neighbours have the 32 entries of a transform: its strides 8
// and 16 go through the warp, in the order of the CPU's kernel.
#include "common/block_codes.h"
#include "common/philox.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/vectors.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kEntries = 8;  // of one thread
constexpr int kThreads = 256;
constexpr int kMostThreads = kCodesMaxBlock / kEntries;

struct Alignment {
  bool entries, codes, error;  // words can be read and written at once
};

// A thread's part of one block of codes.
struct Part {
  int64_t index;  // the block of codes
  int64_t first;  // of its entries, counted through all blocks
  int size;       // kEntries; 0 for threads behind a block that does not fill its team, and for teams without a block
};

__device__ __forceinline__ Part part_of(int64_t index, int64_t blocks, int64_t block) {
  const int64_t within = static_cast<int64_t>(threadIdx.x) * kEntries;
  return {index, index * block + within, index < blocks && within < block ? kEntries : 0};
}

__device__ __forceinline__ void hadamard(float (&x)[kEntries]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool second = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], step);
      x[i] = second ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kEntries; step *= 2)
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if ((i & step) == 0) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
#pragma unroll
  for (int i = 0; i < kEntries; ++i) x[i] *= kHadamardScale;
}

// The largest magnitude of the team's entries, in every thread; NaN if any is not finite.
template <bool kWarpTeams>
__device__ __forceinline__ float largest(const float (&x)[kEntries]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) most = max(most, magnitude(x[i]));
  if constexpr (kWarpTeams) {
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, static_cast<int>(step)));
  } else {
    __shared__ uint32_t found[kMostThreads / kWarp];
    most = warp_max(most);
    __syncthreads();  // the last call's numbers have been read
    if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = most;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) most = max(most, found[warp]);
  }
  return bits_float(most < 0x7f800000u ? most : 0x7fc00000u);
}

// The random words of entries index to index + 7.
__device__ __forceinline__ void random_words(uint64_t index, uint64_t seed, uint32_t (&words)[kEntries]) {
  const int shift = static_cast<int>(index % 4);  // the same in all threads: parts begin at multiples of 8
  uint32_t drawn[kEntries + 4] = {};
  philox_block(index / 4, seed, drawn);
  philox_block(index / 4 + 1, seed, drawn + 4);
  if (shift != 0) philox_block(index / 4 + 2, seed, drawn + 8);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    words[i] = drawn[i];
#pragma unroll
    for (int ahead = 1; ahead < 4; ++ahead) words[i] = shift == ahead ? drawn[i + ahead] : words[i];
  }
}

// The eight codes at entry `first`, as bytes: two codes each with 4 bits, one with 8.
__device__ __forceinline__ void store_codes(const CodeQuantize& p, const Part& part, bool aligned,
                                            const float (&q)[kEntries]) {
  if (p.bits == 4) {
    uint8_t pairs[kEntries / 2];
#pragma unroll
    for (int i = 0; i < kEntries / 2; ++i) pairs[i] = pack_int4(q[2 * i], q[2 * i + 1]);
    store_entries(p.codes + part.first / 2, part.size / 2, aligned, pairs);
  } else {
    int8_t bytes[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) bytes[i] = static_cast<int8_t>(q[i]);
    store_entries(reinterpret_cast<int8_t*>(p.codes) + part.first, part.size, aligned, bytes);
  }
}

__device__ __forceinline__ void load_codes(const CodeDequantize& p, const Part& part, bool aligned,
                                           float (&q)[kEntries]) {
  if (p.bits == 4) {
    uint8_t pairs[kEntries / 2];
    load_entries(p.codes + part.first / 2, part.size / 2, aligned, pairs);
#pragma unroll
    for (int i = 0; i < kEntries / 2; ++i) {
      q[2 * i] = first_int4(pairs[i]);
      q[2 * i + 1] = second_int4(pairs[i]);
    }
  } else {
    int8_t bytes[kEntries];
    load_entries(reinterpret_cast<const int8_t*>(p.codes) + part.first, part.size, aligned, bytes);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) q[i] = static_cast<float>(bytes[i]);
  }
}

// y over the scale as whole numbers, in place.
__device__ __forceinline__ void round_entries(const CodeQuantize& p, const Part& part, float inverse, float levels,
                                              float (&y)[kEntries]) {
  if (p.stochastic) {
    uint32_t words[kEntries];
    random_words(p.offset + static_cast<uint64_t>(part.first), p.seed, words);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) y[i] = stochastic_code(y[i], inverse, levels, unit_float(words[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) y[i] = nearest_code(y[i], inverse, levels);
  }
}

// h less what the receiver makes of the whole numbers y, as the new error.
template <bool kWarpTeams>
__device__ __forceinline__ void keep_rest(const CodeQuantize& p, const Part& part, bool aligned, float scale,
                                          float (&h)[kEntries], float (&y)[kEntries]) {
#pragma unroll
  for (int i = 0; i < kEntries; ++i) y[i] *= scale;
  if (p.hadamard) hadamard(y);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) h[i] = part.size != 0 ? h[i] - y[i] : 0.0f;
  const float error_scale = code_scale(largest<kWarpTeams>(h), kInt8Levels), inverse = 1.0f / error_scale;
  if (part.size == 0 || scale != scale) return;  // a block that is not finite keeps its error
  int8_t codes[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) codes[i] = static_cast<int8_t>(nearest_code(h[i], inverse, kInt8Levels));
  store_entries(p.error_codes + part.first, part.size, aligned, codes);
  if (threadIdx.x == 0) p.error_scales[part.index] = error_scale;
}

// Teams of blockDim.x threads, blockDim.y of them in a CUDA block.
template <typename T, bool kWarpTeams>
__global__ void __launch_bounds__(kWarpTeams ? kThreads : kMostThreads)
    quantize_blocks(CodeQuantize p, int64_t blocks, Alignment aligned) {
  for (int64_t team = static_cast<int64_t>(blockIdx.x) * blockDim.y; team < blocks;
       team += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const Part part = part_of(team + threadIdx.y, blocks, p.block);
    float h[kEntries], y[kEntries];
    load_floats(static_cast<const T*>(p.x) + part.first, part.size != 0 ? p.n - part.first : 0, aligned.entries, h);
    if (p.error_codes != nullptr) {
      int8_t error[kEntries];
      load_entries(p.error_codes + part.first, part.size, aligned.error, error);
      const float error_scale = part.size != 0 ? p.error_scales[part.index] : 0.0f;
#pragma unroll
      for (int i = 0; i < kEntries; ++i) h[i] = h[i] + static_cast<float>(error[i]) * error_scale;
    }
#pragma unroll
    for (int i = 0; i < kEntries; ++i) y[i] = h[i];
    if (p.hadamard) hadamard(y);
    const float amax = largest<kWarpTeams>(y), levels = p.bits == 4 ? kInt4Levels : kInt8Levels;
    const float scale = amax == amax ? code_scale(amax, levels) : amax;
    if (part.size != 0 && threadIdx.x == 0) p.scales[part.index] = scale;
    if (scale == scale) round_entries(p, part, 1.0f / scale, levels, y);
    else fill(y, 0.0f);
    store_codes(p, part, aligned.codes, y);
    if (p.error_codes != nullptr) keep_rest<kWarpTeams>(p, part, aligned.error, scale, h, y);
  }
}

template <typename T, bool kWarpTeams>
__global__ void __launch_bounds__(kWarpTeams ? kThreads : kMostThreads)
    dequantize_blocks(CodeDequantize p, int64_t blocks, Alignment aligned) {
  for (int64_t team = static_cast<int64_t>(blockIdx.x) * blockDim.y; team < blocks;
       team += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const Part part = part_of(team + threadIdx.y, blocks, p.block);
    const float scale = part.size != 0 ? p.scales[part.index] : 0.0f;
    float x[kEntries];
    load_codes(p, part, aligned.codes, x);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) x[i] *= scale;
    if (p.hadamard) hadamard(x);
    const int64_t left = part.size != 0 ? p.n - part.first : 0;
    T* out = static_cast<T*>(p.out) + part.first;
    if (p.add) {
      float before[kEntries];
      load_floats(out, left, aligned.entries, before);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) x[i] = before[i] + x[i];
    }
    store_floats(out, left, aligned.entries, x);
  }
}

// Threads of a team and teams of a CUDA block.
dim3 team_shape(int64_t block) {
  const int64_t needed = block / kEntries;
  if (needed > kWarp) return dim3(static_cast<unsigned>((needed + kWarp - 1) / kWarp * kWarp));
  unsigned lanes = 4;
  while (lanes < needed) lanes *= 2;
  return dim3(lanes, kThreads / lanes);
}

template <typename Arguments>
using Kernel = void (*)(Arguments, int64_t, Alignment);

template <typename Arguments>
const char* launch_teams(Kernel<Arguments> warp_teams, Kernel<Arguments> block_teams, const Arguments& p,
                         Alignment aligned, void* stream) {
  const int64_t blocks = blocks_of(p.n, p.block);
  const dim3 team = team_shape(p.block);
  const unsigned grid = blocks_for(blocks_of(blocks, team.y));
  return launch(team.x <= kWarp ? warp_teams : block_teams, grid, team, 0, stream, p, blocks, aligned);
}

template <typename T>
const char* quantize(const CodeQuantize& p, void* stream) {
  const Alignment aligned{is_aligned(p.x, 16), is_aligned(p.codes, p.bits), is_aligned(p.error_codes, kEntries)};
  return launch_teams<CodeQuantize>(quantize_blocks<T, true>, quantize_blocks<T, false>, p, aligned, stream);
}

template <typename T>
const char* dequantize(const CodeDequantize& p, void* stream) {
  const Alignment aligned{is_aligned(p.out, 16), is_aligned(p.codes, p.bits), true};
  return launch_teams<CodeDequantize>(dequantize_blocks<T, true>, dequantize_blocks<T, false>, p, aligned, stream);
}

}  // namespace

const char* quantize_codes(const CodeQuantize& p, void* stream) {
  return p.dtype == Element::kFloat ? quantize<float>(p, stream) : quantize<uint16_t>(p, stream);
}

const char* dequantize_codes(const CodeDequantize& p, void* stream) {
  return p.dtype == Element::kFloat ? dequantize<float>(p, stream) : dequantize<uint16_t>(p, stream);
}

}  // namespace grpo_mc::cuda
