"""From logits to tokens: temperature, top-k, top-p, and the log-prob of what was drawn.

A token is drawn by inverting the cumulative distribution at one given uniform number, so that the draw is a pure function
of the logits and the number. The log-prob reported is that of the tempered distribution over the whole vocabulary, the
one that the trainer computes; top-k and top-p restrict what can be drawn and do not enter it.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 = the most likely token (its log-prob is then reported at temperature 1)."""
    top_k: int = 0
    """Only the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens whose probability reaches this (arXiv 1904.09751)."""
    max_new_tokens: int = 16
    """Tokens per response at most."""
    stop: tuple[str, ...] = ()
    """A response ends when its text holds one of these."""
    ignore_eos: bool = False
    """Sample on past end-of-sequence tokens, to the token limit."""


def restrict(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets to zero what top-k and top-p exclude.

    Ties at the edge of top-k go to the lower token id. top_p keeps a token when the probability of all more likely
    tokens is still below it, so the most likely token always stays.

    Args:
        probs: [B, V] float32.

    Returns:
        [B, V] float32, not normalised again.
    """
    if top_k <= 0 and top_p >= 1.0:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if 0 < top_k < probs.shape[-1]:
        keep[:, top_k:] = False
    if top_p < 1.0:
        # Top-p acts on what top-k left, as its users expect.
        left = torch.where(keep, ordered, 0.0).double()
        before = left.cumsum(-1) - left
        keep &= before < top_p * left.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, torch.where(keep, ordered, 0.0))


def invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draws one index per row with probability proportional to its weight.

    The first index whose cumulative weight exceeds uniform * total. Two levels, blocks then entries, in float64: exact
    enough for any vocabulary, and one pass over the row.

    Args:
        weights: [B, V] float32, not negative, each row with a positive sum.
        uniform: [B] float64 in (0, 1).

    Returns:
        [B] int64.
    """
    rows, size = weights.shape
    blocks = -(-size // _BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - size)) if size % _BLOCK else weights
    tiles = padded.view(rows, blocks, _BLOCK)
    edges = tiles.sum(-1).double().cumsum(-1)  # [B, blocks]
    target = uniform * edges[:, -1]
    block = torch.searchsorted(edges, target[:, None], right=True)[:, 0].clamp(max=blocks - 1)
    at = torch.arange(rows, device=weights.device)
    before = torch.where(block > 0, edges[at, block - 1], 0.0)
    inside = tiles[at, block].double()
    within = torch.searchsorted(inside.cumsum(-1), (target - before)[:, None], right=True)[:, 0]
    # Rounding can leave the target just past the block's end: take its last entry that has any weight.
    last = _BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block * _BLOCK + torch.minimum(within, last)


def sample(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits: [B, V], any float dtype, without vocabulary padding.
        uniform: [B] float64 in (0, 1).

    Returns:
        tokens [B] int64 and log-probs [B] float32 under the tempered, unrestricted distribution.

    Raises:
        ValueError: A row of logits holds NaN.
    """
    scaled = logits.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    probs = torch.softmax(scaled, dim=-1)
    if not torch.isfinite(probs[:, 0]).all():
        raise ValueError("sample: logits hold NaN or +inf; the weights have diverged (lower optimizer.lr)")
    if params.temperature == 0.0:
        tokens = scaled.argmax(-1)
    else:
        tokens = invert_cdf(restrict(probs, params.top_k, params.top_p), uniform)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log()
