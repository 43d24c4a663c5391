// Decode attention of the query heads that share one key-value head, over a paged cache, with a running softmax.
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace grpo_mc::GRPO_MC_ISA {
namespace {

template <typename T>
GRPO_MC_INLINE const T* slot(const void* cache, const PagedHead& h, int64_t token, int64_t block_stride, int64_t slot_stride) {
  const int64_t block = h.blocks[token / h.block_size];
  return static_cast<const T*>(cache) + block * block_stride + (token % h.block_size) * slot_stride;
}

template <typename T>
GRPO_MC_INLINE F8 load_part(const T* p, int64_t left) {
  return left >= kLanes ? load8(p) : load_tail(p, left, 0.0f);
}

// scores[g, i] = query[g] . key[begin + i], four tokens at a time so that one load of the query serves four keys.
template <typename T>
void score_chunk(const PagedHead& h, int64_t begin, int64_t count, float* scores) {
  for (int64_t i = 0; i < count; i += 4) {
    const T* key[4];
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t token = begin + (i + k < count ? i + k : i);
      key[k] = slot<T>(h.keys, h, token, h.key_block_stride, h.key_slot_stride);
    }
    for (int64_t g = 0; g < h.group; ++g) {
      const float* query = h.query + g * h.head_dim;
      F8 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
      for (int64_t d = 0; d < h.head_dim; d += kLanes) {
        const int64_t left = h.head_dim - d;
        const F8 q = load_part(query + d, left);
        for (int k = 0; k < 4; ++k) acc[k] = fma8(q, load_part(key[k] + d, left), acc[k]);
      }
      for (int64_t k = 0; k < 4 && i + k < count; ++k) scores[g * kPagedChunk + i + k] = sum8(acc[k]);
    }
  }
}

// Turns a chunk's scores of one head into exp(score - max) and rescales what was summed before.
void softmax_chunk(float* scores, int64_t count, float* max, float* sum, float* out, int64_t head_dim) {
  float best = *max;
  for (int64_t i = 0; i < count; ++i) best = scores[i] > best ? scores[i] : best;
  if (best > *max) {
    const float factor = exp8(splat(*max - best))[0];  // 0 on the first chunk, where max is -inf
    *sum *= factor;
    for (int64_t d = 0; d < head_dim; ++d) out[d] *= factor;
    *max = best;
  }
  F8 total = splat(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i < kLanes ? count - i : kLanes;
    const F8 e = exp8(load_tail(scores + i, left, -kInf) - splat(best));
    total += e;
    store_tail(scores + i, left, e);
  }
  *sum += sum8(total);
}

// out[g] += sum_i weights[g, i] * value[begin + i], four tokens per visit of the accumulator.
template <typename T>
void add_values(const PagedHead& h, int64_t begin, int64_t count, const float* weights) {
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t n = count - i < 4 ? count - i : 4;
    const T* value[4];
    for (int64_t k = 0; k < 4; ++k) {
      value[k] = slot<T>(h.values, h, begin + i + (k < n ? k : 0), h.value_block_stride, h.value_slot_stride);
    }
    for (int64_t g = 0; g < h.group; ++g) {
      const float* w = weights + g * kPagedChunk + i;
      F8 weight[4];
      for (int64_t k = 0; k < 4; ++k) weight[k] = splat(k < n ? w[k] : 0.0f);
      float* out = h.out + g * h.head_dim;
      for (int64_t d = 0; d < h.head_dim; d += kLanes) {
        const int64_t left = h.head_dim - d;
        F8 acc = load_part(out + d, left);
        for (int64_t k = 0; k < n; ++k) acc = fma8(weight[k], load_part(value[k] + d, left), acc);
        if (left >= kLanes) store8(out + d, acc);
        else store_tail(out + d, left, acc);
      }
    }
  }
}

template <typename T>
void attend(const PagedHead& h) {
  float* scores = h.scratch;
  float* max = scores + h.group * kPagedChunk;
  float* sum = max + h.group;
  for (int64_t g = 0; g < h.group; ++g) {
    max[g] = -kInf;
    sum[g] = 0.0f;
  }
  memset(h.out, 0, static_cast<size_t>(h.group * h.head_dim) * sizeof(float));
  for (int64_t begin = 0; begin < h.length; begin += kPagedChunk) {
    const int64_t count = h.length - begin < kPagedChunk ? h.length - begin : kPagedChunk;
    score_chunk<T>(h, begin, count, scores);
    for (int64_t g = 0; g < h.group; ++g) {
      softmax_chunk(scores + g * kPagedChunk, count, max + g, sum + g, h.out + g * h.head_dim, h.head_dim);
    }
    add_values<T>(h, begin, count, scores);
  }
  for (int64_t g = 0; g < h.group && h.length > 0; ++g) {
    for (int64_t d = 0; d < h.head_dim; ++d) h.out[g * h.head_dim + d] /= sum[g];
  }
}

}  // namespace

void paged_attention_head(const PagedHead& head, Element cache) {
  if (cache == Element::kBFloat16) attend<uint16_t>(head);
  else attend<float>(head);
}

}  // namespace grpo_mc::GRPO_MC_ISA
