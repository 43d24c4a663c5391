// nvcc: sm_80 sm_90 sm_100
// Adam steps in one pass; see common/adam.h for what happens to an entry and to a block of codes.
//
// Memory bounds it: parameters are read and written (8 bytes an entry), gradients read (2 or 4), a bfloat16 copy
// written (2), and of each moment 8 bytes, 2 or 1. With float states a thread has eight adjacent entries. With codes 16
// lanes have a block: entries 4 l to 4 l + 3 of either half each, so that numbers move in words of 16 bytes and codes
// in words of 4, and everything between the moments' old codes and their new ones stays in registers. A warp draws the
// random words of four blocks at once, a Philox block a lane; they reach their entries through shared memory.
#include "common/adam.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/vectors.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kEntries = 8;                    // of a thread
constexpr int kLanes = kAdamBlock / kEntries;  // of a block of codes
constexpr int kWarps = kThreads / kWarp;
constexpr int kRun = kEntries / 2;                // adjacent entries of a lane
constexpr int kWords = 4;                         // of a Philox block
constexpr int kPlaces = 32;                       // words of a block of codes
constexpr int kDrawn = kWarp * kWords / kPlaces;  // blocks of codes that a warp draws words for

struct Alignment {
  bool params, grads, moments, out;  // words can be read and written at once
};

template <typename T>
__global__ void __launch_bounds__(kThreads) step_floats(AdamStep p, Alignment aligned) {
  float *exp_avg = static_cast<float*>(p.exp_avg), *exp_avg_sq = static_cast<float*>(p.exp_avg_sq);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kEntries; i < p.n;
       i += static_cast<int64_t>(gridDim.x) * kThreads * kEntries) {
    const int64_t left = p.n - i;
    float param[kEntries], grad[kEntries], m[kEntries], v[kEntries];
    load_floats(p.params + i, left, aligned.params, param);
    load_floats(static_cast<const T*>(p.grads) + i, left, aligned.grads, grad);
    load_floats(exp_avg + i, left, aligned.moments, m);
    load_floats(exp_avg_sq + i, left, aligned.moments, v);
#pragma unroll
    for (int k = 0; k < kEntries; ++k) adam_update(p.factors, grad[k], param[k], m[k], v[k]);
    store_floats(p.params + i, left, aligned.params, param);
    store_floats(exp_avg + i, left, aligned.moments, m);
    store_floats(exp_avg_sq + i, left, aligned.moments, v);
    if (p.out != nullptr) store_floats(p.out + i, left, aligned.out, param);
  }
}

// The largest over the lanes of a block of codes.
__device__ __forceinline__ uint32_t largest_of(uint32_t value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// A lane's entries of a block of codes, by half.
struct Entries {
  float m[2][kRun], v[2][kRun];
  uint32_t code_m[2][kRun], code_v[2][kRun];
};

// Four bytes: codes of one half, with 4 bits of both.
template <int kBits>
__device__ __forceinline__ void load_codes(const void* codes, int64_t block, int lane, bool is_there, bool aligned,
                                           uint32_t (&to)[2][kRun]) {
  constexpr int kHalves = kBits / 4;
  const uint8_t* from = static_cast<const uint8_t*>(codes) + block * (kAdamBlock * kBits / 8) + lane * kRun;
  uint8_t bytes[kHalves][kRun];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
    load_entries(from + half * kAdamHalf, is_there ? kRun : 0, aligned, bytes[half]);
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    to[0][k] = kBits == 8 ? bytes[0][k] : bytes[0][k] & 15u;
    to[1][k] = kBits == 8 ? bytes[kHalves - 1][k] : bytes[0][k] >> 4;
  }
}

template <int kBits>
__device__ __forceinline__ void store_codes(void* codes, int64_t block, int lane, bool aligned,
                                            const uint32_t (&from)[2][kRun]) {
  constexpr int kHalves = kBits / 4;
  uint8_t* to = static_cast<uint8_t*>(codes) + block * (kAdamBlock * kBits / 8) + lane * kRun;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    uint8_t bytes[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k)
      bytes[k] = static_cast<uint8_t>(kBits == 8 ? from[half][k] : from[0][k] | from[1][k] << 4);
    store_entries(to + half * kAdamHalf, kRun, aligned, bytes);
  }
}

