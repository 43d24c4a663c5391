// nvcc: sm_80 sm_90 sm_100
// Products of FP8 matrices on any tensor core: codes become fp16 numbers (exactly), whose products the tensor core sums
// in float32 over one block of the depth; then one fma with both scales, as on the CPU. Every output is summed in that
// order alone whatever the tile, so few rows and many give the same bits.
//
// Why not the FP8 instructions of mma.sync: sm_90 and sm_100 have none, the assembler makes conversions to fp16 and
// fp16 instructions of them, and once for each instruction instead of once for each operand. Where they exist (sm_89,
// sm_120) they keep fewer bits of a sum. An fp16 tensor core's float32 sums are cut off, not rounded: a block of 128 is
// within about 1e-6 of its largest term, relatively, and nothing grows with the depth but the rounding of the fma.
//
// A thread block walks the depth in steps of 128 through a ring of copies of a and b in shared memory, 128 bytes a row.
// Rows of 16-byte multiples come by asynchronous copies, others byte by byte. A thread takes 8 adjacent codes of a row
// at once and gives them to the tensor core four at a time: which of the depth's entries meet in one instruction
// differs from its natural order, but in the same way for a and b.
//
// Reads: a once for every tile of columns, b once for every tile of rows (with few rows: once), both mostly from the L2
// cache. Writes: the output once; reads it first when it accumulates.
#include <cstdio>

#include "common/fp8.h"
#include "cuda/fp8_load.h"
#include "cuda/fp8_pack.h"
#include "cuda/fp8_tiles.h"
#include "cuda/launchers.h"
#include "cuda/mma.h"

namespace grpo_mc::cuda {
namespace {

// Tiles of kRows x kColumns by warps of kWarpRows x kWarpColumns outputs each.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kStages_>
struct TileShape {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kWarp * (kRows / kWarpRows) * (kColumns / kWarpColumns);
  static constexpr int kStageBytes = (kRows + kColumns) * kFp8Block;
  static constexpr int kRowParts = kWarpRows / 16, kColumnParts = kWarpColumns / 8;
};

using FewRows = TileShape<16, 64, 16, 16, 5>;  // b once, from device memory: many small copies under way
using SomeRows = TileShape<64, 64, 32, 32, 4>;
using ManyRows = TileShape<128, 64, 32, 32, 4>;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr float kOfDecoded = 1.0f;  // a product over that of the two decoded numbers

// Two codes to two fp16 numbers of their value.
__device__ __forceinline__ unsigned decode_two(unsigned short codes) {
  unsigned numbers;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(codes));
  return numbers;
}

// Four codes: the first two, and the last two.
__device__ __forceinline__ void decode_four(unsigned codes, unsigned& low, unsigned& high) {
  low = decode_two(static_cast<unsigned short>(codes));
  high = decode_two(static_cast<unsigned short>(codes >> 16));
}
#else
constexpr float kOfDecoded = 0x1p16f;

// Two codes, in bytes 1 and 3 of `codes`, to two fp16 numbers of 2^-8 their value; a NaN to a NaN.
__device__ __forceinline__ unsigned decode_two(unsigned codes) {
  const unsigned magnitudes = (codes >> 1) & 0x3f803f80u;
  const unsigned nans = (magnitudes + 0x00800080u) & 0x40004000u;  // the exponent's missing bit where all seven bits are set
  return (codes & 0x80008000u) | magnitudes | nans;
}

__device__ __forceinline__ void decode_four(unsigned codes, unsigned& low, unsigned& high) {
  low = decode_two(__byte_perm(codes, 0, 0x1404));
  high = decode_two(__byte_perm(codes, 0, 0x3424));
}
#endif

// The 8 codes of a row that this thread takes of its 32 codes `piece`.
__device__ __forceinline__ uint2 read_codes(const unsigned char* rows, int row, int piece) {
  const int quarter = threadIdx.x % 4;
  return *reinterpret_cast<const uint2*>(rows + chunk_offset(row, piece * 2 + quarter / 2) + quarter % 2 * 8);
}

// parts = a times b transposed over one block of the depth, for one warp; a and b are its rows in the stage.
template <typename Tile>
__device__ __forceinline__ void multiply_block(const unsigned char* a, const unsigned char* b,
                                               float (&parts)[Tile::kRowParts][Tile::kColumnParts][4]) {
  const int group = threadIdx.x % kWarp / 4;
#pragma unroll
  for (int piece = 0; piece < kFp8Block / 32; ++piece) {
    uint2 upper[Tile::kRowParts], lower[Tile::kRowParts], codes[Tile::kColumnParts];
#pragma unroll
    for (int i = 0; i < Tile::kRowParts; ++i) {
      upper[i] = read_codes(a, i * 16 + group, piece);
      lower[i] = read_codes(a, i * 16 + group + 8, piece);
    }
#pragma unroll
    for (int j = 0; j < Tile::kColumnParts; ++j) codes[j] = read_codes(b, j * 8 + group, piece);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      unsigned columns[Tile::kColumnParts][2];
#pragma unroll
      for (int j = 0; j < Tile::kColumnParts; ++j) decode_four(word == 0 ? codes[j].x : codes[j].y, columns[j][0], columns[j][1]);
#pragma unroll
      for (int i = 0; i < Tile::kRowParts; ++i) {
        unsigned rows[4];
        decode_four(word == 0 ? upper[i].x : upper[i].y, rows[0], rows[2]);
        decode_four(word == 0 ? lower[i].x : lower[i].y, rows[1], rows[3]);
#pragma unroll
        for (int j = 0; j < Tile::kColumnParts; ++j) mma_16x8x16(parts[i][j], rows, columns[j]);
      }
    }
  }
}

