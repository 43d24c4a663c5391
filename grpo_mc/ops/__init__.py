"""The operators: compiled code with a plain torch twin of the same name in grpo_mc.ops.reference.

Importing this package loads the compiled library; `info()` says what was loaded. Operators know no models, process
groups or files.
"""

from __future__ import annotations

from grpo_mc.ops.group_advantages import group_advantages
from grpo_mc.ops.loader import OperatorsMissing, info
from grpo_mc.ops.paged_attention import paged_attention
from grpo_mc.ops.policy_loss import PolicyLoss, policy_loss
from grpo_mc.ops.rms_norm import rms_norm
from grpo_mc.ops.row_linear import row_linear
from grpo_mc.ops.token_logprobs import token_logprob_stats, token_logprobs, token_logprobs_backward

__all__ = [
    "OperatorsMissing",
    "PolicyLoss",
    "group_advantages",
    "info",
    "paged_attention",
    "policy_loss",
    "rms_norm",
    "row_linear",
    "token_logprob_stats",
    "token_logprobs",
    "token_logprobs_backward",
]
