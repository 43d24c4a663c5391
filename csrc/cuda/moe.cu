// nvcc: sm_80 sm_90 sm_100
// Moving tokens to their experts' rows, summing rows back to tokens, and the gradients of that.
//
// Memory bounds all of them, so every row goes through registers once, sixteen bytes a lane:
//
//     permute    a warp has 2 KB of a token and writes it to the token's k rows: T + R rows of traffic
//     unpermute  a thread has sixteen bytes of a token's sum and reads the k rows in the order of the choices: R + T
//     backward   a warp has a choice; the warps beside it have the same token, whose gradient they find in the L1
//     cache:
//                T + 2 R, and the sum of products needs no barrier
//
// Rows that no token goes to are found by the map turned round (`source`), and only those are written with zeros.
#include "cuda/launch.h"
#include "cuda/launchers.h"
#include "cuda/vectors.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWordsAtOnce = 4;               // of a lane, in flight together
constexpr int kPiece = kWordsAtOnce * kWarp;  // words of a token that a warp has at a time
constexpr int kRowsAtOnce = 4;                // rows whose words a thread of unpermute has in flight

__device__ __forceinline__ float fused(float a, float b, float sum) { return fmaf(a, b, sum); }
__device__ __forceinline__ double fused(double a, double b, double sum) { return fma(a, b, sum); }

__device__ __forceinline__ bool is_row(int64_t row, int64_t num_rows) { return row >= 0 && row < num_rows; }

// source[row]: the last choice of the row; -1 stays where there is none.
__global__ void __launch_bounds__(kThreads)
    turn_round(const int64_t* map, int64_t choices, int64_t* source, int64_t num_rows) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < choices;
       i += static_cast<int64_t>(gridDim.x) * kThreads)
    if (is_row(map[i], num_rows)) atomicMax(reinterpret_cast<long long*>(source + map[i]), static_cast<long long>(i));
}

__device__ __forceinline__ void copy_prob(const MoePermute& p, int64_t from, int64_t to) {
  const auto copy = [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(p.row_probs)[to] = from < 0 ? zero : static_cast<const T*>(p.probs)[from];
  };
  if (p.prob_bytes == 4) copy(uint32_t{0});
  else if (p.prob_bytes == 2) copy(uint16_t{0});
  else if (p.prob_bytes == 8) copy(uint64_t{0});
  else copy(uint8_t{0});
}

// One warp: zeros to those of 32 rows from `first` on that are nobody's. Strides and widths in words.
template <typename W>
__device__ __forceinline__ void clear_rows(W* rows, int64_t stride, int64_t width, int64_t row, int64_t source,
                                           int64_t num_rows) {
  const int lane = threadIdx.x % kWarp;
  unsigned empty = __ballot_sync(kAllLanes, row < num_rows && source < 0);
  while (empty != 0) {
    const int64_t which = row - lane + __ffs(static_cast<int>(empty)) - 1;
    for (int64_t w = lane; w < width; w += kWarp) rows[which * stride + w] = W{};
    empty &= empty - 1;
  }
}

// One warp: words `first`, + 32, ... of a token to all rows of its choices.
template <int kBytes>
__device__ __forceinline__ void move_piece(const MoePermute& p, int64_t token, int64_t first) {
  using W = Word<kBytes>;
  const int64_t width = p.row_bytes / kBytes, stride = p.rows_stride / kBytes;
  const W* from = static_cast<const W*>(p.x) + token * (p.x_stride / kBytes);
  W words[kWordsAtOnce];
#pragma unroll
  for (int i = 0; i < kWordsAtOnce; ++i) words[i] = first + i * kWarp < width ? from[first + i * kWarp] : W{};
  for (int64_t choice = token * p.k; choice < (token + 1) * p.k; ++choice) {
    const int64_t row = p.map[choice];
    if (!is_row(row, p.num_rows) || p.source[row] != choice) continue;
    W* to = static_cast<W*>(p.rows) + row * stride;
#pragma unroll
    for (int i = 0; i < kWordsAtOnce; ++i)
      if (first + i * kWarp < width) to[first + i * kWarp] = words[i];
  }
}

