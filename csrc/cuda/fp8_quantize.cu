// nvcc: sm_80 sm_90 sm_100
// Quantising to FP8 with a scale per tile, and back; see common/fp8.h for the rules.
//
// A tile stays in registers between its largest magnitude and its codes, so x is read once and a code written once: a
// bfloat16 entry costs 2 + 1 + 4 / 128 bytes in rows. A thread has 16 bytes of x, whatever the tile:
//
//     1 x 128      a group of 16 (bfloat16) or 32 lanes has a tile, and needs no barrier
//     128 x 1      a block has 128 rows of a strip as wide as a cache line (128 bytes), and a scale for each column
//     128 x 128    a block has the tile
//
// Magnitudes are compared as integers, which orders them as the floats do and puts infinity and NaN above all numbers.
#include "common/fp8.h"
#include "cuda/fp8_codes.h"
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/vectors.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostClearing = 64;  // blocks along y that look after rows of no expert

struct Alignment {
  bool x, codes;  // words can be read and written at once
};

// The codes of one word; entries from `left` on are not written. `inverse[i]` belongs to entry i.
template <int kCount>
__device__ __forceinline__ void store_codes(uint8_t* to, int64_t left, bool aligned, const float (&x)[kCount],
                                            const float (&inverse)[kCount]) {
  uint8_t codes[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t pair = encode_pair(x[i] * inverse[i], x[i + 1] * inverse[i + 1]);
    codes[i] = static_cast<uint8_t>(pair);
    codes[i + 1] = static_cast<uint8_t>(pair >> 8);
  }
  store_entries(to, left, aligned, codes);
}

// Tiles of 1 x 128. Block: blockDim.x / lanes tiles of each of blockDim.y rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) quantize_rows(Fp8QuantizeTiles p, int64_t tiles, Alignment aligned) {
  constexpr int kCount = kPack<T>, kLanes = kFp8Block / kCount;
  const int lane = threadIdx.x % kLanes;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int64_t column = tile * kFp8Block + lane * kCount;
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.y; first < p.rows;
       first += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t row = first + threadIdx.y, left = row < p.rows ? p.columns - column : 0;
    float x[kCount];
    load_floats(static_cast<const T*>(p.x) + row * p.x_stride + column, left, aligned.x, x);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, magnitude(x[i]));
    for (int step = kLanes / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const float scale = tile_scale(bits_float(largest), p.power_of_two);
    float inverse[kCount];
    fill(inverse, 1.0f / scale);
    store_codes(p.codes + row * p.columns + column, left, aligned.codes, x, inverse);
    if (lane == 0 && left > 0) p.scales[row * tiles + tile] = scale;
  }
}

// What a block of quantize_bands has: 128 rows of kWidth columns, four words a thread.
template <typename T, bool kPerColumn>
struct Band {
  static constexpr int kWidth = kPerColumn ? 8 * kPack<T> : kFp8Block;
  static constexpr int kAcross = kWidth / kPack<T>;  // threads beside each other in a row
  static constexpr int kPasses = 4;
  static constexpr int kRows = kFp8Block / kPasses;  // of a pass
  static constexpr int kThreads = kRows * kAcross;
  static constexpr int kWarps = kThreads / kWarp;
};

// The inverse scales of this thread's columns, which have one each. Writes `scales` [kWidth], of which `left` exist.
template <typename T, int kPasses>
__device__ __forceinline__ void scale_columns(const float (&x)[kPasses][kPack<T>], float* scales, int64_t left,
                                              bool power_of_two, float (&inverse)[kPack<T>]) {
  using Shape = Band<T, true>;
  constexpr int kCount = kPack<T>;
  __shared__ uint32_t found[Shape::kWarps][Shape::kWidth];
  __shared__ float inverses[Shape::kWidth];
  const int across = threadIdx.x % Shape::kAcross;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    uint32_t largest = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) largest = max(largest, magnitude(x[pass][i]));
    for (int step = kWarp / 2; step >= Shape::kAcross; step /= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    if (threadIdx.x % kWarp < Shape::kAcross) found[threadIdx.x / kWarp][across * kCount + i] = largest;
  }
  __syncthreads();
  if (threadIdx.x < Shape::kWidth) {
    uint32_t largest = 0;
    for (int warp = 0; warp < Shape::kWarps; ++warp) largest = max(largest, found[warp][threadIdx.x]);
    const float scale = tile_scale(bits_float(largest), power_of_two);
    inverses[threadIdx.x] = 1.0f / scale;
    if (threadIdx.x < left) scales[threadIdx.x] = scale;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) inverse[i] = inverses[across * kCount + i];
}