// What the codes mean.
template <int kBits>
__device__ __forceinline__ void decode(const AdamStep& p, int64_t block, bool is_there, Entries& e) {
  const float* ends = p.exp_avg_sq_scale + 2 * block;
  const float lowest = is_there ? ends[0] : 0.0f, highest = is_there ? ends[1] : 0.0f;
  const float scale = is_there ? p.exp_avg_scale[block] : 0.0f;
  const AdamLevels levels = adam_levels(lowest, highest, (1u << kBits) - 1u);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      e.v[half][k] = adam_decode_v(levels, e.code_v[half][k]);
      e.m[half][k] = adam_decode_m<kBits>(e.code_m[half][k]) * scale * adam_unit(e.v[half][k]);
    }
}

// One step of the entries that there are; moments of others become 0.
template <typename T>
__device__ __forceinline__ void update(const AdamStep& p, int64_t first, Alignment aligned, Entries& e) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = first + half * kAdamHalf, left = p.n - i;
    float param[kRun], grad[kRun];
    load_floats(p.params + i, left, aligned.params, param);
    load_floats(static_cast<const T*>(p.grads) + i, left, aligned.grads, grad);
    uint16_t out[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      adam_update(p.factors, grad[k], param[k], e.m[half][k], e.v[half][k]);
      store(out + k, param[k]);
      if (k < left) continue;
      e.m[half][k] = 0.0f;
      e.v[half][k] = 0.0f;
    }
    store_floats(p.params + i, left, aligned.params, param);
    if (p.out != nullptr) store_entries(p.out + i, left, aligned.out, out);
  }
}

// The range of a block's v and whether its moments are good, in all its lanes.
struct Range {
  float smallest, highest;  // smallest: of those above 0
  bool is_good;
};

__device__ __forceinline__ Range range_of(const Entries& e) {
  uint32_t largest_m = 0, largest_v = 0, smallest_v = 0;  // smallest_v: turned round, the largest of ~(v - 1)
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      largest_m = max(largest_m, magnitude(e.m[half][k]));
      largest_v = max(largest_v, float_bits(e.v[half][k]));
      smallest_v = max(smallest_v, ~(float_bits(e.v[half][k]) - 1u));
    }
  largest_m = largest_of(largest_m);
  largest_v = largest_of(largest_v);
  smallest_v = largest_of(smallest_v);
  return {bits_float(~smallest_v + 1u), bits_float(largest_v), largest_m < kAdamInfinite && largest_v < kAdamLargest};
}

// The warp's words for blocks `first` to `first` + kDrawn - 1.
__device__ __forceinline__ void draw_words(const AdamStep& p, int64_t first, uint32_t (&words)[kDrawn][kPlaces]) {
  constexpr int kPhilox = kPlaces / kWords;  // of a block of codes
  const int block = threadIdx.x % kWarp / kPhilox, lane = threadIdx.x % kPhilox;
  const uint64_t index = p.offset / kAdamBlock + static_cast<uint64_t>(first + block);
  uint32_t drawn[kWords];
  philox_block(adam_philox_block(p.step, index, static_cast<uint64_t>(lane)), p.seed, drawn);
  __syncwarp();  // the words before have been read
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[block][kPhilox * i + lane] = drawn[i];
  __syncwarp();
}

// The random bits of a lane's entries, in 16 bits each: those of one half of the block, and of the other above them.
__device__ __forceinline__ void random_bits(const uint32_t (&words)[kPlaces], int lane, uint32_t (&bits)[kRun]) {
  load_word(words + lane * kRun % kPlaces, bits);
  if (lane * kRun / kPlaces % 2 == 0) return;
#pragma unroll
  for (int k = 0; k < kRun; ++k)
    bits[k] = (bits[k] * kAdamLatticeSecond & 0xffffu) | (bits[k] >> 16) * kAdamLatticeSecond << 16;
}

__device__ __forceinline__ uint32_t bits_of_half(uint32_t bits, int half) { return bits >> (16 * half) & 0xffffu; }

// New codes of both moments, and the scale of m; false, in all lanes of a block, if m leaves the range of its unit.
template <int kBits>
__device__ __forceinline__ bool encode(const AdamLevels& levels, const uint32_t (&bits)[kRun], Entries& e,
                                       float& scale) {
  constexpr uint32_t kTop = (1u << kBits) - 1u;
  uint32_t largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const float random = adam_random(bits_of_half(bits[k], half));
      e.code_v[half][k] = adam_encode_v(levels, e.v[half][k], kTop, random);
      e.m[half][k] *= adam_inverse_unit(adam_decode_v(levels, e.code_v[half][k]));
      largest = max(largest, magnitude(e.m[half][k]));
    }
  largest = largest_of(largest);
  scale = adam_m_scale<kBits>(bits_float(largest));
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const float random = adam_random(adam_bits_of_m(bits_of_half(bits[k], half)));
      e.code_m[half][k] = adam_encode_m<kBits>(e.m[half][k] * inverse, random);
    }
  return largest < kAdamInfinite;
}

