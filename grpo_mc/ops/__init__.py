"""The operators: compiled code with a plain torch twin of the same name in grpo_mc.ops.reference.

Importing this package loads the compiled library; `info()` says what was loaded. Operators know no models, process
groups or files.
"""

from __future__ import annotations

from grpo_mc.ops.loader import OperatorsMissing, info
from grpo_mc.ops.paged_attention import paged_attention
from grpo_mc.ops.token_logprobs import token_logprob_stats, token_logprobs, token_logprobs_backward

__all__ = [
    "OperatorsMissing",
    "info",
    "paged_attention",
    "token_logprob_stats",
    "token_logprobs",
    "token_logprobs_backward",
]
