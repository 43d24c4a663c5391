"""Plain torch twins of the operators: what each fast operator means, written to be read.

Every function has the name, the arguments and the result of the operator of the same name in `grpo_mc.ops`. They work
in float32 or float64, use autograd where the operator registers a gradient, and are never optimised: tests compare the
operators with them, benchmarks take them as the baseline.
"""

from __future__ import annotations

from grpo_mc.ops.reference.group_advantages import group_advantages
from grpo_mc.ops.reference.paged_attention import paged_attention
from grpo_mc.ops.reference.policy_loss import policy_loss
from grpo_mc.ops.reference.rms_norm import rms_norm
from grpo_mc.ops.reference.row_linear import row_linear
from grpo_mc.ops.reference.token_logprobs import token_logprob_stats, token_logprobs, token_logprobs_backward

__all__ = [
    "group_advantages",
    "paged_attention",
    "policy_loss",
    "rms_norm",
    "row_linear",
    "token_logprob_stats",
    "token_logprobs",
    "token_logprobs_backward",
]
