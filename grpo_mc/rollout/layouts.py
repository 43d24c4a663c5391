"""Attention layouts of the rollout engine: prompts that fill the cache, and rows that read it.

Shapes: T packed tokens, B rows (one token each), M blocks per row at most, Hq / Hkv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_mc.megatron.layout import AttentionLayout, SharedPrefixLayout
from grpo_mc.ops import paged_attention
from grpo_mc.rollout.kv_cache import KVCache


@dataclass
class PrefillLayout(SharedPrefixLayout):
    """Whole prompts, each attending to itself; their keys and values go into the cache."""

    cache: KVCache | None = None
    slots: Tensor | None = None
    """[T] int64, where each token's key and value go."""
    layer_offset: int = 0
    """Layers on earlier pipeline stages."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert self.cache is not None and self.slots is not None
        self.cache.write(layer_number - 1 - self.layer_offset, self.slots, key, value)
        return super().attend(layer_number, query, key, value, scale)


@dataclass
class DecodeLayout(AttentionLayout):
    """One new token per row, attending to what the cache holds of its sequence and to itself."""

    cache: KVCache | None = None
    slots: Tensor | None = None
    """[B] int64, where each row's key and value go."""
    block_tables: Tensor | None = None
    """[B, M] int32."""
    lengths: Tensor | None = None
    """[B] int32, tokens to attend to, the new one included."""
    layer_offset: int = 0

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert self.cache is not None and self.slots is not None
        assert self.block_tables is not None and self.lengths is not None
        layer = layer_number - 1 - self.layer_offset
        self.cache.write(layer, self.slots, key, value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return paged_attention(query, keys, values, self.block_tables, self.lengths, scale=scale)
