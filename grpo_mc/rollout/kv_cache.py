"""The key-value cache: blocks of tokens, shared between the responses of a group.

As in vLLM's PagedAttention (arXiv 2309.06180) a sequence is a table of blocks. The full blocks of a prompt stand once
and are read by all G responses of its group; only the last, partly filled block is copied for each response, which
then writes into its own. Rows join and leave a batch by their tables alone: nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """The blocks of one response: `shared` belong to its group's prompt, `own` to itself."""

    shared: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def table(self) -> tuple[int, ...]:
        """All blocks, in the order of the tokens."""
        return self.shared + self.own


class KVCache:
    """Keys and values of one pipeline stage's layers. Block 0 is scratch: padding rows write there."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Allocates 2 * num_layers * (num_blocks + 1) * block_size * num_kv_heads * head_dim elements."""
        shape = (num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))
        self._readers: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_of_group(self, prompt_length: int, num_responses: int, max_new_tokens: int) -> int:
        """Blocks that a group needs at most."""
        shared = prompt_length // self.block_size
        return shared + num_responses * (self.blocks_for(prompt_length + max_new_tokens) - shared)

    def admit(self, prompt_length: int, num_responses: int, max_new_tokens: int) -> list[Sequence]:
        """Reserves the blocks of a group, to the token limit, so that no response can run out later.

        The caller has asked `blocks_of_group` and compared it with `num_free`.
        """
        shared = tuple(self._take() for _ in range(prompt_length // self.block_size))
        for block in shared:
            self._readers[block] = num_responses
        own = self.blocks_for(prompt_length + max_new_tokens) - len(shared)
        return [Sequence(shared, tuple(self._take() for _ in range(own))) for _ in range(num_responses)]

    def release(self, sequence: Sequence) -> None:
        """Gives a finished response's blocks back; the prompt's go back with its last reader."""
        self._free.extend(sequence.own)
        for block in sequence.shared:
            self._readers[block] -= 1
            if not self._readers[block]:
                del self._readers[block]
                self._free.append(block)

    def slots(self, table: tuple[int, ...], first: int, count: int) -> Tensor:
        """[count] int64: places in the flattened cache of a sequence's tokens first .. first + count - 1."""
        at = torch.arange(first, first + count)
        blocks = torch.tensor(table, dtype=torch.int64)
        return blocks[at // self.block_size] * self.block_size + at % self.block_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value [T, Hkv, D] of layer `layer` (counted on this stage) at `slots` [T]."""
        self.keys[layer].flatten(0, 1)[slots] = key
        self.values[layer].flatten(0, 1)[slots] = value

    def copy_tokens(self, source: Tensor, targets: Tensor) -> None:
        """Copies the tokens at slots `source` [n], in every layer, to each row of `targets` [m, n]."""
        for cache in (self.keys, self.values):
            tokens = cache.flatten(1, 2)
            tokens[:, targets] = tokens[:, source][:, None]

    def copy_block(self, source: int, targets: list[int]) -> None:
        """Copies a block, in every layer, to each target."""
        if targets:
            self.keys[:, targets] = self.keys[:, source : source + 1].clone()  # torch refuses overlapping views
            self.values[:, targets] = self.values[:, source : source + 1].clone()  # torch refuses overlapping views

    def _take(self) -> int:
        return self._free.pop()
