"""Attention layouts of the rollout engine: prompts that fill the cache, and rows that read it.

Shapes: T packed tokens, B rows (one token each), M blocks per row at most, Hq / Hkv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_mc.megatron.layout import AttentionLayout, SharedPrefixLayout
from grpo_mc.ops import paged_attention
from grpo_mc.rollout.kv_cache import KVCache

_PAGE = 1024


class RopeTable:
    """cos and sin of every position so far asked for, computed in pages of 1024 positions.

    The last bit of a cosine can depend on its place in the vector that the processor computes. Pages make it a function
    of the position alone, whatever else is in the batch.
    """

    def __init__(self) -> None:
        self.num_positions = 0
        """Positions that may be asked for; the engine raises it before each batch."""
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def lookup(self, positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D / 2] of positions [T] below num_positions; the other arguments never change."""
        have = 0 if self._cos_sin is None else len(self._cos_sin[0])
        if self._cos_sin is None or have < self.num_positions:
            self._cos_sin = self._extended(have, inverse_frequencies, dtype)
        cos, sin = self._cos_sin
        return cos[positions], sin[positions]

    def _extended(self, have: int, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = ([part] for part in self._cos_sin) if self._cos_sin is not None else ([], [])
        for start in range(have, self.num_positions, _PAGE):
            positions = torch.arange(start, start + _PAGE, device=inverse_frequencies.device)
            angle = positions[:, None, None].float() * inverse_frequencies
            cos.append(angle.cos().to(dtype))
            sin.append(angle.sin().to(dtype))
        return torch.cat(cos), torch.cat(sin)


@dataclass
class CacheLayout(AttentionLayout):
    """A batch whose keys and values go into the cache."""

    cache: KVCache | None = None
    slots: Tensor | None = None
    """[T] int64, where each token's key and value go."""
    layer_offset: int = 0
    """Layers on earlier pipeline stages."""
    rope: RopeTable = field(default_factory=RopeTable)

    def cos_sin(self, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._cos_sin is None:
            assert self.positions is not None
            self._cos_sin = self.rope.lookup(self.positions, inverse_frequencies, dtype)
        return self._cos_sin

    def store(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [T, Hkv, D]; returns the layer's caches, [N, block, Hkv, D] each."""
        assert self.cache is not None and self.slots is not None
        layer = layer_number - 1 - self.layer_offset
        self.cache.write(layer, self.slots, key, value)
        return self.cache.keys[layer], self.cache.values[layer]


@dataclass
class PrefillLayout(CacheLayout, SharedPrefixLayout):
    """Whole prompts, each attending to itself."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.store(layer_number, key, value)
        return super().attend(layer_number, query, key, value, scale)


@dataclass
class DecodeLayout(CacheLayout):
    """One new token per row, attending to what the cache holds of its sequence and to itself."""

    block_tables: Tensor | None = None
    """[B, M] int32."""
    lengths: Tensor | None = None
    """[B] int32, tokens to attend to, the new one included."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert self.block_tables is not None and self.lengths is not None
        keys, values = self.store(layer_number, key, value)
        return paged_attention(query, keys, values, self.block_tables, self.lengths, scale=scale)