// What one warp knows of its part of a tile: the first row and column of this thread's outputs, which are row + 16 i (+
// 8) and column + 8 j (+ 1).
struct WarpPart {
  int64_t row, last_row, column;
};

__device__ __forceinline__ float scale_at(const Fp8Operand& x, const float* scale, int64_t row, int64_t last) {
  return row < last ? __ldg(scale + (x.square ? row / kFp8Block : row) * x.scale_stride) : 0.0f;
}

// sums += parts * (scale of a * scale of b), one rounding each for the scales' product and the sum. The scales are
// those of the block.
template <typename Tile>
__device__ __forceinline__ void promote(const Fp8Gemm& p, const WarpPart& at, const float* a_scale, const float* b_scale,
                                        const float (&parts)[Tile::kRowParts][Tile::kColumnParts][4],
                                        float (&sums)[Tile::kRowParts][Tile::kColumnParts][4]) {
  float scales[Tile::kColumnParts][2];
#pragma unroll
  for (int j = 0; j < Tile::kColumnParts; ++j)
    for (int right = 0; right < 2; ++right) scales[j][right] = scale_at(p.b, b_scale, at.column + j * 8 + right, p.columns);
#pragma unroll
  for (int i = 0; i < Tile::kRowParts; ++i)
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const float scale = scale_at(p.a, a_scale, at.row + i * 16 + below * 8, at.last_row);
#pragma unroll
      for (int j = 0; j < Tile::kColumnParts; ++j)
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          float& sum = sums[i][j][below * 2 + right];
          sum = fmaf(parts[i][j][below * 2 + right] * kOfDecoded, scale * scales[j][right], sum);
        }
    }
}

template <typename Tile>
__device__ void multiply_tile(const Fp8Products& g, const TileRows& rows, int64_t first_column) {
  const Fp8Gemm& p = g.product;
  const Part part = part_of(g, rows.expert);
  const int64_t blocks = fp8_blocks(part.depth);
  const auto load_block = [&](int64_t block) {
    if (block < blocks) {
      unsigned char* stage = dynamic_shared() + block % Tile::kStages * Tile::kStageBytes;
      const int64_t rest = part.depth - block * kFp8Block;
      const int left = static_cast<int>(rest < kFp8Block ? rest : kFp8Block);
      load_rows<Tile::kRows, Tile::kThreads>(stage, part.a + block * block_stride(p.a), p.a, rows.first, rows.last, left);
      load_rows<Tile::kColumns, Tile::kThreads>(stage + Tile::kRows * kFp8Block, part.b + block * block_stride(p.b), p.b, first_column, p.columns,
                                                left);
    }
    commit_copies();  // an empty group counts too, so that the number to wait for stays the same
  };
  constexpr int kWarpsAcross = Tile::kColumns / Tile::kWarpColumns;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_row = warp / kWarpsAcross * Tile::kWarpRows, warp_column = warp % kWarpsAcross * Tile::kWarpColumns;
  const WarpPart at{rows.first + warp_row + lane / 4, rows.last, first_column + warp_column + lane % 4 * 2};
  for (int64_t block = 0; block < Tile::kStages - 1; ++block) load_block(block);
  float sums[Tile::kRowParts][Tile::kColumnParts][4] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    wait_for_copies<Tile::kStages - 2>();
    __syncthreads();  // the block is there for all; the one before it has been read by all, and its stage is free
    load_block(block + Tile::kStages - 1);
    const unsigned char* stage = dynamic_shared() + block % Tile::kStages * Tile::kStageBytes;
    float parts[Tile::kRowParts][Tile::kColumnParts][4] = {};
    multiply_block<Tile>(stage + warp_row * kFp8Block, stage + (Tile::kRows + warp_column) * kFp8Block, parts);
    promote<Tile>(p, at, part.a_scale + block * p.a.scale_block_stride, part.b_scale + block * p.b.scale_block_stride, parts, sums);
  }
  const bool pairs = writes_pairs(p, part.out), writes = blocks > 0 || !p.accumulate;  // -0 + 0 is not -0
  const auto for_pairs = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < Tile::kRowParts * 2; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kColumnParts; ++j) {
        const int64_t row = at.row + i * 8, column = at.column + j * 8;
        float* pair = &sums[i / 2][j][i % 2 * 2];
        if (row < rows.last && column < p.columns && writes) use(row, column, pair[0], pair[1]);
      }
  };
  if (p.accumulate) for_pairs([&](int64_t r, int64_t c, float& x, float& y) { add_old_pair(p, part.out, r, c, x, y, pairs); });
  for_pairs([&](int64_t r, int64_t c, float x, float y) { write_pair(p, part.out, r, c, x, y, pairs); });
  wait_for_copies<0>();
  __syncthreads();  // the stages are free for the next tile
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) multiply_tiles(Fp8Products g, int64_t slots) {
  const int64_t across = (g.product.columns + Tile::kColumns - 1) / Tile::kColumns;
  for (int64_t index = blockIdx.x; index < slots * across; index += gridDim.x) {
    const TilePlace place = place_of(index, slots, across);
    const TileRows rows = find_rows(g, place.slot, Tile::kRows);
    if (rows.first < rows.last) multiply_tile<Tile>(g, rows, place.column * Tile::kColumns);
  }
}

