// nvcc: sm_80 sm_90 sm_100
// paged_attention: a block takes 512 positions of one key-value head and up to eight of its query heads; a second kernel
// merges the parts of a row.
//
// Bound by the bytes of the cache, each of which is loaded once for every eight query heads that share it; parts of fixed
// size keep all multiprocessors busy when rows are few and long. A row's result depends on its own tokens alone: parts
// begin at multiples of 512, and every sum is added in an order that depends on D and the dtype.
#include "cuda/launchers.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 128, kPart = static_cast<int>(kPagedPart), kMostEntries = 8;  // of a pack
constexpr int kLanesOfKey = 8, kKeysAtOnce = kThreads / kLanesOfKey;
constexpr int kMerge = 2;  // in front of a part's weighted values: the maximum of its scores, and their sum of exp
constexpr int64_t kOutside = -1;

// What a block keeps in shared memory, as many heads and entries as the call has.
struct Shared {
  __device__ __forceinline__ explicit Shared(int heads) {
    keys = reinterpret_cast<int64_t*>(dynamic_shared());
    values = keys + kPart;
    scores = reinterpret_cast<float*>(values + kPart);
    sums = scores + heads * kPart;
    query = sums + kThreads * kMostEntries;
  }
  static size_t bytes(int heads, int64_t head_dim) {
    return sizeof(int64_t) * 2 * kPart + sizeof(float) * (heads * kPart + kThreads * kMostEntries + heads * static_cast<size_t>(head_dim));
  }
  int64_t *keys, *values;  // [kPart] where the position's key and value begin in the cache, or kOutside
  float* scores;           // [heads, kPart]
  float* sums;             // [kThreads, entries of a pack]
  float* query;            // [heads, D], scaled
};

// One block's work: positions begin to begin + count of a row, for query heads `head` on.
struct Work {
  __device__ __forceinline__ Work(const PagedCall& p, int64_t item, int64_t tiles, int heads_of_tile) {
    const int64_t group = p.heads / p.kv_heads;
    part = item % p.num_parts;
    const int64_t tile = item / p.num_parts % tiles;
    kv_head = item / p.num_parts / tiles % p.kv_heads;
    row = item / p.num_parts / tiles / p.kv_heads;
    head = kv_head * group + tile * heads_of_tile;
    const int64_t left = group - tile * heads_of_tile;
    heads = static_cast<int>(left < heads_of_tile ? left : heads_of_tile);
    begin = part * kPart;
    const int64_t length = p.lengths[row], rest = length <= p.table_width * p.block_size ? length - begin : 0;
    count = static_cast<int>(rest < 0 ? 0 : rest < kPart ? rest : kPart);
  }
  int64_t row, kv_head, head, part, begin;
  int heads, count;
};

