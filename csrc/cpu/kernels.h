// What csrc/cpu/kernels/*.cpp offer: serial kernels without torch, one copy per instruction set.
//
// GRPO_MC_KERNEL(name) names the copy for this machine. A kernel works on one row, one attention head or one fixed chunk
// of tokens, so results cannot depend on how these are spread over threads.
#pragma once

#include <cstdint>

namespace grpo_mc {

enum class Element : int { kFloat, kBFloat16, kDouble };

// Softmax statistics of one row of logits, over its valid columns. z = (x - max) / temperature.
struct RowStats {
  double max;    // largest logit, before temperature; -inf for a row without columns
  double sum;    // sum of exp(z)
  double sum_z;  // sum of exp(z) * z (0 when entropy is not asked for)
};

// Gradient of one row: out_j = inv_temperature * (-p_j * (grad_logprob + grad_entropy * (log p_j + entropy))), and
// + inv_temperature * grad_logprob at the target. `target` is a column of this row, or -1.
struct RowGrad {
  const void* logits;
  void* out;           // may be the same memory as logits
  int64_t num_valid;   // columns that take part; the rest of the row is set to 0
  int64_t num_columns;
  int64_t target;
  double inv_temperature, lse, entropy, grad_logprob, grad_entropy;
};

// One decode query over a paged cache. Strides are in elements; a token's D values are adjacent.
struct PagedHead {
  const float* query;       // [group, D] query heads that share this key-value head, scaled already
  float* out;               // [group, D]
  const void* keys;         // cache at block 0, slot 0, this head
  const void* values;
  const int32_t* blocks;    // block table of the row
  int64_t key_block_stride, key_slot_stride, value_block_stride, value_slot_stride;
  int64_t length, block_size, group, head_dim;
  float* scratch;           // at least paged_scratch_floats(group)
};

constexpr int64_t kPagedChunk = 128;  // tokens per step of the running softmax, whatever the block size
constexpr int64_t paged_scratch_floats(int64_t group) { return group * (kPagedChunk + 2); }

// x [rows, depth] times weight [columns, depth] transposed. Strides are in elements; a row's entries are adjacent.
struct RowLinear {
  const float *x, *weight;
  float* out;
  int64_t rows, depth, x_stride, weight_stride, out_stride;
};

constexpr int64_t kRowLinearStretch = 768;  // entries summed before the lanes are added up
constexpr int64_t kRowLinearGroup = 16;     // columns written at once: a cache line of every output row

enum class PolicyKind : int { kMin, kCispo, kReinforce };  // kMin: clip and the gspo kinds, by where the ratio comes from
enum class KlKind : int { kNone, kK1, kK2, kK3 };
enum class KlGradient : int { kDirect, kK2, kImportance };

// Sums over the tokens of the loss mask, in the order of the operator's metrics, then the loss.
struct PolicySums {
  double token_count = 0, ratio = 0, clip_low = 0, clip_high = 0, dual_clip = 0, kl = 0, entropy = 0, policy_loss = 0;
  double loss = 0;
};

// Packed tokens of a policy loss; every pointer is at token 0, values are float or double as the call says.
struct PolicyTokens {
  const void *logprobs, *old_logprobs, *advantages;
  const uint8_t* mask;
  const void *ref_logprobs, *entropy, *weights;  // nullptr: absent
  const void* coefficients;    // d loss / d token loss; nullptr: `coefficient` for every token
  const void* sequence_ratio;  // gspo kinds; nullptr: the token's own ratio
  void* grad_logprobs;
  void* grad_ratio;    // gspo: d loss / d sequence_ratio of each token, left out of grad_logprobs; else nullptr
  void* grad_entropy;  // nullptr: not wanted
  double coefficient, clip_low, clip_high, dual_clip, beta, entropy_coef;  // dual_clip 0: off
  PolicyKind kind;
  KlKind kl;
  KlGradient kl_gradient;
};

#define GRPO_MC_DECLARE_KERNELS(isa)                                                                         \
  namespace isa {                                                                                            \
  RowStats row_stats(const void* logits, Element dtype, int64_t n, double inv_temperature, bool with_sum_z); \
  void row_grad(const RowGrad& row, Element dtype);                                                          \
  void paged_attention_head(const PagedHead& head, Element cache);                                           \
  void row_linear_columns(const RowLinear& p, float* scratch, int64_t begin, int64_t end);                   \
  void rms_norm_row(const float* x, const float* weight, float* out, int64_t width, double eps);             \
  PolicySums policy_loss_chunk(const PolicyTokens& tokens, Element dtype, int64_t begin, int64_t end);       \
  }

GRPO_MC_DECLARE_KERNELS(generic)
#if defined(GRPO_MC_HAVE_AVX2)
GRPO_MC_DECLARE_KERNELS(avx2)
#define GRPO_MC_KERNEL(name) (::grpo_mc::use_avx2() ? ::grpo_mc::avx2::name : ::grpo_mc::generic::name)
#else
#define GRPO_MC_KERNEL(name) (::grpo_mc::generic::name)
#endif

// True when the processor has AVX2, FMA and F16C and GRPO_MC_CPU_ISA does not say "generic". Read once.
bool use_avx2();

}  // namespace grpo_mc
