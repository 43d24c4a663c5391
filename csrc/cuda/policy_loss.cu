// nvcc: sm_80 sm_90 sm_100
// policy_loss: what belongs to a sequence first, then every token, its gradient and the metric sums, in one pass.
//
// A token is 13 to 37 bytes in and 4 to 12 out, so a micro-batch of 65,536 tokens is a microsecond of memory: the launches
// bound it, and there are two of them (up to five for the gspo kinds). Nothing is read back by the host. Sums are float (of
// double values double) over the 128 tokens of a warp and double from there, in an order that depends on nothing.
#include "common/policy_loss.h"
#include "cuda/launchers.h"
#include "cuda/pack.h"

namespace grpo_mc::cuda {
namespace {

constexpr int kSums = sizeof(PolicySums) / sizeof(double);
constexpr int kTokenThreads = 256, kTokensOfThread = static_cast<int>(kPolicyPart) / kTokenThreads;
constexpr int kSequenceThreads = 512;
constexpr int64_t kNoSequence = -1;

__device__ __forceinline__ double not_a_number() { return nan(""); }

// Tokens `begin` to `end` of a sequence, none where `starts` is no list of offsets that rises from 0 to the number of
// tokens: a GPU's offsets are not read back for a check, but must not lead outside the tensors.
struct Range {
  __device__ __forceinline__ Range(const PolicySequences& s, int64_t num_tokens, int64_t i) : begin(s.starts[i]), end(s.starts[i + 1]) {
    const int64_t before = i > 0 ? s.starts[i - 1] : 0, behind = i + 1 < s.count ? s.starts[i + 2] : num_tokens;
    is_good = begin >= before && end >= begin && behind >= end && before >= 0 && behind <= num_tokens;
    is_good = is_good && (i > 0 || begin == 0) && (i + 1 < s.count || end == num_tokens);
    if (!is_good) begin = end = 0;
  }
  int64_t begin, end;
  bool is_good;
};

// The sequence that token t lies in, or kNoSequence: log2(sequences) loads, which all threads make of the same few lines.
__device__ __forceinline__ int64_t sequence_of(const PolicySequences& s, int64_t t) {
  int64_t low = 0, high = s.count;  // of sorted offsets: starts[low] <= t < starts[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (s.starts[middle] <= t) low = middle;
    else high = middle;
  }
  const bool holds = s.count > 0 && s.starts[low] <= t && t < s.starts[low + 1] && s.tokens[low] >= 0;
  return holds ? low : kNoSequence;
}

__device__ __forceinline__ double base_coefficient(const PolicyCall& p) {
  return p.denominator == nullptr ? p.tokens.coefficient : p.tokens.coefficient * share_of_denominator(*p.denominator);
}

__device__ __forceinline__ double mean_coefficient(const PolicyCall& p, int64_t tokens) {
  return tokens > 0 ? base_coefficient(p) / static_cast<double>(tokens) : 0.0;
}

// Tokens of every sequence, its coefficient, and its ratio. One block a sequence.
template <typename T>
__global__ void __launch_bounds__(kSequenceThreads) sequences_of_call(PolicyCall p) {
  __shared__ double scratch[kWarp];
  const PolicySequences& s = p.sequences;
  const T *logprob = static_cast<const T*>(p.tokens.logprobs), *old = static_cast<const T*>(p.tokens.old_logprobs);
  for (int64_t i = blockIdx.x; i < s.count; i += gridDim.x) {
    const Range range(s, p.num_tokens, i);
    double sum = 0;
    int64_t count = 0;
#pragma unroll 4
    for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kSequenceThreads) {
      const bool is_in = p.tokens.mask[t] != 0;
      count += is_in;
      if (is_in && p.tokens.has_sequence_ratio) sum += static_cast<double>(logprob[t]) - static_cast<double>(old[t]);
    }
    const double tokens = block_sum(static_cast<double>(count), scratch);  // exact
    if (p.tokens.has_sequence_ratio) sum = block_sum(sum, scratch);
    if (threadIdx.x != 0) continue;
    s.tokens[i] = range.is_good ? static_cast<int64_t>(tokens) : kNoSequence;
    if (s.mean == PolicyMean::kSequence) s.coefficient[i] = mean_coefficient(p, static_cast<int64_t>(tokens));
    if (!p.tokens.has_sequence_ratio) continue;
    const SequenceRatio ratio = sequence_ratio(sum, tokens);
    s.ratio[i] = ratio.value;
    s.slope[i] = ratio.slope;
  }
}