// Entries of a cached row from d on: a pack where the address allows it, else one by one; zeros past D.
template <typename T>
__device__ __forceinline__ void load_entries(const T* row, int64_t d, int64_t head_dim, bool is_aligned, float* x) {
  if (is_aligned && d + kPack<T> <= head_dim) {
    load_pack(row + d, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) x[i] = d + i < head_dim ? widen(row[d + i]) : 0.0f;
}

// Where the positions lie: a block that the cache does not have counts as one of NaN.
__device__ __forceinline__ void find_positions(const PagedCall& p, const Work& w, const Shared& s) {
  for (int i = threadIdx.x; i < w.count; i += kThreads) {
    const int64_t position = w.begin + i, block = p.tables[w.row * p.table_width + position / p.block_size], slot = position % p.block_size;
    const bool is_good = block >= 0 && block < p.blocks;
    s.keys[i] = is_good ? block * p.key_block_stride + slot * p.key_slot_stride + w.kv_head * p.key_head_stride : kOutside;
    s.values[i] = is_good ? block * p.value_block_stride + slot * p.value_slot_stride + w.kv_head * p.value_head_stride : kOutside;
  }
}

__device__ __forceinline__ void load_query(const PagedCall& p, const Work& w, const Shared& s) {
  const float scale = static_cast<float>(p.scale);
  const int64_t first = (w.row * p.heads + w.head) * p.head_dim;
  for (int64_t i = threadIdx.x; i < w.heads * p.head_dim; i += kThreads) {
    const float q = p.query_dtype == Element::kBFloat16 ? widen(static_cast<const uint16_t*>(p.query)[first + i])
                                                        : static_cast<const float*>(p.query)[first + i];
    s.query[i] = q * scale;
  }
}

// scores[h, i] = query[h] . key[i]: eight lanes a key.
template <typename T, int kHeads>
__device__ __forceinline__ void score(const PagedCall& p, const Work& w, const Shared& s) {
  const int lane = threadIdx.x % kLanesOfKey;
#pragma unroll 2
  for (int first = 0; first < w.count; first += kKeysAtOnce) {
    const int i = first + threadIdx.x / kLanesOfKey;
    const int64_t offset = i < w.count ? s.keys[i] : kOutside;
    float dot[kHeads] = {};
    if (offset != kOutside) {
      const T* key = static_cast<const T*>(p.keys) + offset;
      for (int64_t d = int64_t{lane} * kPack<T>; d < p.head_dim; d += kLanesOfKey * kPack<T>) {
        float k[kPack<T>];
        load_entries(key, d, p.head_dim, p.is_aligned, k);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float* query = s.query + (h < w.heads ? h : 0) * p.head_dim + d;
#pragma unroll
          for (int e = 0; e < kPack<T>; ++e) dot[h] = fmaf(d + e < p.head_dim ? query[e] : 0.0f, k[e], dot[h]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      for (int step = kLanesOfKey / 2; step > 0; step /= 2) dot[h] += __shfl_xor_sync(kAllLanes, dot[h], step);
      if (lane == 0 && i < w.count && h < w.heads) s.scores[h * kPart + i] = offset == kOutside ? nanf("") : dot[h];
    }
  }
}

// Turns scores into exp(score - max), a warp a head, and writes the part's maximum and sum.
__device__ __forceinline__ void softmax(const Work& w, const Shared& s, float* parts, int64_t part_stride) {
  const int lane = threadIdx.x % kWarp;
  for (int h = threadIdx.x / kWarp; h < w.heads; h += kThreads / kWarp) {
    float* scores = s.scores + h * kPart;
    float max = -HUGE_VALF, sum = 0.0f;
    for (int i = lane; i < w.count; i += kWarp) max = scores[i] > max ? scores[i] : max;  // a NaN is dropped here
    max = warp_max(max);
    for (int i = lane; i < w.count; i += kWarp) {
      scores[i] = expf(scores[i] - max);
      sum += scores[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) parts[h * part_stride] = max;
    if (lane == 0) parts[h * part_stride + 1] = sum;
  }
}

// parts[h, kMerge + d] = sum over the positions of weight[h] value[d]: threads share the entries of a value, and groups of
// them take the positions in turn.
template <typename T, int kHeads>
__device__ __forceinline__ void add_values(const PagedCall& p, const Work& w, const Shared& s, float* parts, int64_t part_stride) {
  const int packs = static_cast<int>((p.head_dim + kPack<T> - 1) / kPack<T>);
  for (int first = 0; first < packs; first += kThreads) {
    const int here = packs - first < kThreads ? packs - first : kThreads, groups = kThreads / here;
    const int pack = threadIdx.x % here, group = threadIdx.x / here;
    const int64_t d = int64_t{first + pack} * kPack<T>;
    float sums[kHeads][kPack<T>] = {};
#pragma unroll 4
    for (int i = group < groups ? group : w.count; i < w.count; i += groups) {  // threads that are left over take none
      const int64_t offset = s.values[i];
      float value[kPack<T>] = {};
      if (offset != kOutside) load_entries(static_cast<const T*>(p.values) + offset, d, p.head_dim, p.is_aligned, value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = s.scores[(h < w.heads ? h : 0) * kPart + i];
#pragma unroll
        for (int e = 0; e < kPack<T>; ++e) sums[h][e] = fmaf(weight, value[e], sums[h][e]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kPack<T>; ++e) s.sums[threadIdx.x * kPack<T> + e] = sums[h][e];
      __syncthreads();
      for (int e = threadIdx.x; e < here * kPack<T>; e += kThreads) {
        float total = 0.0f;
        for (int g = 0; g < groups; ++g) total += s.sums[g * here * kPack<T> + e];
        const int64_t entry = int64_t{first} * kPack<T> + e;
        if (h < w.heads && entry < p.head_dim) parts[h * part_stride + kMerge + entry] = total;
      }
    }
  }
}

template <typename T, int kHeads>
__global__ void __launch_bounds__(kThreads, 1) parts_of_rows(PagedCall p, int64_t tiles) {
  const Shared s(kHeads);
  const int64_t items = p.rows * p.kv_heads * tiles * p.num_parts, width = p.head_dim + kMerge;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Work w(p, item, tiles, kHeads);
    if (w.count == 0) continue;
    float* parts = p.parts + ((w.row * p.heads + w.head) * p.num_parts + w.part) * width;
    find_positions(p, w, s);
    load_query(p, w, s);
    __syncthreads();
    score<T, kHeads>(p, w, s);
    __syncthreads();
    softmax(w, s, parts, p.num_parts * width);
    __syncthreads();
    add_values<T, kHeads>(p, w, s, parts, p.num_parts * width);
    __syncthreads();
  }
}

// One block a query head of a row.
__global__ void __launch_bounds__(kThreads) merge_parts(PagedCall p) {
  const int64_t width = p.head_dim + kMerge;
  for (int64_t item = blockIdx.x; item < p.rows * p.heads; item += gridDim.x) {
    const int64_t length = p.lengths[item / p.heads];
    const bool is_good = length >= 0 && length <= p.table_width * p.block_size;
    const int64_t used = is_good ? (length + kPart - 1) / kPart : 0;
    const float* parts = p.parts + item * p.num_parts * width;
    float max = -HUGE_VALF, sum = 0.0f;
    for (int64_t k = 0; k < used; ++k) max = parts[k * width] > max ? parts[k * width] : max;
    for (int64_t k = 0; k < used; ++k) sum += expf(parts[k * width] - max) * parts[k * width + 1];
    for (int64_t d = threadIdx.x; d < p.head_dim; d += kThreads) {
      float total = 0.0f;
      for (int64_t k = 0; k < used; ++k) total = fmaf(expf(parts[k * width] - max), parts[k * width + kMerge + d], total);
      const float result = !is_good ? nanf("") : used == 0 ? 0.0f : total / sum;
      if (p.query_dtype == Element::kBFloat16) store(static_cast<uint16_t*>(p.out) + item * p.head_dim + d, result);
      else store(static_cast<float*>(p.out) + item * p.head_dim + d, result);
    }
  }
}

template <typename T, int kHeads>
const char* parts(const PagedCall& p, void* stream) {
  const int64_t tiles = (p.heads / p.kv_heads + kHeads - 1) / kHeads;
  const unsigned blocks = blocks_for(p.rows * p.kv_heads * tiles * p.num_parts);
  return launch(parts_of_rows<T, kHeads>, blocks, kThreads, Shared::bytes(kHeads, p.head_dim), stream, p, tiles);
}

template <typename T>
const char* parts_by_heads(const PagedCall& p, void* stream) {
  const int64_t group = p.heads / p.kv_heads;
  if (group > 4) return parts<T, 8>(p, stream);
  if (group > 2) return parts<T, 4>(p, stream);
  return group > 1 ? parts<T, 2>(p, stream) : parts<T, 1>(p, stream);
}

}  // namespace

const char* paged_attention(const PagedCall& p, void* stream) {
  const char* problem = nullptr;
  if (p.num_parts > 0) problem = p.cache_dtype == Element::kBFloat16 ? parts_by_heads<uint16_t>(p, stream) : parts_by_heads<float>(p, stream);
  return problem != nullptr ? problem : launch(merge_parts, blocks_for(p.rows * p.heads), kThreads, 0, stream, p);
}

}  // namespace grpo_mc::cuda
