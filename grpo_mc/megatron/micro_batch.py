"""A packed micro-batch as tensors on this rank's device, ready for the model and the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mc.algorithms.loss import LossInputs
from grpo_mc.data.packing import PackedBatch
from grpo_mc.megatron.layout import SharedPrefixLayout, make_block


@dataclass
class MicroBatch:
    """What one forward and backward pass sees on one rank: T fed tokens, S scored tokens."""

    packed: PackedBatch
    """Lengths and order, on the host."""
    tokens: Tensor
    """[T] int64."""
    layout: SharedPrefixLayout
    targets: Tensor
    """[S] int64."""
    loss: LossInputs | None = None
    """Advantages, masks and old log-probs; None for a scoring pass."""


def make_micro_batch(packed: PackedBatch, device: torch.device, loss: LossInputs | None = None) -> MicroBatch:
    """Tensors and attention layout of a packed micro-batch."""
    to_device = lambda array: torch.from_numpy(array).to(device)  # noqa: E731 - four uses, one line
    blocks = tuple(
        make_block(
            b.start, b.prompt_length, list(b.response_starts), list(b.response_lengths), device, b.beginning_length
        )
        for b in packed.blocks
    )
    layout = SharedPrefixLayout(
        positions=to_device(packed.positions), scored_rows=to_device(packed.scored_rows), blocks=blocks
    )
    return MicroBatch(packed, to_device(packed.tokens), layout, to_device(packed.targets), loss)
