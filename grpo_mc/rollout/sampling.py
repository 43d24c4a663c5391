"""From logits to tokens: temperature, top-k, top-p, and the log-prob of what was drawn.

A token is drawn by inverting the cumulative distribution at one given uniform number, so that the draw is a pure
function of the logits and the number. The log-prob reported is that of the tempered distribution over the whole
vocabulary, the one that the trainer computes; top-k and top-p restrict what can be drawn and do not enter it.

Shapes: S rows of logits, B draws, V vocabulary. The G first tokens of a group are draws from one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1024
"""Entries of a block of invert_cdf."""
_NUCLEUS = 512
"""Tokens that top-p looks at before it sorts the whole vocabulary."""


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

    def __post_init__(self) -> None:
        """Raises: ValueError: a value that no distribution or response has."""
        for name, good, needed in (
            ("temperature", 0.0 <= self.temperature < math.inf, "0 or a positive number"),
            ("top_k", self.top_k >= 0, "0 (off) or a count"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1 (off)"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("stop", "" not in self.stop, "without the empty string, which ends every response at once"),
        ):
            if not good:
                raise ValueError(f"sampling: {name} is {getattr(self, name)!r}; it must be {needed}")


def restrict(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets to zero what top-k and top-p exclude.

    Ties at the edge go to the lower token id. Top-p acts on what top-k left: it keeps a token when the probability of
    all more likely tokens is still below top_p of the whole, so the most likely token always stays.

    Args:
        probs: [S, V] float32.

    Returns:
        [S, V] float32, not normalised again.
    """
    size = probs.shape[-1]
    if not 0 < top_k < size:
        top_k = size
    if top_p < 1.0:
        counts, edge = _nucleus(probs, top_k, top_p)
    elif top_k < size:
        edge = probs.topk(top_k, dim=-1).values[:, -1:]
        counts = torch.full_like(edge, top_k, dtype=torch.int64)
    else:
        return probs
    keep, ties = probs > edge, probs == edge
    room = counts - keep.sum(-1, keepdim=True)
    if bool((ties.sum(-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(-1) <= room
    return torch.where(keep | ties, probs, 0.0)


def _nucleus(probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """How many tokens top-p keeps of the top_k most likely, [S, 1] int64, and the least probability kept, [S, 1]."""
    look = min(top_k, _NUCLEUS)
    while True:
        # Few tokens nearly always hold the mass, and finding them is much cheaper than sorting the vocabulary.
        ordered = probs.topk(look, dim=-1).values.double()
        sums = ordered.cumsum(-1)
        total = sums[:, -1:] if look == top_k else probs.sum(-1, keepdim=True, dtype=torch.float64)
        if look == top_k or (top_k == probs.shape[-1] and bool((sums[:, -1:] >= top_p * total).all())):
            break
        look = top_k
    counts = (sums - ordered < top_p * total).sum(-1, keepdim=True).clamp(min=1)
    return counts, ordered.gather(-1, counts - 1).to(probs.dtype)


def invert_cdf(weights: Tensor, uniform: Tensor, rows: Tensor) -> Tensor:
    """Draws indices with probability proportional to a row's weights.

    The first index whose cumulative weight exceeds uniform * total. Two levels, blocks then entries, in float64: exact
    enough for any vocabulary, and one pass over the weights.

    Args:
        weights: [S, V] float32, not negative, each row with a positive sum.
        uniform: [B] float64 in (0, 1).
        rows: [B] int64, the row of weights that each draw is from.

    Returns:
        [B] int64.
    """
    size = weights.shape[1]
    blocks = -(-size // _BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - size)) if size % _BLOCK else weights
    tiles = padded.view(-1, blocks, _BLOCK)
    edges = tiles.sum(-1).double().cumsum(-1)[rows]  # [B, blocks]
    total = edges[:, -1]
    # Below the total even where the product rounds up to it, so that the block found holds some weight.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(edges, target[:, None], right=True)[:, 0]
    before = torch.where(block > 0, edges.gather(-1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = tiles[rows, block].double()
    within = torch.searchsorted(inside.cumsum(-1), (target - before)[:, None], right=True)[:, 0]
    # Rounding can leave the target just past the block's end: take its last entry that has any weight.
    last = _BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1)
    return block * _BLOCK + torch.minimum(within, last)


class NonFiniteLogits(ValueError):
    """The weights give no distribution to sample from."""


def sample(
    logits: Tensor, uniform: Tensor, params: SamplingParams, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws tokens.

    Args:
        logits: [S, V], any float dtype, without vocabulary padding.
        uniform: [B] float64 in (0, 1).
        rows: [B] int64, the row of logits that each draw is from; None = one draw from each row.

    Returns:
        tokens [B] int64 and log-probs [B] float32 under the tempered, unrestricted distribution.

    Raises:
        NonFiniteLogits: A row of logits holds NaN or +inf.
    """
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    scaled = logits.float()
    if params.temperature not in (0.0, 1.0):
        scaled = scaled / params.temperature
    probs = torch.softmax(scaled, dim=-1)
    if not torch.isfinite(probs[:, 0]).all():
        raise NonFiniteLogits("sample: logits hold NaN or +inf")
    if params.temperature == 0.0:
        tokens = scaled.argmax(-1)[rows]
    else:
        tokens = invert_cdf(restrict(probs, params.top_k, params.top_p), uniform, rows)
    # In float64: log of float32 may depend on a row's place in its vector register.
    return tokens, probs[rows, tokens].double().log().float()
