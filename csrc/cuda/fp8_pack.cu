// nvcc: sm_90
// Copies of FP8 operands whose entries are adjacent along the depth, for the wide boxes of fp8_hopper.cu. Bound by
// memory: every code is read once and written once, by way of a tile of 128 x 128 in shared memory.
#include "cuda/fp8_pack.h"

#include "cuda/fp8_load.h"
#include "cuda/fp8_tiles.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256, kTileRows = 128;

struct Packing {
  Fp8Operand from;
  int64_t rows, planes, plane_stride, blocks;
  uint8_t* to;  // [planes, rows, blocks * 128]
};

// A block of the copy: its place of the depth and the number of places that it holds.
struct Source {
  int64_t place;
  int64_t left;
};

// The expert whose tiles of scales hold `tile`, or -1; every lane of the warp calls it and gets the same.
__device__ __forceinline__ int64_t expert_of_tile(const Fp8Products& g, int64_t tile) {
  for (int64_t base = 0; base < g.experts; base += kWarp) {
    const int64_t e = base + threadIdx.x % kWarp;
    bool inside = false;
    if (e < g.experts) {
      const int64_t begin = g.offsets[e], first = fp8_first_tile(begin, g.first_expert + e);
      inside = tile >= first && tile < first + fp8_blocks(g.offsets[e + 1] - begin);
    }
    const unsigned found = __ballot_sync(kAllLanes, inside);
    if (found != 0) return base + __ffs(static_cast<int>(found)) - 1;
  }
  return -1;
}

__device__ __forceinline__ Source source_of(const Fp8Products& g, int64_t block) {
  if (!g.along_depth) return {block * kFp8Block, g.product.depth - block * kFp8Block};
  const int64_t expert = expert_of_tile(g, block);
  if (expert < 0) return {0, 0};  // nobody reads it
  const int64_t begin = g.offsets[expert], within = (block - fp8_first_tile(begin, g.first_expert + expert)) * kFp8Block;
  return {begin + within, g.offsets[expert + 1] - begin - within};
}

__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ Fp8Products g, const __grid_constant__ Packing k) {
  const int64_t bands = (k.rows + kTileRows - 1) / kTileRows, width = k.blocks * kFp8Block;
  for (int64_t index = blockIdx.x; index < bands * k.blocks * k.planes; index += gridDim.x) {
    const int64_t first = index % bands * kTileRows, block = index / bands % k.blocks, plane = index / bands / k.blocks;
    const Source source = source_of(g, block);
    if (source.left <= 0) continue;
    const uint8_t* codes = k.from.codes + plane * k.plane_stride + source.place * (k.from.by_depth ? k.from.stride : 1);
    load_rows<kTileRows, kThreads>(dynamic_shared(), codes, k.from, first, k.rows,
                                   static_cast<int>(source.left < kFp8Block ? source.left : kFp8Block));
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kTileRows * (kFp8Block / 16); i += kThreads) {
      const int row = i / (kFp8Block / 16), chunk = i % (kFp8Block / 16);
      if (first + row >= k.rows) continue;
      uint8_t* to = k.to + (plane * k.rows + first + row) * width + block * kFp8Block + chunk * 16;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(dynamic_shared() + chunk_offset(row, chunk));
    }
    __syncthreads();
  }
}

const char* run(const Fp8Products& g, const Fp8Operand& from, int64_t rows, int64_t planes, int64_t plane_stride, uint8_t* to, void* stream) {
  const Packing packing{from, rows, planes, plane_stride, packed_width(g) / kFp8Block, to};
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows * packing.blocks * planes;
  return launch(pack, blocks_for(tiles), kThreads, kTileRows * kFp8Block, stream, g, packing);
}

}  // namespace

const char* fp8_pack(const Fp8Products& g, void* stream) {
  const Fp8Gemm& p = g.product;
  const char* problem = nullptr;
  if (bytes_of_a(g) > 0) problem = run(g, p.a, p.rows, 1, 0, g.workspace, stream);
  if (problem == nullptr && bytes_of_b(g) > 0) problem = run(g, p.b, p.columns, planes_of_b(g), g.b_stride, g.workspace + bytes_of_a(g), stream);
  return problem;
}

}  // namespace grpo_mc::cuda