// The same with one scale for the block.
template <typename T, int kPasses>
__device__ __forceinline__ void scale_tile(const float (&x)[kPasses][kPack<T>], float* scale, bool power_of_two,
                                           float (&inverse)[kPack<T>]) {
  using Shape = Band<T, false>;
  __shared__ uint32_t found[Shape::kWarps];
  uint32_t largest = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) largest = max(largest, magnitude(x[pass][i]));
  largest = warp_max(largest);
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (int warp = 0; warp < Shape::kWarps; ++warp) largest = max(largest, found[warp]);
  const float value = tile_scale(bits_float(largest), power_of_two);
  if (threadIdx.x == 0) *scale = value;
  fill(inverse, 1.0f / value);
}

// Rows that share tiles, and their row of the scales.
struct Rows {
  int64_t begin, end, scale_row;
};

// The last expert whose key is not above `wanted`, or the first; keys rise.
template <typename Key>
__device__ __forceinline__ int64_t last_expert(int64_t experts, int64_t wanted, const Key& key) {
  int64_t low = 0, high = experts - 1;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (key(middle) <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int64_t bounded(int64_t row, int64_t rows) { return row < 0 ? 0 : row < rows ? row : rows; }

// Those of a row of the scales; without rows where no tile has it.
__device__ __forceinline__ Rows rows_of(const Fp8QuantizeTiles& p, int64_t scale_row) {
  if (p.offsets == nullptr) return {scale_row * kFp8Block, min((scale_row + 1) * kFp8Block, p.rows), scale_row};
  if (p.experts == 0) return {0, 0, scale_row};
  const auto first_tile = [&](int64_t e) { return fp8_first_tile(p.offsets[e], e); };
  const int64_t expert = last_expert(p.experts, scale_row, first_tile);
  const int64_t begin = bounded(p.offsets[expert] + (scale_row - first_tile(expert)) * kFp8Block, p.rows);
  return {begin, min(begin + kFp8Block, bounded(p.offsets[expert + 1], p.rows)), scale_row};
}

// Tiles of 128 x 1 (kPerColumn) and of 128 x 128. Block: blockIdx.x along the columns, bands of 128 rows along y.
template <typename T, bool kPerColumn>
__global__ void __launch_bounds__(Band<T, kPerColumn>::kThreads)
    quantize_bands(Fp8QuantizeTiles p, int64_t bands, Alignment aligned) {
  using Shape = Band<T, kPerColumn>;
  constexpr int kCount = kPack<T>;
  const int64_t strip = static_cast<int64_t>(blockIdx.x) * Shape::kWidth;
  const int64_t column = strip + threadIdx.x % Shape::kAcross * kCount;
  for (int64_t band = blockIdx.y; band < bands; band += gridDim.y) {
    const Rows rows = rows_of(p, band);
    const int64_t first = rows.begin + threadIdx.x / Shape::kAcross;
    float x[Shape::kPasses][kCount], inverse[kCount];
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int64_t row = first + pass * Shape::kRows;
      load_floats(static_cast<const T*>(p.x) + row * p.x_stride + column, row < rows.end ? p.columns - column : 0,
                  aligned.x, x[pass]);
    }
    if constexpr (kPerColumn)
      scale_columns<T>(x, p.scales + band * p.columns + strip, p.columns - strip, p.power_of_two, inverse);
    else scale_tile<T>(x, p.scales + band * gridDim.x + blockIdx.x, p.power_of_two, inverse);
#pragma unroll
    for (int pass = 0; pass < Shape::kPasses; ++pass) {
      const int64_t row = first + pass * Shape::kRows;
      store_codes(p.codes + row * p.columns + column, row < rows.end ? p.columns - column : 0, aligned.codes, x[pass],
                  inverse);
    }
    __syncthreads();  // the next band writes the shared memory again
  }
}

// Codes of 0 to the rows before the first expert's and behind the last one's. Grid: columns along x, such rows along y.
__global__ void __launch_bounds__(kThreads) clear_outside(Fp8QuantizeTiles p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = bounded(p.offsets[0], p.rows), last = max(first, bounded(p.offsets[p.experts], p.rows));
  if (column >= p.columns) return;
  for (int64_t i = blockIdx.y; i < first + p.rows - last; i += gridDim.y)
    p.codes[(i < first ? i : last + i - first) * p.columns + column] = 0;
}

// The row of the scales that a row has; -1 for rows of no expert.
__device__ __forceinline__ int64_t scale_row_of(const Fp8DequantizeTiles& p, int64_t row) {
  if (p.offsets == nullptr) return p.tile_rows == 1 ? row : row / kFp8Block;
  if (row < p.offsets[0] || row >= p.offsets[p.experts]) return -1;
  const int64_t expert = last_expert(p.experts, row, [&](int64_t e) { return p.offsets[e]; });
  const int64_t begin = p.offsets[expert], tile = fp8_first_tile(begin, expert) + (row - begin) / kFp8Block;
  return tile < 0 || tile >= fp8_expert_tiles(p.rows, p.experts) ? -1 : tile;
}

// A thread has as many codes as entries of the result fit 16 bytes. Block: blockDim.x words of each of blockDim.y rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) dequantize(Fp8DequantizeTiles p, Alignment aligned, bool scales_aligned) {
  constexpr int kCount = kPack<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount,
                left = p.columns - column;
  const int64_t scale_columns = p.tile_columns == 1 ? p.columns : fp8_blocks(p.columns);
  if (left <= 0) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < p.rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t scale_row = scale_row_of(p, row);
    const float* scales = p.scales + scale_row * scale_columns;
    float scale[kCount], x[kCount];
    if (scale_row < 0) fill(scale, 0.0f);
    else if (p.tile_columns == 1) load_floats(scales + column, left, scales_aligned, scale);
    else fill(scale, scales[column / kFp8Block]);  // a word never crosses a tile
    uint8_t codes[kCount];
    load_entries(p.codes + row * p.code_stride + column, left, aligned.codes, codes);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      decode_pair(codes[i] | static_cast<uint32_t>(codes[i + 1]) << 8, x[i], x[i + 1]);
      x[i] *= scale[i];
      x[i + 1] *= scale[i + 1];
    }
    if (scale_row < 0) fill(x, 0.0f);  // whatever the codes are
    store_floats(static_cast<T*>(p.out) + row * p.columns + column, left, aligned.x, x);
  }
}

