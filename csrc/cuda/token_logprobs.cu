// nvcc: sm_80 sm_90 sm_100
// token_logprobs: softmax statistics of a row in one pass, and its gradient from the saved log-sum-exp.
//
// One block a row. Forward reads the logits once (2 bytes a bfloat16 entry) and keeps, thread by thread, a maximum and
// the sums of exp(z) and exp(z) z below it: float over the entries of a tile, double from tile to tile, so the error does
// not grow with the vocabulary. The threads' sums are merged at the end, always in the same order. Backward reads the
// logits again and writes the gradient: 4 bytes a bfloat16 entry.
#include <limits>

#include "common/softmax.h"
#include "cuda/launchers.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kMostThreads = 256;  // several blocks on a multiprocessor: one row's end hides behind other rows
template <typename T>
constexpr int kTilePacks = sizeof(T) == 8 ? 1 : 4;  // packs a thread loads before it uses them; exp of a double is long

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// z below this counts as this, so that 0 * z is finite for a logit of -inf: its exp is 0. A NaN comes through.
__device__ __forceinline__ float bounded(float z) { return z < -120.0f ? -120.0f : z; }
__device__ __forceinline__ double bounded(double z) { return z < -800.0 ? -800.0 : z; }

// exp(z) for a sum of which it is a part: the relative error of __expf grows with -z, the part shrinks faster.
__device__ __forceinline__ float exp_part(float z) { return __expf(z); }
__device__ __forceinline__ double exp_part(double z) { return exp(z); }

__device__ __forceinline__ float exact_exp(float z) { return expf(z); }
__device__ __forceinline__ double exact_exp(double z) { return exp(z); }
__device__ __forceinline__ float one_rounding(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double one_rounding(double a, double b, double c) { return fma(a, b, c); }

__device__ __forceinline__ bool in_vocabulary(const TokenRows& p, int64_t target) { return target >= 0 && target < p.vocab_size; }

// Column of the row's target, or -1 when another shard has it.
__device__ __forceinline__ int64_t column_of(const TokenRows& p, int64_t target) {
  const int64_t column = target - p.vocab_start;
  return in_vocabulary(p, target) && column >= 0 && column < p.valid ? column : -1;
}

// Adds kCount logits to one thread's statistics.
template <bool kSumZ, int kCount, typename W>
__device__ __forceinline__ void add(RowStats& row, const W* x, const TokenRows& p) {
  W best = static_cast<W>(row.max);
#pragma unroll
  for (int k = 0; k < kCount; ++k) best = x[k] > best ? x[k] : best;  // a NaN is dropped here
  if (best > static_cast<W>(row.max)) raise_max(row, best, p.inv_temperature);
  // Only -inf so far: any finite number in place of the maximum keeps their z at -inf.
  const W max = best == static_cast<W>(kNothing) ? W{0} : best, scale = static_cast<W>(p.inv_temperature);
  W sum = 0, sum_z = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const W z = bounded((x[k] - max) * scale), e = exp_part(z);
    sum += e;
    if (kSumZ) sum_z = one_rounding(e, z, sum_z);
  }
  row.sum += sum;
  if (kSumZ) row.sum_z += sum_z;
}

// This thread's share of a row.
template <bool kSumZ, typename T>
__device__ __forceinline__ RowStats thread_stats(const T* x, const TokenRows& p) {
  constexpr int kCount = kPack<T>;
  RowStats row{kNothing, 0.0, 0.0};
  const Packs<T> packs(x, p.valid);
  const int64_t step = int64_t{blockDim.x} * kCount;
  int64_t i = packs.head + int64_t{threadIdx.x} * kCount;
  for (; i + (kTilePacks<T> - 1) * step < packs.end; i += kTilePacks<T> * step) {
    Wide<T> tile[kTilePacks<T> * kCount];
#pragma unroll
    for (int k = 0; k < kTilePacks<T>; ++k) load_pack(x + i + k * step, tile + k * kCount);
    add<kSumZ, kTilePacks<T> * kCount>(row, tile, p);
  }
  for (; i < packs.end; i += step) {
    Wide<T> pack[kCount];
    load_pack(x + i, pack);
    add<kSumZ, kCount>(row, pack, p);
  }
  if (threadIdx.x < packs.singles) {
    const Wide<T> single = widen(x[packs.single(threadIdx.x)]);
    add<kSumZ, 1>(row, &single, p);
  }
  return row;
}

__device__ __forceinline__ void set(void* to, Element dtype, int64_t t, double value) {
  if (to == nullptr) return;
  if (dtype == Element::kDouble) static_cast<double*>(to)[t] = value;
  else static_cast<float*>(to)[t] = static_cast<float>(value);
}

template <typename T>
__device__ __forceinline__ void finish(const TokenStats& p, const RowStats& row, const T* x, int64_t t) {
  const TokenRows& rows = p.rows;
  const int64_t target = rows.targets[t], column = column_of(rows, target);
  double logit = column < 0 ? 0.0 : static_cast<double>(widen(x[column]));
  if (!in_vocabulary(rows, target)) logit = std::numeric_limits<double>::quiet_NaN();
  const TokenResult result = token_result(row, logit, rows.inv_temperature);
  set(p.logprobs, rows.dtype, t, result.logprob);
  set(p.entropy, rows.dtype, t, result.entropy);
  if (p.lse != nullptr) p.lse[t] = result.lse;
  set(p.max, rows.dtype, t, row.max * rows.inv_temperature);
  set(p.sumexp, rows.dtype, t, row.sum);
  set(p.sum_p_logit, rows.dtype, t, row.sum_z);
  set(p.target_logit, rows.dtype, t, logit * rows.inv_temperature);
}