// The coefficient of every sequence from the tokens of its group: every pair of sequences is looked at, which is 4096
// additions a thread for 65,536 sequences.
__global__ void __launch_bounds__(kSequenceThreads) groups_of_call(PolicyCall p) {
  __shared__ double scratch[kWarp];
  const PolicySequences& s = p.sequences;
  for (int64_t i = blockIdx.x; i < s.count; i += gridDim.x) {
    double tokens = 0;
    for (int64_t j = threadIdx.x; j < s.count; j += kSequenceThreads)
      if (s.groups[j] == s.groups[i] && s.tokens[j] > 0) tokens += static_cast<double>(s.tokens[j]);
    tokens = block_sum(tokens, scratch);
    if (threadIdx.x == 0) s.coefficient[i] = mean_coefficient(p, static_cast<int64_t>(tokens));
  }
}

// A thread's adjacent values: sixteen bytes at a time where there are as many and the address allows it.
template <typename T>
struct Values {
  // Zeros for an absent tensor, for what is past its end, and for masked tokens.
  __device__ __forceinline__ Values(const void* from, int64_t begin, int64_t n, unsigned mask) {
    const T* source = static_cast<const T*>(from) + begin;
    const bool is_whole = n >= kTokensOfThread && reinterpret_cast<uintptr_t>(source) % 16 == 0;
#pragma unroll
    for (int k = 0; k < kTokensOfThread; ++k) x[k] = T{0};
    if (from == nullptr) return;
    if (is_whole) {
#pragma unroll
      for (int k = 0; k < kTokensOfThread; k += kPack<T>) load_pack(source + k, x + k);
    }
#pragma unroll
    for (int k = 0; k < kTokensOfThread; ++k) {
      if (!is_whole && k < n) x[k] = source[k];
      if ((mask >> k & 1u) == 0) x[k] = T{0};
    }
  }
  T x[kTokensOfThread];
};

template <typename T>
__device__ __forceinline__ void store_values(void* to, int64_t begin, int64_t n, const T* x) {
  T* target = static_cast<T*>(to) + begin;
  if (n >= kTokensOfThread && reinterpret_cast<uintptr_t>(target) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < kTokensOfThread; k += kPack<T>) store_pack(target + k, x + k);
    return;
  }
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k)
    if (k < n) target[k] = x[k];
}

// Bit k: token begin + k is in the loss.
__device__ __forceinline__ unsigned mask_bits(const uint8_t* mask, int64_t begin, int64_t n) {
  static_assert(kTokensOfThread == sizeof(uint32_t));
  uint8_t bytes[kTokensOfThread] = {0, 0, 0, 0};
  if (n >= kTokensOfThread && reinterpret_cast<uintptr_t>(mask + begin) % sizeof(uint32_t) == 0) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(mask + begin);
    memcpy(bytes, &word, sizeof(word));
  } else {
#pragma unroll
    for (int k = 0; k < kTokensOfThread; ++k) bytes[k] = k < n ? mask[begin + k] : 0;
  }
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k) bits |= (bytes[k] != 0 ? 1u : 0u) << k;
  return bits;
}

