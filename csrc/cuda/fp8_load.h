// Codes of an FP8 operand from global memory into tiles in shared memory whose rows have 128 entries of the depth,
// whichever way the operand lies.
#pragma once

#include "common/arguments.h"
#include "common/fp8.h"
#include "cuda/mma.h"

namespace grpo_mc::cuda {

// Where the 16 codes `chunk` of a row lie in a tile: rows of 128 bytes whose chunks change places, so that the sixteen
// threads that read 32 codes of four adjacent rows at once meet no bank twice, and the thirty-two that write 4 codes
// each, eight of them in every fourth row, no more than twice. The same for rows 16 further on.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * kFp8Block + ((chunk ^ (row & 3) << 1 ^ (row >> 2 & 3)) << 4);
}

// Four rows of four codes each to four columns.
__device__ __forceinline__ void transpose_codes(unsigned (&words)[4]) {
  const unsigned low = __byte_perm(words[0], words[1], 0x5140), high = __byte_perm(words[0], words[1], 0x7362);
  const unsigned low2 = __byte_perm(words[2], words[3], 0x5140), high2 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low, low2, 0x5410);
  words[1] = __byte_perm(low, low2, 0x7632);
  words[2] = __byte_perm(high, high2, 0x5410);
  words[3] = __byte_perm(high, high2, 0x7632);
}

// Up to four codes from `from`; the others are zeros.
__device__ __forceinline__ unsigned read_some(const uint8_t* from, int64_t count) {
  unsigned word = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < count) word |= static_cast<unsigned>(from[k]) << k * 8;
  return word;
}

// Entries adjacent along the depth, in rows of which each is a multiple of 16 bytes: asynchronous copies.
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_along_depth(unsigned char* tile, const uint8_t* codes, int64_t stride, int64_t first, int64_t last, int left) {
  constexpr int kChunks = kFp8Block / 16;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x, row = index / kChunks, chunk = index % kChunks;
    const int rest = left - chunk * 16, bytes = first + row >= last || rest < 0 ? 0 : rest < 16 ? rest : 16;
    copy_async(tile + chunk_offset(row, chunk), bytes == 0 ? codes : codes + (first + row) * stride + chunk * 16, bytes);
  }
}

// The same for rows of any length.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_along_depth(unsigned char* tile, const uint8_t* codes, int64_t stride, int64_t first, int64_t last, int left) {
  constexpr int kWords = kFp8Block / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < kRows * kWords; index += kThreads) {
    const int row = index / kWords, k = index % kWords * 4;
    const int64_t count = first + row < last ? left - k : 0;
    *reinterpret_cast<unsigned*>(tile + chunk_offset(row, k / 16) + k % 16) = read_some(codes + (first + row) * stride + k, count);
  }
}

// Entries adjacent along the rows: squares of 4 x 4, turned in registers.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_by_depth(unsigned char* tile, const uint8_t* codes, int64_t stride, int64_t first, int64_t last, int left) {
  constexpr int kSquaresDown = kRows / 4, kAdjacent = kSquaresDown < 8 ? kSquaresDown : 8, kSquares = kSquaresDown * (kFp8Block / 4);
  const bool aligned = stride % 4 == 0 && reinterpret_cast<uintptr_t>(codes + first) % 4 == 0;
#pragma unroll 1
  for (int index = threadIdx.x; index < kSquares; index += kThreads) {
    const int band = index / kAdjacent / (kFp8Block / 4);
    const int row = (band * kAdjacent + index % kAdjacent) * 4, k = index / kAdjacent % (kFp8Block / 4) * 4;
    const int64_t rows = last - (first + row);
    const uint8_t* from = codes + k * stride + first + row;
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j, from += stride) {
      const int64_t count = k + j < left ? rows : 0;
      words[j] = aligned && count >= 4 ? *reinterpret_cast<const unsigned*>(from) : read_some(from, count);
    }
    transpose_codes(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<unsigned*>(tile + chunk_offset(row + j, k / 16) + k % 16) = words[j];
  }
}

// One block of the depth, `left` places of it, of rows first to last - 1; missing rows and places become zeros. `codes`
// is row 0 at the block's first place. The caller ends the group of copies.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_rows(unsigned char* tile, const uint8_t* codes, const Fp8Operand& x, int64_t first, int64_t last, int left) {
  if (x.by_depth) load_by_depth<kRows, kThreads>(tile, codes, x.stride, first, last, left);
  else if (x.stride % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 16 == 0)
    copy_along_depth<kRows, kThreads>(tile, codes, x.stride, first, last, left);
  else load_along_depth<kRows, kThreads>(tile, codes, x.stride, first, last, left);
}

// From one block of the depth to the next.
__device__ __forceinline__ int64_t block_stride(const Fp8Operand& x) { return kFp8Block * (x.by_depth ? x.stride : 1); }

}  // namespace grpo_mc::cuda
