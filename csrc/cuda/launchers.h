// The launcher of every kernel, each defined in the .cu file of its operator.
#pragma once

#include "common/arguments.h"

namespace grpo_mc::cuda {

const char* quantize_fp8(const Fp8QuantizeTiles& p, void* stream);
const char* dequantize_fp8(const Fp8DequantizeTiles& p, void* stream);
const char* quantize_codes(const CodeQuantize& p, void* stream);
const char* dequantize_codes(const CodeDequantize& p, void* stream);
const char* moe_plan(const MoePlan& p, void* stream);
const char* moe_permute(const MoePermute& p, void* stream);
const char* moe_unpermute(const MoeUnpermute& p, void* stream);
const char* moe_unpermute_backward(const MoeUnpermuteBackward& p, void* stream);
const char* fp8_products(const Fp8Products& p, void* stream);
int64_t fp8_workspace(const Fp8Products& p);
const char* adam_step(const AdamStep& p, void* stream);
const char* rms_norm(const RmsNorm& p, void* stream);
const char* token_logprobs(const TokenStats& p, void* stream);
const char* token_logprobs_backward(const TokenGrads& p, void* stream);
const char* policy_loss(const PolicyCall& p, void* stream);
const char* group_advantages(const GroupAdvantages& p, void* stream);
const char* row_linear(const RowLinear& p, void* stream);
const char* paged_attention(const PagedCall& p, void* stream);

}  // namespace grpo_mc::cuda
