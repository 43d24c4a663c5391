// What one call of an operator works on: plain structs that the drivers fill in and the kernels of csrc/cpu/ and
// csrc/cuda/ read. No torch, no CUDA: the CUDA library knows nothing else of the outside.
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

// Logits [tokens, columns] on a GPU: column j is token vocab_start + j, and counts when j < valid. Strides are in elements;
// a row's entries are adjacent.
struct TokenRows {
  const void* logits;
  const int64_t* targets;  // token ids of the whole vocabulary; one outside [0, vocab_size) makes its row's results NaN
  int64_t tokens, columns, valid, stride, vocab_start, vocab_size;
  double inv_temperature;
  Element dtype;
};

// Results of each row, float or (of double logits) double; nullptr: not wanted. See RowStats for the last four.
struct TokenStats {
  TokenRows rows;
  void *logprobs, *entropy;
  double* lse;
  void *max, *sumexp, *sum_p_logit, *target_logit;
};

// The gradient of RowGrad for every row. `out` has the dtype of the logits and may be their memory.
struct TokenGrads {
  TokenRows rows;
  void* out;
  int64_t out_stride;
  const double *lse, *grad_logprobs;
  const double *entropy, *grad_entropy;  // nullptr: no gradient by the entropy
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

// Decode attention on a GPU. Query and out are contiguous, and so are the tables; strides are in elements.
struct PagedCall {
  const void* query;  // [rows, heads, head_dim]
  void* out;          // the same, in the same dtype
  const void *keys, *values;
  const int32_t *tables, *lengths;  // [rows, table_width], [rows]
  float* parts;  // memory for head_dim + 2 numbers of each row, head and part of kPagedPart positions
  int64_t rows, heads, kv_heads, head_dim, blocks, block_size, table_width, num_parts;
  int64_t key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride;
  double scale;
  Element query_dtype, cache_dtype;
  bool is_aligned;  // every cached row begins at a multiple of sixteen bytes
};

constexpr int64_t kPagedPart = 512;

// x [rows, width] to its rows over their root mean square, times weight [width]. Everything is contiguous.
struct RmsNorm {
  const float *x, *weight;
  float* out;
  int64_t rows, width;
  double eps;
};

// x [rows, depth] times weight [columns, depth] transposed. Strides are in elements; a row's entries are adjacent.
struct RowLinear {
  const float *x, *weight;
  float* out;
  int64_t rows, columns, depth, x_stride, weight_stride, out_stride;
};

constexpr int64_t kRowLinearStretch = 768;  // entries summed before the lanes are added up
constexpr int64_t kRowLinearGroup = 16;     // columns written at once: a cache line of every output row

// x [rows, columns] to codes [rows, columns] and a row of scales: rows that share tiles, of tile_columns entries each.
struct Fp8Quantize {
  const void* x;
  uint8_t* codes;
  float* scales;
  int64_t rows, columns, x_stride, tile_columns;
  Element dtype;
  bool power_of_two;
};

struct Fp8Dequantize {
  const uint8_t* codes;
  const float* scales;
  void* out;
  int64_t rows, columns, code_stride, tile_columns;
  Element dtype;
};

// Whole matrices: all bands of tile_rows rows; scales row by row. With offsets [experts + 1] tiles of 128 x 1 start again
// at each expert's first row (common/fp8.h), and rows of no expert have codes, and numbers, of 0. Offsets that fall or
// leave the matrix make results of no meaning, but touch nothing outside of it.
struct Fp8QuantizeTiles : Fp8Quantize {
  int64_t tile_rows;
  const int64_t* offsets;  // nullptr: none
  int64_t experts;
};

struct Fp8DequantizeTiles : Fp8Dequantize {
  int64_t tile_rows;
  const int64_t* offsets;
  int64_t experts;
};

// An operand [rows, depth] of a product. `stride` is between rows whose entries are adjacent; or, `by_depth`, between
// places of the depth at which the rows' entries are adjacent. A scale covers kFp8Block entries along the depth, and
// one row or, `square`, kFp8Block rows; scale_stride is from such a row of scales to the next.
struct Fp8Operand {
  const uint8_t* codes;
  const float* scale;
  int64_t stride, scale_stride, scale_block_stride;
  bool by_depth, square;
};

// a [rows, depth] times b [columns, depth] transposed.
struct Fp8Gemm {
  Fp8Operand a, b;
  void* out;  // float, or bfloat16
  int64_t rows, columns, depth, out_stride;
  int64_t group_columns;  // of one call's unit of work, a multiple of kFp8StripColumns
  Element dtype;
  bool accumulate;        // add to what `out` holds
};

// `product` for each of the experts, on a GPU. offsets nullptr: one expert that has all rows. Otherwise they divide the
// rows of a and out, and each expert has its own b; or, `along_depth`, the depth, and each expert has its own out, and
// scales as fp8_first_tile says: then product has the depth of all experts, and pointers at its start.
struct Fp8Products {
  Fp8Gemm product;
  const int64_t* offsets;  // [experts + 1], in device memory
  bool along_depth;
  int64_t first_expert, experts;  // first_expert: whose rows begin at offsets[0]; 0 but for along_depth
  int64_t b_stride, b_scale_stride, out_stride_bytes;  // from one expert to the next
  uint8_t* workspace;  // as many bytes as the library's fp8_workspace says
};

constexpr int64_t kFp8PanelRows = 6;      // rows of a packed panel of a
constexpr int64_t kFp8StripColumns = 32;  // columns of b that are decoded together
constexpr int64_t kFp8FewRows = 8;        // up to so many rows b is not packed

// One token's output: the sum over its k experts of prob * row, rows of index -1 left out, in the order of k.
struct MoeCombine {
  const void* rows;       // [R, width]
  const int64_t* map;     // [k] of this token
  const void* probs;      // [k] float, for rows of double double; nullptr: 1
  void* out;              // [width]
  int64_t k, width, row_stride;
  Element dtype;
};

// Where each choice's row goes: rows in the order of the experts, of one expert in the order of the choices. With a
// choice of an expert that there is not, no choice has a row, offsets[0] is that expert and offsets[num_experts] -1.
struct MoePlan {
  const int64_t* expert_ids;  // [choices]; -1: none
  int64_t* row_map;           // [choices]
  int64_t* offsets;           // [num_experts + 1]
  int64_t* scratch;           // [moe_plan_chunks * num_experts + 1]
  int64_t choices, num_experts, align;
  int64_t capacity;           // most rows of an expert; -1: no bound
};

// Choices are counted in so many chunks: short ones, while there are few counters.
constexpr int64_t moe_plan_chunks(int64_t choices, int64_t num_experts) {
  constexpr int64_t kChunk = 256, kMostCounters = int64_t{1} << 22;
  const int64_t wanted = (choices + kChunk - 1) / kChunk, most = kMostCounters / num_experts;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

// Each token's row to all its places of `map`, zeros to rows that no choice names. Strides are in bytes.
struct MoePermute {
  const void* x;        // [tokens, row_bytes]
  void* rows;           // [num_rows, row_bytes]
  const void* probs;    // [tokens, k] of prob_bytes each
  void* row_probs;      // [num_rows]
  const int64_t* map;   // [tokens, k]; what is no row is left out, of two choices with one row the later one counts
  int64_t* source;      // [num_rows]: written, the choice of each row or -1
  int64_t tokens, k, num_rows, row_bytes, x_stride, rows_stride, prob_bytes;
};

// out [tokens, width]: the sum over each token's k choices of prob * row, in their order. A row that there is not is NaN.
struct MoeUnpermute {
  const void* rows;     // [num_rows, width]
  const int64_t* map;   // [tokens, k]; -1: none
  const void* probs;    // [tokens, k] float, for rows of double double; nullptr: 1
  void* out;
  int64_t tokens, k, num_rows, width, row_stride, out_stride;  // strides in entries
  Element dtype;
};

// Its gradients: grad_rows = prob * grad_out of the row's token, 0 for rows of no token; grad_probs = row . grad_out.
struct MoeUnpermuteBackward {
  const void* grad_out;  // [tokens, width]
  const void* rows;      // [num_rows, width]
  const int64_t* map;    // [tokens, k]
  const void* probs;     // [tokens, k], as in MoeUnpermute
  void* grad_rows;       // [num_rows, width], contiguous
  double* grad_probs;    // [tokens, k]
  int64_t* source;       // [num_rows]: written, as in MoePermute
  int64_t tokens, k, num_rows, width, grad_stride, row_stride;
  Element dtype;
};

// x [n] to codes in blocks with a scale each; the last block is filled up with zeros. See cpu/int4.cpp.
struct CodeQuantize {
  const void* x;
  uint8_t* codes;        // 4 bits: [blocks, block / 2], two a byte; 8 bits: [blocks, block] int8
  float* scales;         // [blocks]
  int8_t* error_codes;   // [blocks, block]: what earlier calls left over, added to x and replaced; nullptr: none
  float* error_scales;   // [blocks]
  int64_t n, block;
  uint64_t seed, offset; // of stochastic rounding: the random number of entry i belongs to offset + i
  Element dtype;
  int bits;              // 4 or 8
  bool stochastic, hadamard;
};

struct CodeDequantize {
  const uint8_t* codes;
  const float* scales;
  void* out;             // [n]
  int64_t n, block;
  Element dtype;
  int bits;
  bool hadamard, add;    // add to what `out` holds
};

constexpr int64_t kCodesMaxBlock = 4096;

// The numbers of one Adam step, see common/adam.h.
struct AdamFactors {
  float grad;          // clip_coef / grad_scale
  float decay;         // 1 - lr * weight_decay
  float rest1;         // 1 - beta1
  float beta2, rest2;  // rest2: 1 - beta2
  float step_size;     // lr / (1 - beta1^step)
  float root;          // 1 / sqrt(1 - beta2^step)
  float eps;
};

// n entries of one tensor; the moments are float, or codes in blocks of kAdamBlock. Everything is contiguous.
struct AdamStep {
  float* params;
  const void* grads;                        // float, or bfloat16
  void *exp_avg, *exp_avg_sq;               // float [n], or codes [blocks, kAdamBlock * bits / 8]
  float *exp_avg_scale, *exp_avg_sq_scale;  // of codes: [blocks], and [blocks, 2], the lowest and the highest level
  uint16_t* out;                            // bfloat16 copy of the new parameters; nullptr: none
  int64_t n;
  uint64_t seed, step, offset;              // of random rounding; the random word of entry i belongs to offset + i
  AdamFactors factors;
  Element dtype;                            // of grads
  int bits;                                 // of a moment: 32, 8 or 4
};

enum class AdvantageScale : int { kStd, kLeaveOneOutStd, kBatchStd, kNone };

struct AdvantageOptions {
  double eps, ddof;
  AdvantageScale scale;
  bool leave_one_out;
};

// Advantages on a GPU. The rollouts sorted by group: order[i] has the group ids[i].
struct GroupAdvantages {
  const void* rewards;  // [count] float or double, by rollout as the rest
  const bool* valid;    // nullptr: all
  const int64_t *ids, *order;
  void* out;
  double* batch_std;    // memory for one number where the scale needs it, else nullptr
  int64_t count;
  AdvantageOptions options;
  Element dtype;
};

constexpr int kAdamBlock = 128;
enum class PolicyKind : int { kMin, kCispo, kReinforce };  // kMin: clip and the gspo kinds, by where the ratio comes from
enum class KlKind : int { kNone, kK1, kK2, kK3 };
enum class KlGradient : int { kDirect, kK2, kImportance };

// Sums over the tokens of the loss mask, in the order of the operator's metrics, then the loss.
struct PolicySums {
  double token_count = 0, ratio = 0, clip_low = 0, clip_high = 0, dual_clip = 0, kl = 0, entropy = 0, policy_loss = 0;
  double loss = 0;
};

// Packed tokens of a policy loss; every pointer is at token 0, values are float or double as the call says. Only a CPU
// reads `coefficients` and `sequence_ratio`: a GPU looks the token's sequence up.
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
  bool has_sequence_ratio;  // gspo kinds
};

enum class PolicyMean : int { kNone, kSequence, kGroup };  // whose tokens are counted, for aggregations that take a mean

// The sequences of a policy loss on a GPU: sequence i is tokens starts[i] to starts[i + 1]. The other pointers are memory
// for one entry a sequence, of which the kernels fill in what the call needs.
struct PolicySequences {
  const int64_t* starts;  // [count + 1]; nullptr: the call needs no sequences
  const int64_t* groups;  // [count], for PolicyMean::kGroup
  int64_t* tokens;        // of the loss mask; -1 where `starts` makes no sense
  double* coefficient;    // d loss / d token loss
  double *ratio, *slope;  // gspo kinds: exp of the mean log-ratio, and its derivative by one log-prob
  int64_t count;
  PolicyMean mean;
};

// A policy loss on a GPU.
struct PolicyCall {
  PolicyTokens tokens;
  PolicySequences sequences;
  const double* denominator;  // multiplies `coefficient` by its inverse; nullptr: that is done
  void* loss;                 // float or double
  double* metrics;            // [8]: PolicySums without the loss
  double* parts;              // memory for 9 sums of each kPolicyPart tokens
  int64_t num_tokens;
  Element dtype;
};

constexpr int64_t kPolicyPart = 1024;  // tokens whose sums one block of threads takes

}  // namespace grpo_mc