template <bool kSumZ, typename T>
__global__ void __launch_bounds__(kMostThreads, 1) stats_of_rows(TokenStats p) {
  __shared__ double scratch[kWarp];
  for (int64_t t = blockIdx.x; t < p.rows.tokens; t += gridDim.x) {
    const T* x = static_cast<const T*>(p.rows.logits) + t * p.rows.stride;
    RowStats row = thread_stats<kSumZ>(x, p.rows);
    const double max = block_max(row.max, scratch);
    if (max > row.max) raise_max(row, max, p.rows.inv_temperature);
    row.sum = block_sum(row.sum, scratch);
    if (kSumZ) row.sum_z = block_sum(row.sum_z, scratch);
    if (threadIdx.x == 0) finish(p, row, x, t);
  }
}

// The gradient at a column of one row, from its logit.
template <typename W>
struct Gradient {
  __device__ __forceinline__ Gradient(const TokenGrads& p, int64_t t, double grad, double grad_entropy) {
    const double inv_temperature = p.rows.inv_temperature, lse = p.lse[t], entropy = p.entropy != nullptr ? p.entropy[t] : 0.0;
    // z - lse = (x - high) * inv_temperature - low, with x - high exact near the maximum: logits of 1e4 lose nothing.
    high = static_cast<W>(lse / inv_temperature);
    low = static_cast<W>(lse - static_cast<double>(high) * inv_temperature);
    scale = static_cast<W>(inv_temperature);
    constant = static_cast<W>(-inv_temperature * (grad + grad_entropy * entropy));
    slope = static_cast<W>(-inv_temperature * grad_entropy);
    at_target = static_cast<W>(inv_temperature * grad);
  }
  __device__ __forceinline__ W operator()(W logit) const {
    const W logp = bounded((logit - high) * scale - low);
    return exact_exp(logp) * one_rounding(slope, logp, constant);
  }
  W high, low, scale, constant, slope, at_target;
};

template <typename T>
__device__ __forceinline__ void write_gradient(const T* x, T* out, const TokenRows& p, int64_t target, const Gradient<Wide<T>>& gradient) {
  constexpr int kCount = kPack<T>;
  const auto one = [&](int64_t column) {
    const Wide<T> value = gradient(widen(x[column]));
    store(out + column, column == target ? value + gradient.at_target : value);
  };
  const Packs<T> packs(out, p.valid);
  if (reinterpret_cast<uintptr_t>(x) % 16 != reinterpret_cast<uintptr_t>(out) % 16) {
    for (int64_t column = threadIdx.x; column < p.valid; column += blockDim.x) one(column);
    return;
  }
  if (threadIdx.x < packs.singles) one(packs.single(threadIdx.x));
  const int64_t step = int64_t{blockDim.x} * kCount;
#pragma unroll 2
  for (int64_t i = packs.head + int64_t{threadIdx.x} * kCount; i < packs.end; i += step) {
    Wide<T> pack[kCount];
    load_pack(x + i, pack);
    const int64_t at = target - i;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const Wide<T> value = gradient(pack[k]);
      pack[k] = k == at ? value + gradient.at_target : value;
    }
    store_pack(out + i, pack);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads, 1) grads_of_rows(TokenGrads p) {
  for (int64_t t = blockIdx.x; t < p.rows.tokens; t += gridDim.x) {
    T* out = static_cast<T*>(p.out) + t * p.out_stride;
    const double grad = p.grad_logprobs[t], grad_entropy = p.grad_entropy != nullptr ? p.grad_entropy[t] : 0.0;
    int64_t done = 0;
    if (grad != 0 || grad_entropy != 0) {  // else a masked token: exact zeros, whatever the logits hold
      const Gradient<Wide<T>> gradient(p, t, grad, grad_entropy);
      write_gradient(static_cast<const T*>(p.rows.logits) + t * p.rows.stride, out, p.rows, column_of(p.rows, p.rows.targets[t]), gradient);
      done = p.rows.valid;
    }
    for (int64_t column = done + threadIdx.x; column < p.rows.columns; column += blockDim.x) out[column] = T{0};
  }
}

// Threads of a row's block: enough for two packs each, whole warps.
template <typename T>
unsigned threads_for(int64_t columns) {
  const int64_t warps = columns / (2 * kPack<T> * kWarp) + 1;
  return static_cast<unsigned>(kWarp * (warps < kMostThreads / kWarp ? warps : kMostThreads / kWarp));
}

template <typename T>
const char* stats(const TokenStats& p, void* stream) {
  const bool wants_sum_z = p.entropy != nullptr || p.sum_p_logit != nullptr;
  return launch(wants_sum_z ? stats_of_rows<true, T> : stats_of_rows<false, T>, blocks_for(p.rows.tokens), threads_for<T>(p.rows.valid), 0,
                stream, p);
}

template <typename T>
const char* grads(const TokenGrads& p, void* stream) {
  return launch(grads_of_rows<T>, blocks_for(p.rows.tokens), threads_for<T>(p.rows.columns), 0, stream, p);
}

}  // namespace

const char* token_logprobs(const TokenStats& p, void* stream) {
  if (p.rows.dtype == Element::kDouble) return stats<double>(p, stream);
  return p.rows.dtype == Element::kBFloat16 ? stats<uint16_t>(p, stream) : stats<float>(p, stream);
}

const char* token_logprobs_backward(const TokenGrads& p, void* stream) {
  if (p.rows.dtype == Element::kDouble) return grads<double>(p, stream);
  return p.rows.dtype == Element::kBFloat16 ? grads<uint16_t>(p, stream) : grads<float>(p, stream);
}

}  // namespace grpo_mc::cuda