template <typename Tile>
const char* run(const Fp8Products& g, void* stream) {
  const int64_t slots = row_slots(g, Tile::kRows), across = (g.product.columns + Tile::kColumns - 1) / Tile::kColumns;
  return launch(multiply_tiles<Tile>, blocks_for(slots * across), Tile::kThreads, Tile::kStages * Tile::kStageBytes, stream, g, slots);
}

constexpr int kRestThreads = 256;

// Offsets that no expert can have end the program, as an index out of range ends torch's kernels: the host never sees
// them, and the kernel behind this one would read and write outside its tensors. Rows of no expert become zeros unless
// the call accumulates.
__global__ void __launch_bounds__(kRestThreads) check_offsets_and_clear_the_rest(Fp8Products g) {
  const Fp8Gemm& p = g.product;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kRestThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kRestThreads, end = g.along_depth ? p.depth : p.rows;
  for (int64_t e = thread; e < g.experts; e += threads)
    if (g.offsets[e] < 0 || g.offsets[e] > g.offsets[e + 1] || g.offsets[e + 1] > end) {
      printf("FP8 product of experts: offsets[%lld] is %lld and offsets[%lld] is %lld; they must not fall, and there are rows 0 to %lld\n",
             static_cast<long long>(e), static_cast<long long>(g.offsets[e]), static_cast<long long>(e + 1),
             static_cast<long long>(g.offsets[e + 1]), static_cast<long long>(end));
      __trap();
    }
  if (p.accumulate || g.along_depth) return;
  const int64_t before = g.offsets[0], after = g.offsets[g.experts];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (row >= before && row < after) continue;
    for (int64_t column = threadIdx.x; column < p.columns; column += kRestThreads) {
      if (p.dtype == Element::kFloat) static_cast<float*>(p.out)[row * p.out_stride + column] = 0.0f;
      else static_cast<uint16_t*>(p.out)[row * p.out_stride + column] = 0;
    }
  }
}

}  // namespace

int64_t fp8_workspace(const Fp8Products& g) { return fp8_runs_on_hopper(g) ? bytes_of_a(g) + bytes_of_b(g) : 0; }

const char* fp8_products(const Fp8Products& g, void* stream) {
  if (g.product.rows == 0 || g.product.columns == 0) return nullptr;
  if (g.offsets != nullptr) {
    constexpr int64_t kMostBlocks = 1024;
    const int64_t rows = g.along_depth ? 1 : g.product.rows;
    const char* problem = launch(check_offsets_and_clear_the_rest, blocks_for(rows < kMostBlocks ? rows : kMostBlocks), kRestThreads, 0, stream, g);
    if (problem != nullptr) return problem;
  }
  if (g.experts == 0) return nullptr;
  if (fp8_runs_on_hopper(g)) return fp8_on_hopper(g, stream);
  const int64_t rows = g.along_depth ? g.product.rows : g.product.rows / g.experts;  // of an expert, if they are alike
  if (rows <= FewRows::kRows) return run<FewRows>(g, stream);
  if (rows <= SomeRows::kRows) return run<SomeRows>(g, stream);
  return run<ManyRows>(g, stream);
}

}  // namespace grpo_mc::cuda
