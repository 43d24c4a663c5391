"""Plain torch twins of the operators: what each fast operator means, written to be read.

Every function has the name, the arguments and the result of the operator of the same name in `grpo_mc.ops`. They work
in float32 or float64, use autograd where the operator registers a gradient, and are never optimised: tests compare the
operators with them, benchmarks take them as the baseline.
"""

from __future__ import annotations

from grpo_mc.ops.reference.adam import adam_step
from grpo_mc.ops.reference.fp8 import dequantize_fp8, fp8_gemm, fp8_grouped_gemm, fp8_grouped_wgrad, quantize_fp8
from grpo_mc.ops.reference.group_advantages import group_advantages
from grpo_mc.ops.reference.int4 import dequantize_int4, quantize_int4
from grpo_mc.ops.reference.int8 import dequantize_int8, quantize_int8
from grpo_mc.ops.reference.linear_logprobs import linear_logprob_stats, linear_logprobs
from grpo_mc.ops.reference.moe import moe_permute, moe_route, moe_unpermute
from grpo_mc.ops.reference.paged_attention import paged_attention
from grpo_mc.ops.reference.policy_loss import policy_loss
from grpo_mc.ops.reference.rms_norm import rms_norm
from grpo_mc.ops.reference.row_linear import row_linear
from grpo_mc.ops.reference.token_logprobs import token_logprob_stats, token_logprobs, token_logprobs_backward

__all__ = [
    "adam_step",
    "dequantize_fp8",
    "dequantize_int4",
    "dequantize_int8",
    "fp8_gemm",
    "fp8_grouped_gemm",
    "fp8_grouped_wgrad",
    "group_advantages",
    "linear_logprob_stats",
    "linear_logprobs",
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
