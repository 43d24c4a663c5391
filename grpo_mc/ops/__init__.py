"""The operators: compiled code with a plain torch twin of the same name in grpo_mc.ops.reference.

Importing this package loads the compiled library; `info()` says what was loaded. Operators know no models, process
groups or files.
"""

from __future__ import annotations

from grpo_mc.ops.adam import AdamState, adam_state, adam_step
from grpo_mc.ops.fp8 import dequantize_fp8, fp8_gemm, fp8_grouped_gemm, fp8_grouped_wgrad, quantize_fp8
from grpo_mc.ops.group_advantages import group_advantages
from grpo_mc.ops.int4 import Int4Error, dequantize_int4, int4_error, quantize_int4
from grpo_mc.ops.int8 import dequantize_int8, quantize_int8
from grpo_mc.ops.linear_logprobs import linear_logprob_stats, linear_logprobs, linear_logprobs_backward
from grpo_mc.ops.loader import OperatorsMissing, info
from grpo_mc.ops.moe import moe_permute, moe_route, moe_unpermute
from grpo_mc.ops.paged_attention import paged_attention
from grpo_mc.ops.policy_loss import PolicyLoss, policy_loss
from grpo_mc.ops.rms_norm import rms_norm
from grpo_mc.ops.row_linear import row_linear
from grpo_mc.ops.token_logprobs import token_logprob_stats, token_logprobs, token_logprobs_backward

__all__ = [
    "AdamState",
    "Int4Error",
    "OperatorsMissing",
    "PolicyLoss",
    "adam_state",
    "adam_step",
    "dequantize_fp8",
    "dequantize_int4",
    "dequantize_int8",
    "fp8_gemm",
    "fp8_grouped_gemm",
    "fp8_grouped_wgrad",
    "group_advantages",
    "info",
    "int4_error",
    "linear_logprob_stats",
    "linear_logprobs",
    "linear_logprobs_backward",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "paged_attention",
    "policy_loss",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "rms_norm",
    "row_linear",
    "token_logprob_stats",
    "token_logprobs",
    "token_logprobs_backward",
]
