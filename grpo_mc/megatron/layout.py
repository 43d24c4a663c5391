"""What attention must know of a packed micro-batch, and the attention itself.

Megatron-Core hands `packed_seq_params` through every layer, on every pipeline stage, to the core attention. Ours is an
`AttentionLayout`: it knows the tokens' positions, applies RoPE by them, and computes attention over its own structure.
Training uses `SharedPrefixLayout`: a group is one prompt followed by its responses. A response sees the prompt and
itself, never its siblings, so the prompt is computed once for the whole group, forward and backward, with the loss and
gradients of separate sequences; what all prompts of a micro-batch begin with is computed once for all of them. The
rollout engine has layouts of its own over a key-value cache.

Shapes: T packed tokens, Hq and Hkv query and key-value heads of this tensor-parallel rank, D head size, G responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def rope_inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Inverse RoPE frequencies [D / 2], float32.

    Args:
        head_dim: D.
        theta: Base of the geometric series.
        scaling: None; {"rope_type": "linear", "factor"}; or {"rope_type": "llama3", "factor", "low_freq_factor",
            "high_freq_factor", "original_max_position_embeddings"} (Llama 3's blend of long and short wavelengths).

    Raises:
        ValueError: Another rope_type.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling is None or kind == "default":
        return inverse
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind == "llama3":
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return inverse / factor * (1 - blend) + inverse * blend
    raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split form of the Llama family. x [T, H, D]; cos, sin [T, 1, D / 2] -> [T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass
class AttentionLayout(PackedSeqParams):
    """The structure of a packed micro-batch; subclasses say how its tokens attend to each other."""

    qkv_format: str = "thd"
    positions: Tensor | None = None
    """[T] int64, the position of each token in its own sequence."""
    scored_rows: Tensor | None = None
    """[S] int64, rows whose hidden states go through the output layer; None = all."""
    returns_hidden: bool = False
    """The model stops before its output layer and returns the hidden states of scored_rows."""
    _cos_sin: tuple[Tensor, Tensor] | None = None

    def cos_sin(self, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D / 2] of this micro-batch's positions; computed by the first layer, used by all."""
        if self._cos_sin is None:
            assert self.positions is not None
            angle = self.positions[:, None, None].float() * inverse_frequencies
            self._cos_sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return self._cos_sin

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of rotated query [T, Hq, D] over rotated key and value [T, Hkv, D] -> [T, Hq, D]."""
        raise NotImplementedError


@dataclass(frozen=True)
class PrefixBlock:
    """One prompt and the responses that share it, as rows of the packed micro-batch."""

    start: int
    prompt_length: int
    response_rows: Tensor | None
    """[G, R] int64: rows of each response, the last row repeated past its end; None without responses."""
    response_valid: Tensor | None
    """[G * R] int64: places in the flattened [G, R] that are real tokens, in row order."""
    beginning_length: int = 0
    """The first so many rows of the micro-batch, a block of their own, are the beginning of this prompt too."""

    @property
    def prompt(self) -> slice:
        """The prompt's rows, without the beginning."""
        return slice(self.start, self.start + self.prompt_length)

    def prefix(self, x: Tensor) -> Tensor:
        """Keys or values [T, H, D] of the whole prompt, beginning included, as [1, H, P, D]."""
        own = x[self.prompt]
        return _heads_first(torch.cat([x[: self.beginning_length], own]) if self.beginning_length else own)


def make_block(
    start: int, prompt_length: int, starts: list[int], lengths: list[int], device: torch.device,
    beginning_length: int = 0,
) -> PrefixBlock:  # fmt: skip
    """The block of a prompt at row `start` whose responses begin at `starts` and have `lengths` tokens (0 is legal)."""
    fed = [(s, n) for s, n in zip(starts, lengths, strict=True) if n > 0]
    if not fed:
        return PrefixBlock(start, prompt_length, None, None, beginning_length)
    longest = max(n for _, n in fed)
    first = torch.tensor([s for s, _ in fed])[:, None]
    length = torch.tensor([n for _, n in fed])[:, None]
    step = torch.arange(longest)[None]
    rows = first + torch.minimum(step, length - 1)
    valid = (step < length).flatten().nonzero()[:, 0]
    return PrefixBlock(start, prompt_length, rows.to(device), valid.to(device), beginning_length)


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return x.transpose(0, 1)[None]


def _causal_mask(rows: int, before: int, device: torch.device) -> Tensor:
    """[rows, before + rows] bool: a row sees the `before` first columns, the rows before it and itself."""
    return torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril(before)


@dataclass
class SharedPrefixLayout(AttentionLayout):
    """Training and scoring: blocks of one prompt and the responses that share it."""

    blocks: tuple[PrefixBlock, ...] = ()

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = [part for block in self.blocks for part in self._attend_block(block, query, key, value, scale)]
        return torch.cat(parts) if parts else torch.empty_like(query)

    @staticmethod
    def _attend_block(block: PrefixBlock, query: Tensor, key: Tensor, value: Tensor, scale: float) -> list[Tensor]:
        prefix_key, prefix_value = block.prefix(key), block.prefix(value)
        before, own = block.beginning_length, block.prompt_length
        out = F.scaled_dot_product_attention(
            _heads_first(query[block.prompt]), prefix_key, prefix_value, scale=scale, enable_gqa=True,
            is_causal=not before, attn_mask=_causal_mask(own, before, query.device) if before else None,
        )  # fmt: skip
        parts = [out[0].transpose(0, 1)]
        if block.response_rows is None or block.response_valid is None:
            return parts
        rows = block.response_rows
        count, longest = rows.shape
        take = lambda x: x[rows].transpose(1, 2)  # noqa: E731 - [G, H, R, D]
        # Rows past a response's end come after all of its tokens, so the causal mask alone hides them.
        out = F.scaled_dot_product_attention(
            take(query),
            torch.cat([prefix_key.expand(count, -1, -1, -1), take(key)], 2),
            torch.cat([prefix_value.expand(count, -1, -1, -1), take(value)], 2),
            attn_mask=_causal_mask(longest, before + own, query.device),
            scale=scale,
            enable_gqa=True,
        )
        parts.append(out.transpose(1, 2).reshape(count * longest, *query.shape[1:])[block.response_valid])
        return parts