// A warp has a piece of a token, or 32 rows to look for empty ones. Grid: pieces along y.
template <int kBytes>
__global__ void __launch_bounds__(kThreads, 5) move_rows(MoePermute p, int64_t pieces) {
  const int lane = threadIdx.x % kWarp;
  const int64_t items = p.tokens + (p.num_rows + kWarp - 1) / kWarp;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; item < items;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    if (item < p.tokens) {
      for (int64_t piece = blockIdx.y; piece < pieces; piece += gridDim.y)
        move_piece<kBytes>(p, item, piece * kPiece + lane);
    } else if (blockIdx.y == 0) {
      const int64_t row = (item - p.tokens) * kWarp + lane, source = row < p.num_rows ? p.source[row] : 0;
      if (row < p.num_rows) copy_prob(p, source, row);
      clear_rows(static_cast<Word<kBytes>*>(p.rows), p.rows_stride / kBytes, p.row_bytes / kBytes, row, source,
                 p.num_rows);
    }
  }
}

// The sum of prob * row over a token's choices, for the columns of a word from `column` on.
template <typename T>
__device__ __forceinline__ void sum_choices(const MoeUnpermute& p, int64_t token, int64_t column, bool aligned,
                                            Wide<T> (&sums)[kPack<T>]) {
  constexpr int kCount = kPack<T>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = 0;
  const int64_t end = (token + 1) * p.k;
  for (int64_t first = token * p.k; first < end; first += kRowsAtOnce) {
    T rows[kRowsAtOnce][kCount];
    int64_t places[kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      places[j] = first + j < end ? p.map[first + j] : -1;
      const int64_t left = is_row(places[j], p.num_rows) ? p.width - column : 0;
      load_entries(static_cast<const T*>(p.rows) + places[j] * p.row_stride + column, left, aligned, rows[j]);
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      if (places[j] == -1) continue;
      Wide<T> prob = p.probs == nullptr ? Wide<T>{1} : static_cast<const Wide<T>*>(p.probs)[first + j];
      if (!is_row(places[j], p.num_rows)) prob = static_cast<Wide<T>>(NAN);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += prob * widen(rows[j][i]);
    }
  }
}

// Block: blockDim.x words of each of blockDim.y tokens.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_rows(MoeUnpermute p, bool rows_aligned, bool out_aligned) {
  constexpr int kCount = kPack<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount,
                left = p.width - column;
  if (left <= 0) return;
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; token < p.tokens;
       token += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    Wide<T> sums[kCount];
    sum_choices<T>(p, token, column, rows_aligned, sums);
    T out[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(out + i, sums[i]);
    store_entries(static_cast<T*>(p.out) + token * p.out_stride + column, left, out_aligned, out);
  }
}

struct BackwardAlignment {
  bool grad, rows, grad_rows;
};

// One warp: the gradients of one choice.
template <typename T>
__device__ __forceinline__ void grads_of_choice(const MoeUnpermuteBackward& p, int64_t choice,
                                                BackwardAlignment aligned) {
  constexpr int kCount = kPack<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = p.map[choice];
  Wide<T> prob = static_cast<const Wide<T>*>(p.probs)[choice];
  double product = row == -1 ? 0.0 : static_cast<double>(NAN);
  if (is_row(row, p.num_rows)) {
    const T* gradient = static_cast<const T*>(p.grad_out) + choice / p.k * p.grad_stride;
    const T* x = static_cast<const T*>(p.rows) + row * p.row_stride;
    T* to = static_cast<T*>(p.grad_rows) + row * p.width;
    const bool is_mine = p.source[row] == choice;
    Wide<T> sum = 0;
    for (int64_t column = lane * kCount; column < p.width; column += kWarp * kCount) {
      T grads[kCount], entries[kCount], scaled[kCount];
      load_entries(gradient + column, p.width - column, aligned.grad, grads);
      load_entries(x + column, p.width - column, aligned.rows, entries);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum = fused(widen(entries[i]), widen(grads[i]), sum);
        store(scaled + i, Wide<T>{0} + prob * widen(grads[i]));
      }
      if (is_mine) store_entries(to + column, p.width - column, aligned.grad_rows, scaled);
    }
    product = warp_sum(static_cast<double>(sum));
  }
  if (lane == 0) p.grad_probs[choice] = product;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) combine_backward(MoeUnpermuteBackward p, BackwardAlignment aligned) {
  const int lane = threadIdx.x % kWarp;
  const int64_t choices = p.tokens * p.k, items = choices + (p.num_rows + kWarp - 1) / kWarp;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; item < items;
       item += static_cast<int64_t>(gridDim.x) * kWarps) {
    if (item < choices) {
      grads_of_choice<T>(p, item, aligned);
      continue;
    }
    const int64_t row = (item - choices) * kWarp + lane, source = row < p.num_rows ? p.source[row] : 0;
    clear_rows(static_cast<T*>(p.grad_rows), p.width, p.width, row, source, p.num_rows);
  }
}