__device__ __forceinline__ void clear(uint32_t (&codes)[2][kRun]) {
#pragma unroll
  for (int k = 0; k < kRun; ++k) codes[0][k] = codes[1][k] = 0;
}

// Half a warp: one block of codes; `is_there`: or none, but along for the shuffles.
template <int kBits, typename T>
__device__ __forceinline__ void step_block(const AdamStep& p, int64_t block, bool is_there, Alignment aligned,
                                           const uint32_t (&words)[kPlaces]) {
  const int lane = threadIdx.x % kLanes;
  Entries e;
  load_codes<kBits>(p.exp_avg, block, lane, is_there, aligned.moments, e.code_m);
  load_codes<kBits>(p.exp_avg_sq, block, lane, is_there, aligned.moments, e.code_v);
  decode<kBits>(p, block, is_there, e);
  update<T>(p, is_there ? block * kAdamBlock + lane * kRun : p.n, aligned, e);
  const Range range = range_of(e);
  uint32_t bits[kRun];
  random_bits(words, lane, bits);
  const float highest = range.is_good ? range.highest : 0.0f;
  const float lowest = highest == 0.0f ? 0.0f : adam_lowest(range.smallest, highest);
  float scale;
  const bool fits = encode<kBits>(adam_levels(lowest, highest, (1u << kBits) - 1u), bits, e, scale);
  if (!is_there) return;
  const bool is_good = range.is_good && fits;
  if (!is_good) {
    clear(e.code_m);
    clear(e.code_v);
  }
  store_codes<kBits>(p.exp_avg, block, lane, aligned.moments, e.code_m);
  store_codes<kBits>(p.exp_avg_sq, block, lane, aligned.moments, e.code_v);
  if (lane != 0) return;
  const float nan = bits_float(0x7fc00000u);
  p.exp_avg_scale[block] = is_good ? scale : nan;
  p.exp_avg_sq_scale[2 * block] = is_good ? lowest : nan;
  p.exp_avg_sq_scale[2 * block + 1] = is_good ? highest : nan;
}

template <int kBits, typename T>
__global__ void __launch_bounds__(kThreads, 6) step_codes(AdamStep p, int64_t blocks, Alignment aligned) {
  constexpr int kSide = kWarp / kLanes;  // blocks of codes beside each other in a warp
  alignas(16) __shared__ uint32_t words[kWarps][kDrawn][kPlaces];
  const int warp = threadIdx.x / kWarp, side = threadIdx.x % kWarp / kLanes;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kDrawn; first < blocks;
       first += static_cast<int64_t>(gridDim.x) * kWarps * kDrawn) {
    draw_words(p, first, words[warp]);
#pragma unroll 1
    for (int i = side; i < kDrawn; i += kSide)
      step_block<kBits, T>(p, first + i, first + i < blocks, aligned, words[warp][i]);
  }
}

template <typename T>
const char* step_as(const AdamStep& p, void* stream) {
  Alignment aligned{is_aligned(p.params, 16), is_aligned(p.grads, 16), is_aligned(p.exp_avg, 16),
                    is_aligned(p.out, 16)};
  aligned.moments = aligned.moments && is_aligned(p.exp_avg_sq, 16);
  if (p.bits == 32)
    return launch(step_floats<T>, blocks_for(blocks_of(p.n, kThreads * kEntries)), kThreads, 0, stream, p, aligned);
  const int64_t blocks = blocks_of(p.n, kAdamBlock);
  const auto kernel = p.bits == 8 ? step_codes<8, T> : step_codes<4, T>;
  return launch(kernel, blocks_for(blocks_of(blocks, kWarps * kDrawn)), kThreads, 0, stream, p, blocks, aligned);
}

}  // namespace

const char* adam_step(const AdamStep& p, void* stream) {
  return p.dtype == Element::kFloat ? step_as<float>(p, stream) : step_as<uint16_t>(p, stream);
}

}  // namespace grpo_mc::cuda
