"""One prefill: prompts as packed rows, and what several of them begin with (a system prompt, examples) only once.

Prompts that begin alike are laid out as training lays out a group (see PrefixBlock): the common tokens, then the rest
of each prompt, which attends to them. Keys and values of the common tokens are then copied to the other prompts' blocks
of the cache. It is one level deep: what only some of the prompts share beyond the common tokens is computed for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mc.data.packing import IntArray, common_length
from grpo_mc.megatron.layout import PrefixBlock, make_block
from grpo_mc.rollout.kv_cache import KVCache

MIN_SHARED = 16
"""Fewer common tokens are not worth a block of their own."""


@dataclass(frozen=True)
class Prefill:
    """T rows that compute P prompts; tokens, positions and slots on the host, since they are padded there."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, places in the prompts."""
    slots: Tensor
    """[T] int64, where keys and values go."""
    last_rows: Tensor
    """[P] int64, the row of each prompt's last token."""
    blocks: tuple[PrefixBlock, ...]
    copies: tuple[tuple[Tensor, Tensor], ...]
    """(source [n], targets [m, n]): slots to copy when the rows are computed."""


def plan_prefill(
    prompts: Sequence[IntArray], tables: Sequence[tuple[int, ...]], cache: KVCache, *, share: bool, device: torch.device
) -> Prefill:
    """The rows that compute the prompts.

    Args:
        prompts: Token ids, at least one each.
        tables: The cache blocks of each prompt.
        share: False lays every prompt out by itself: then no bit of its numbers depends on the others.
    """
    clusters = common_beginnings(prompts) if share else [(len(ids), [at]) for at, ids in enumerate(prompts)]
    spans: list[tuple[int, int, int]] = []  # (prompt, first token, end) in row order
    blocks, copies, last_rows, row = [], [], np.zeros(len(prompts), np.int64), 0
    for common, members in clusters:
        block_start, lengths = row, [len(prompts[at]) - common for at in members]
        spans.append((members[0], 0, common))
        row += common
        starts = [row + before for before in np.cumsum([0, *lengths[:-1]]).tolist()]
        for at, length in zip(members, lengths, strict=True):
            spans.append((at, common, common + length))
            row += length
            last_rows[at] = row - 1
        blocks.append(make_block(block_start, common, starts, lengths, device))
        if len(members) > 1:
            slots = torch.stack([cache.slots(tables[at], 0, common) for at in members]).to(device)
            copies.append((slots[0], slots[1:]))
    return Prefill(
        tokens=torch.from_numpy(np.concatenate([prompts[at][first:end] for at, first, end in spans])),
        positions=torch.cat([torch.arange(first, end) for _, first, end in spans]),
        slots=torch.cat([cache.slots(tables[at], first, end - first) for at, first, end in spans]),
        last_rows=torch.from_numpy(last_rows).to(device),
        blocks=tuple(blocks),
        copies=tuple(copies),
    )


def common_beginnings(prompts: Sequence[IntArray]) -> list[tuple[int, list[int]]]:
    """Which prompts are computed together.

    Prompts belong together when their first MIN_SHARED tokens are the same and their lengths lie between the same
    powers of two: attention pads the rests of a block to the longest.

    Returns:
        (common tokens, places of the prompts), every prompt once. A prompt alone has its whole length in common; the
        prompts of a larger cluster keep at least one token each.
    """
    clusters: dict[tuple[int, bytes], list[int]] = {}
    for at, ids in enumerate(prompts):
        key = (len(ids).bit_length(), ids[:MIN_SHARED].tobytes())
        clusters.setdefault(key, []).append(at)
    found = []
    for members in clusters.values():
        common = common_length([prompts[at] for at in members])
        if len(members) > 1 and common >= MIN_SHARED:
            found.append((common, members))
        else:
            found += [(len(prompts[at]), [at]) for at in members]
    return found