// What the tokens from `begin` on have from their sequence.
template <typename T>
struct OfSequence {
  __device__ __forceinline__ OfSequence(const PolicyCall& p, int64_t begin, int64_t n, T base) {
    const PolicySequences& s = p.sequences;
    if (s.starts == nullptr || n <= 0) {
#pragma unroll
      for (int k = 0; k < kTokensOfThread; ++k) share[k] = base, ratio[k] = T{0};
      return;
    }
    int64_t i = sequence_of(s, begin);
#pragma unroll
    for (int k = 0; k < kTokensOfThread; ++k) {
      if (k < n && k > 0 && (i == kNoSequence || begin + k >= s.starts[i + 1])) i = sequence_of(s, begin + k);
      const bool is_good = i != kNoSequence;
      share[k] = !is_good ? static_cast<T>(not_a_number()) : s.mean != PolicyMean::kNone ? static_cast<T>(s.coefficient[i]) : base;
      ratio[k] = is_good && p.tokens.has_sequence_ratio ? static_cast<T>(s.ratio[i]) : T{0};
    }
  }
  T share[kTokensOfThread], ratio[kTokensOfThread];
};

// The gradient and the sums of one thread's tokens, n of them (none or fewer: nothing).
template <typename T, PolicyKind kKind>
__device__ __forceinline__ void tokens_of_thread(const PolicyCall& p, int64_t begin, int64_t n, PolicyLaneSums<One<T>>& sums) {
  using L = One<T>;
  const PolicyTokens& t = p.tokens;
  PolicyConstants<L> c(t);
  c.coefficient = static_cast<T>(base_coefficient(p));
  const unsigned mask = mask_bits(t.mask, begin, n);
  const Values<T> logprobs(t.logprobs, begin, n, mask), old_logprobs(t.old_logprobs, begin, n, mask), advantages(t.advantages, begin, n, mask),
      ref_logprobs(t.ref_logprobs, begin, n, mask), entropy(t.entropy, begin, n, mask), weights(t.weights, begin, n, mask);
  const OfSequence<T> sequence(p, begin, n, c.coefficient);
  T grad[kTokensOfThread], grad_ratio[kTokensOfThread], grad_entropy[kTokensOfThread];
#pragma unroll
  for (int k = 0; k < kTokensOfThread; ++k) {
    const bool is_in = (mask >> k & 1u) != 0;
    const PolicyIn<L> x{logprobs.x[k], old_logprobs.x[k], advantages.x[k],           ref_logprobs.x[k],
                        entropy.x[k],  weights.x[k],      is_in ? sequence.ratio[k] : T{0}};
    const PolicyOut<L> y = policy_token<L, kKind>(t, c, x);
    const T share = is_in ? sequence.share[k] : T{0};
    grad[k] = is_in ? share * y.grad : T{0};
    grad_ratio[k] = is_in ? share * y.by_ratio : T{0};
    grad_entropy[k] = -c.entropy_coef * share;
    add_token<L>(sums, is_in, x, y, share, c);
  }
  store_values(t.grad_logprobs, begin, n, grad);
  if (t.grad_ratio != nullptr) store_values(t.grad_ratio, begin, n, grad_ratio);
  if (t.grad_entropy != nullptr) store_values(t.grad_entropy, begin, n, grad_entropy);
}

// One block for each kPolicyPart tokens: their sums go to parts[block].
template <typename T, PolicyKind kKind>
__global__ void __launch_bounds__(kTokenThreads, 1) tokens_of_call(PolicyCall p) {
  constexpr int kWarps = kTokenThreads / kWarp;
  __shared__ double of_warps[kWarps][kSums];
  const int64_t num_parts = (p.num_tokens + kPolicyPart - 1) / kPolicyPart;
  for (int64_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
    PolicyLaneSums<One<T>> sums{0, 0, 0, 0, 0, 0, 0, 0, 0};
    const int64_t begin = part * kPolicyPart + int64_t{threadIdx.x} * kTokensOfThread;
    if (begin < p.num_tokens) tokens_of_thread<T, kKind>(p, begin, p.num_tokens - begin, sums);
    const T values[kSums] = {sums.count, sums.ratio, sums.low, sums.high, sums.dual, sums.kl, sums.entropy, sums.policy, sums.loss};
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      const T total = warp_sum(values[k]);
      if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp][k] = static_cast<double>(total);
    }
    __syncthreads();
    if (threadIdx.x < kSums) {
      double total = 0;
      for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp][threadIdx.x];
      p.parts[part * kSums + threadIdx.x] = total;
    }
    __syncthreads();
  }
}

