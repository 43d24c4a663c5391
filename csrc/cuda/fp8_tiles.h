// What the kernels of FP8 products share: which rows a tile has, in which order tiles are taken, what one expert's
// product reads, how results are written.
#pragma once

#include "common/arguments.h"
#include "common/fp8.h"
#include "cuda/launch.h"

namespace grpo_mc::cuda {

// Rows first to last - 1 of a and out, of one expert; empty for a slot that no expert needs.
struct TileRows {
  int64_t expert, first, last;
};

// An upper bound of the tiles of `height` rows that all experts need, known without their offsets: whole tiles, and one
// with the rest for each expert that has rows.
inline int64_t row_slots(const Fp8Products& g, int64_t height) {
  const int64_t rows = g.product.rows, tiles = (rows + height - 1) / height;
  if (g.along_depth) return tiles * g.experts;
  return g.offsets == nullptr ? tiles : rows / height + (rows < g.experts ? rows : g.experts);
}

// The first expert that needs more than `slot` pieces when every expert up to it has its own, and the piece's number
// among the expert's; expert -1 if there is none. pieces(expert) says how many it needs. Every lane of the warp calls
// it and gets the same. Experts are looked at 32 at a time.
struct ExpertPiece {
  int64_t expert, piece;
};

template <typename Pieces>
__device__ ExpertPiece find_expert(int64_t experts, int64_t slot, const Pieces& pieces) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t base = 0; base < experts; base += kWarp) {
    const int64_t own = base + lane < experts ? pieces(base + lane) : 0;
    int64_t upto = own;  // of this expert and those before it in the 32
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += before;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, upto > slot);
    if (beyond != 0) {
      const int source = __ffs(static_cast<int>(beyond)) - 1;
      return {base + source, slot - __shfl_sync(kAllLanes, upto - own, source)};
    }
    slot -= __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  return {-1, 0};
}

// The rows of a slot; every lane of the warp calls it and gets the same.
__device__ inline TileRows find_rows(const Fp8Products& g, int64_t slot, int64_t height) {
  int64_t expert = 0, piece = slot, begin = 0, end = g.product.rows;
  if (g.along_depth) {
    const int64_t tiles = (end + height - 1) / height;
    expert = slot / tiles;
    piece = slot % tiles;
  } else if (g.offsets != nullptr) {
    const auto tiles_of = [&](int64_t e) { return (g.offsets[e + 1] - g.offsets[e] + height - 1) / height; };
    const ExpertPiece found = find_expert(g.experts, slot, tiles_of);
    if (found.expert < 0) return {0, 0, 0};
    expert = found.expert;
    piece = found.piece;
    begin = g.offsets[expert];
    end = g.offsets[expert + 1];
  }
  const int64_t first = begin + piece * height;
  return {expert, first, first + height < end ? first + height : end};
}

// What the product of one expert reads and writes; sizes and strides are those of all. Rows count from the first of
// all.
struct Part {
  const uint8_t *a, *b;
  const float *a_scale, *b_scale;
  void* out;
  int64_t depth;
  int64_t first_tile;  // along_depth: of its scales, and of its codes in packed operands
};

__device__ inline Part part_of(const Fp8Products& g, int64_t expert) {
  const Fp8Gemm& p = g.product;
  Part part{p.a.codes, p.b.codes, p.a.scale, p.b.scale, p.out, p.depth, 0};
  if (g.along_depth) {
    const int64_t begin = g.offsets[expert];
    part.first_tile = fp8_first_tile(begin, g.first_expert + expert);
    part.a += begin * (p.a.by_depth ? p.a.stride : 1);
    part.b += begin * (p.b.by_depth ? p.b.stride : 1);
    part.a_scale += part.first_tile * p.a.scale_block_stride;
    part.b_scale += part.first_tile * p.b.scale_block_stride;
    part.out = static_cast<char*>(p.out) + expert * g.out_stride_bytes;
    part.depth = g.offsets[expert + 1] - begin;
  } else {
    part.b += expert * g.b_stride;
    part.b_scale += expert * g.b_scale_stride;
  }
  return part;
}

// Tile `index` of slots x columns: bands of 16 slots, down the slots first, so that what runs at one time shares tiles
// of a and of b in the L2 cache.
struct TilePlace {
  int64_t slot, column;
};

__device__ inline TilePlace place_of(int64_t index, int64_t slots, int64_t columns) {
  constexpr int64_t kBand = 16;
  const int64_t band = index / (kBand * columns), first = band * kBand;
  const int64_t height = slots - first < kBand ? slots - first : kBand, within = index - first * columns;
  return {first + within % height, within / height};
}

// Adds what `to` holds to the sums of two adjacent columns, of which the second may lie outside; `pairs`: both may be read
// at once. Apart from writing, so that a thread has all its reads under way before it writes.
__device__ inline void add_old_pair(const Fp8Gemm& p, const void* to, int64_t row, int64_t column, float& x, float& y, bool pairs) {
  const bool both = column + 1 < p.columns;
  const int64_t at = row * p.out_stride + column;
  if (p.dtype == Element::kFloat) {
    const float* out = static_cast<const float*>(to) + at;
    float2 old = make_float2(0.0f, 0.0f);
    if (pairs && both) old = *reinterpret_cast<const float2*>(out);
    else old = make_float2(out[0], both ? out[1] : 0.0f);
    x = old.x + x;
    y = old.y + y;
    return;
  }
  const uint16_t* out = static_cast<const uint16_t*>(to) + at;
  const uint32_t old = pairs && both ? *reinterpret_cast<const uint32_t*>(out) : out[0] | static_cast<uint32_t>(both ? out[1] : 0) << 16;
  x = bf16_to_float(static_cast<uint16_t>(old)) + x;
  y = bf16_to_float(static_cast<uint16_t>(old >> 16)) + y;
}

// Writes two adjacent columns, of which the second may lie outside; `pairs`: both may be written at once.
__device__ inline void write_pair(const Fp8Gemm& p, void* to, int64_t row, int64_t column, float x, float y, bool pairs) {
  const bool both = column + 1 < p.columns;
  const int64_t at = row * p.out_stride + column;
  if (p.dtype == Element::kFloat) {
    float* out = static_cast<float*>(to) + at;
    if (pairs && both) {
      *reinterpret_cast<float2*>(out) = make_float2(x, y);
      return;
    }
    out[0] = x;
    if (both) out[1] = y;
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(to) + at;
  if (pairs && both) {
    *reinterpret_cast<uint32_t*>(out) = static_cast<uint32_t>(float_to_bf16(y)) << 16 | float_to_bf16(x);
    return;
  }
  out[0] = float_to_bf16(x);
  if (both) out[1] = float_to_bf16(y);
}

// Whether two adjacent columns, the first of them even, may be written at once in every row.
__device__ inline bool writes_pairs(const Fp8Gemm& p, const void* to) {
  const uintptr_t bytes = p.dtype == Element::kFloat ? 8 : 4;
  return p.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(to) % bytes == 0;
}

}  // namespace grpo_mc::cuda