template <typename T, bool kPerColumn>
const char* launch_bands(const Fp8QuantizeTiles& p, Alignment aligned, void* stream) {
  using Shape = Band<T, kPerColumn>;
  const int64_t bands = p.offsets == nullptr ? fp8_blocks(p.rows) : fp8_expert_tiles(p.rows, p.experts);
  return launch(quantize_bands<T, kPerColumn>, grid_shape(blocks_of(p.columns, Shape::kWidth), bands), Shape::kThreads,
                0, stream, p, bands, aligned);
}

template <typename T>
const char* quantize(const Fp8QuantizeTiles& p, void* stream) {
  const int64_t width = sizeof(T);
  const Alignment aligned{is_aligned(p.x, 16) && p.x_stride * width % 16 == 0,
                          is_aligned(p.codes, 16) && p.columns % kPack<T> == 0};
  if (p.tile_rows == kFp8Block && p.tile_columns == kFp8Block) return launch_bands<T, false>(p, aligned, stream);
  if (p.tile_rows == kFp8Block) {
    const char* problem = nullptr;
    if (p.offsets != nullptr && p.rows > 0)
      problem = launch(clear_outside, grid_shape(blocks_of(p.columns, kThreads), min(p.rows, kMostClearing)), kThreads,
                       0, stream, p);
    return problem != nullptr ? problem : launch_bands<T, true>(p, aligned, stream);
  }
  constexpr int kLanes = kFp8Block / kPack<T>;
  const int64_t tiles = fp8_blocks(p.columns);
  const dim3 block = block_shape(tiles, kLanes, kThreads);
  return launch(quantize_rows<T>, grid_shape(blocks_of(tiles, block.x / kLanes), blocks_of(p.rows, block.y)), block, 0,
                stream, p, tiles, aligned);
}

template <typename T>
const char* dequantize_as(const Fp8DequantizeTiles& p, void* stream) {
  constexpr int kCount = kPack<T>;
  const Alignment aligned{is_aligned(p.out, 16) && p.columns % kCount == 0,
                          is_aligned(p.codes, kCount) && p.code_stride % kCount == 0};
  const int64_t words = blocks_of(p.columns, kCount);
  const dim3 block = block_shape(words, 1, kThreads);
  return launch(dequantize<T>, grid_shape(blocks_of(words, block.x), blocks_of(p.rows, block.y)), block, 0, stream, p,
                aligned, is_aligned(p.scales, 16) && p.columns % 4 == 0);
}

}  // namespace

const char* quantize_fp8(const Fp8QuantizeTiles& p, void* stream) {
  return p.dtype == Element::kFloat ? quantize<float>(p, stream) : quantize<uint16_t>(p, stream);
}

const char* dequantize_fp8(const Fp8DequantizeTiles& p, void* stream) {
  return p.dtype == Element::kFloat ? dequantize_as<float>(p, stream) : dequantize_as<uint16_t>(p, stream);
}

}  // namespace grpo_mc::cuda