// One block, a warp for each sum.
__global__ void __launch_bounds__(kSums * kWarp) sums_of_call(PolicyCall p) {
  const int64_t num_parts = (p.num_tokens + kPolicyPart - 1) / kPolicyPart;
  const int sum = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double total = 0;
#pragma unroll 4
  for (int64_t part = lane; part < num_parts; part += kWarp) total += p.parts[part * kSums + sum];
  total = warp_sum(total);
  if (lane != 0) return;
  if (sum < kSums - 1) p.metrics[sum] = total;
  else if (p.dtype == Element::kDouble) *static_cast<double*>(p.loss) = total;
  else *static_cast<float*>(p.loss) = static_cast<float>(total);
}

// gspo: every masked token of a sequence moves the ratio of all of them. One block a sequence.
template <typename T>
__global__ void __launch_bounds__(kSequenceThreads) sequence_gradients(PolicyCall p) {
  __shared__ double scratch[kWarp];
  const T* by_ratio = static_cast<const T*>(p.tokens.grad_ratio);
  T* grad = static_cast<T*>(p.tokens.grad_logprobs);
  for (int64_t i = blockIdx.x; i < p.sequences.count; i += gridDim.x) {
    const Range range(p.sequences, p.num_tokens, i);
    double total = 0;
#pragma unroll 4
    for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kSequenceThreads) total += static_cast<double>(by_ratio[t]);
    const T share = static_cast<T>(block_sum(total, scratch) * p.sequences.slope[i]);
    for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kSequenceThreads)
      if (p.tokens.mask[t] != 0) grad[t] += share;
  }
}

template <typename T>
const char* tokens(const PolicyCall& p, void* stream) {
  const unsigned blocks = blocks_for((p.num_tokens + kPolicyPart - 1) / kPolicyPart);
  switch (p.tokens.kind) {
    case PolicyKind::kMin: return launch(tokens_of_call<T, PolicyKind::kMin>, blocks, kTokenThreads, 0, stream, p);
    case PolicyKind::kCispo: return launch(tokens_of_call<T, PolicyKind::kCispo>, blocks, kTokenThreads, 0, stream, p);
    default: return launch(tokens_of_call<T, PolicyKind::kReinforce>, blocks, kTokenThreads, 0, stream, p);
  }
}

template <typename T>
const char* run(const PolicyCall& p, void* stream) {
  const bool has_sequences = p.sequences.starts != nullptr && p.sequences.count > 0;
  const unsigned sequences = blocks_for(p.sequences.count);
  const char* problem = nullptr;
  if (has_sequences) problem = launch(sequences_of_call<T>, sequences, kSequenceThreads, 0, stream, p);
  if (problem == nullptr && has_sequences && p.sequences.mean == PolicyMean::kGroup)
    problem = launch(groups_of_call, sequences, kSequenceThreads, 0, stream, p);
  if (problem == nullptr && p.num_tokens > 0) problem = tokens<T>(p, stream);
  if (problem == nullptr) problem = launch(sums_of_call, 1, kSums * kWarp, 0, stream, p);
  if (problem == nullptr && has_sequences && p.tokens.grad_ratio != nullptr)
    problem = launch(sequence_gradients<T>, sequences, kSequenceThreads, 0, stream, p);
  return problem;
}

}  // namespace

const char* policy_loss(const PolicyCall& p, void* stream) {
  return p.dtype == Element::kDouble ? run<double>(p, stream) : run<float>(p, stream);
}

}  // namespace grpo_mc::cuda