// Turns the map round: two launches.
const char* find_sources(const int64_t* map, int64_t choices, int64_t* source, int64_t num_rows, void* stream) {
  if (num_rows == 0) return nullptr;
  const size_t bytes = static_cast<size_t>(num_rows) * sizeof(int64_t);
  const cudaError_t error = cudaMemsetAsync(source, 0xff, bytes, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (choices == 0) return nullptr;
  return launch(turn_round, blocks_for(blocks_of(choices, kThreads)), kThreads, 0, stream, map, choices, source,
                num_rows);
}

template <int kBytes>
const char* permute(const MoePermute& p, void* stream) {
  const int64_t pieces = blocks_of(p.row_bytes / kBytes, kPiece);
  const int64_t items = p.tokens + blocks_of(p.num_rows, kWarp);
  if (items == 0) return nullptr;
  const dim3 grid = grid_shape(blocks_for(blocks_of(items, kWarps)), pieces < 1 ? 1 : pieces);
  return launch(move_rows<kBytes>, grid, kThreads, 0, stream, p, pieces);
}

template <typename T>
const char* unpermute(const MoeUnpermute& p, void* stream) {
  constexpr int64_t kCount = kPack<T>;
  const dim3 block = block_shape(blocks_of(p.width, kCount), 1, kThreads);
  const dim3 grid = grid_shape(blocks_of(p.width, kCount * block.x), blocks_of(p.tokens, block.y));
  return launch(combine_rows<T>, grid, block, 0, stream, p, is_aligned(p.rows, 16) && p.row_stride % kCount == 0,
                is_aligned(p.out, 16) && p.out_stride % kCount == 0);
}

template <typename T>
const char* backward(const MoeUnpermuteBackward& p, void* stream) {
  constexpr int64_t kCount = kPack<T>;
  const BackwardAlignment aligned{is_aligned(p.grad_out, 16) && p.grad_stride % kCount == 0,
                                  is_aligned(p.rows, 16) && p.row_stride % kCount == 0,
                                  is_aligned(p.grad_rows, 16) && p.width % kCount == 0};
  const int64_t items = p.tokens * p.k + blocks_of(p.num_rows, kWarp);
  if (items == 0) return nullptr;
  return launch(combine_backward<T>, blocks_for(blocks_of(items, kWarps)), kThreads, 0, stream, p, aligned);
}

}  // namespace

const char* moe_permute(const MoePermute& p, void* stream) {
  if (const char* problem = find_sources(p.map, p.tokens * p.k, p.source, p.num_rows, stream)) return problem;
  const auto fits = [&](int64_t bytes) {
    return is_aligned(p.x, bytes) && is_aligned(p.rows, bytes) &&
           (p.row_bytes | p.x_stride | p.rows_stride) % bytes == 0;
  };
  if (fits(16)) return permute<16>(p, stream);
  if (fits(8)) return permute<8>(p, stream);
  if (fits(4)) return permute<4>(p, stream);
  return fits(2) ? permute<2>(p, stream) : permute<1>(p, stream);
}

const char* moe_unpermute(const MoeUnpermute& p, void* stream) {
  if (p.dtype == Element::kFloat) return unpermute<float>(p, stream);
  return p.dtype == Element::kBFloat16 ? unpermute<uint16_t>(p, stream) : unpermute<double>(p, stream);
}

const char* moe_unpermute_backward(const MoeUnpermuteBackward& p, void* stream) {
  if (const char* problem = find_sources(p.map, p.tokens * p.k, p.source, p.num_rows, stream)) return problem;
  if (p.dtype == Element::kFloat) return backward<float>(p, stream);
  return p.dtype == Element::kBFloat16 ? backward<uint16_t>(p, stream) : backward<double>(p, stream);
}

}  // namespace grpo_mc::cuda
