// What csrc/cpu/*.cpp offer: serial kernels without torch, one copy per instruction set.
//
// GRPO_MC_KERNEL(name) names the copy for this machine. A kernel works on one row, one attention head or one fixed chunk
// of tokens, so results cannot depend on how these are spread over threads.
#pragma once

#include "common/arguments.h"

namespace grpo_mc {

#define GRPO_MC_DECLARE_KERNELS(isa)                                                                         \
  namespace isa {                                                                                            \
  RowStats row_stats(const void* logits, Element dtype, int64_t n, double inv_temperature, bool with_sum_z); \
  void row_grad(const RowGrad& row, Element dtype);                                                          \
  void paged_attention_head(const PagedHead& head, Element cache);                                           \
  void row_linear_columns(const RowLinear& p, float* scratch, int64_t begin, int64_t end);                   \
  void fp8_quantize_band(const Fp8Quantize& p);                                                              \
  void fp8_dequantize_band(const Fp8Dequantize& p);                                                          \
  void fp8_pack_panel(const Fp8Gemm& p, int64_t panel, float* packed);                                       \
  void fp8_gemm_group(const Fp8Gemm& p, const float* packed, int64_t group, float* scratch);                 \
  void fp8_decode_row(const Fp8Gemm& p, int64_t row, float* decoded);                                        \
  void fp8_few_rows_group(const Fp8Gemm& p, const float* rows, int64_t group);                               \
  void moe_copy_row(const char* from, char* to, int64_t bytes);                                              \
  void moe_combine_token(const MoeCombine& p);                                                               \
  double moe_dot_row(const void* a, const void* b, int64_t width, Element dtype);                            \
  void quantize_code_block(const CodeQuantize& p, int64_t index);                                            \
  void dequantize_code_block(const CodeDequantize& p, int64_t index);                                        \
  void adam_step_range(const AdamStep& p, int64_t begin, int64_t end);                                       \
  void adam_step_block(const AdamStep& p, int64_t index);                                                    \
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
