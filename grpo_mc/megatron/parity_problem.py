"""What `grpo-mc check parity` trains on: a tiny model, one training batch and two objectives, the same on every layout.

Everything random comes from a generator keyed by a name or a position, never from one that ranks share, so a rank that
reads a slice, or trains on some of the groups, meets the same numbers as a single process that has them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from grpo_mc.algorithms.denominators import Denominators, count_denominators
from grpo_mc.algorithms.loss import LossInputs, apply_correction
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupLengths, MicroBatch, measure, plan_micro_batches
from grpo_mc.data.packing import PackedBatch, pack
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.hf_mapping import hf_tensor_shapes

OBJECTIVES: Mapping[str, AlgorithmConfig] = {
    "token_mean": AlgorithmConfig(aggregation="token_mean"),
    "sequence_mean": AlgorithmConfig(
        aggregation="sequence_mean_token_mean", beta=0.05, kl="k3", entropy_coef=0.01, dual_clip=3.0, correction="tis"
    ),
}
"""Name -> section `algorithm`. The second has every term that the first has not."""

_BEGINNING = 12
"""Tokens that all prompts begin with."""
_PROMPT_LENGTHS = (3, 9, 5, 1, 7)
"""Without the beginning."""
_RESPONSE_LENGTHS = ((4, 1, 7, 2), (5, 0, 3, 6), (2, 8, 8, 1), (6, 3, 1, 9), (1, 1, 2, 12))
"""Ragged; one response is empty."""
_MASKED_ROLLOUT = (2, 1)
"""(group, sample) that is in the batch but not in the loss."""


def generator(*key: object) -> np.random.Generator:
    """The generator of a key: the same on every rank and machine."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


class KeyedWeights:
    """A TensorSource that makes each tensor from a generator keyed by its name."""

    def __init__(self, architecture: ModelArchitecture, seed: int = 0) -> None:
        self._shapes, self._seed = hf_tensor_shapes(architecture), seed

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, float32, or rows [start, stop) of it. Norms are around 1, the rest around 0."""
        shape = self._shapes[name]
        values = generator("weight", self._seed, name).standard_normal(shape, np.float32)
        # A router's logits are spread out, so that no rounding difference changes which experts a token takes.
        values *= 0.1 if len(shape) == 1 else 0.3 if name.endswith("gate.weight") else 0.05
        if len(shape) == 1 and not name.endswith("bias"):
            values += 1
        return torch.from_numpy(values if rows is None else values[rows[0] : rows[1]].copy())


class Problem:
    """The training batch.

    Its old, rollout and reference log-probs are drawn around `base_logprobs`, those that the reference measured, so
    that ratios lie on both sides of the clips for any model, and are the same numbers on every layout.
    """

    def __init__(self, vocab_size: int) -> None:
        self.groups = [_make_group(position, vocab_size) for position in range(len(_PROMPT_LENGTHS))]
        self.base_logprobs: dict[tuple[int, int], np.ndarray] = {}
        """[R] float32 by (group, sample); needed for loss inputs, not for a scoring pass."""
        self._lengths = [measure(group) for group in self.groups]

    def plan(self, micro_batches: int | None, dp: int) -> list[list[MicroBatch]]:
        """Micro-batches of each data-parallel rank.

        Args:
            micro_batches: How many the whole batch makes on one rank; None = each response with a prompt of its own,
                which shares and packs nothing: the reference.
            dp: Ranks. The first gets most of the groups, so that the others have fillers to run.
        """
        budget = 1 if micro_batches is None else _budget(self._lengths, micro_batches)
        last = len(self.groups) - dp
        owners = [max(0, position - last) for position in range(len(self.groups))]
        return plan_micro_batches(self._lengths, budget, dp, owners=owners)

    def loss_inputs(self, packed: PackedBatch, algorithm: AlgorithmConfig) -> LossInputs:
        """The constants of a packed micro-batch, corrected."""
        return apply_correction(self._constants_of(packed), algorithm)

    def denominators(self, algorithm: AlgorithmConfig) -> Denominators:
        """Counts over the whole batch."""
        whole = self.loss_inputs(pack(self.groups, self.plan(1, 1)[0][0]), algorithm)
        return count_denominators(whole.loss_mask, whole.cu_seqlens, whole.sequence_groups)

    def _constants_of(self, packed: PackedBatch) -> LossInputs:
        per_rollout = [self._constants(*position) for position in packed.rollout_order]
        columns = {name: np.concatenate([values[name] for values in per_rollout] or [np.zeros(0)])
                   for name in ("old", "rollout", "ref", "advantage", "mask")}  # fmt: skip
        tensors = {name: torch.from_numpy(column.astype(np.float32)) for name, column in columns.items()}
        return LossInputs(
            old_logprobs=tensors["old"],
            rollout_logprobs=tensors["rollout"],
            ref_logprobs=tensors["ref"],
            advantages=tensors["advantage"],
            loss_mask=tensors["mask"] > 0,
            cu_seqlens=torch.from_numpy(packed.cu_seqlens),
            sequence_groups=torch.from_numpy(packed.group_positions),
        )

    def _constants(self, group: int, sample: int) -> dict[str, np.ndarray]:
        """Per-token constants [R] of one rollout."""
        length = _RESPONSE_LENGTHS[group][sample]
        draw = generator("loss", group, sample)
        old = self.base_logprobs[group, sample] + draw.normal(0, 0.3, length)
        return {
            "old": old,
            "rollout": old + draw.normal(0, 0.3, length),
            "ref": old + draw.normal(0, 0.5, length),
            "advantage": np.full(length, draw.normal(0.3, 1.0)),
            "mask": np.full(length, float((group, sample) != _MASKED_ROLLOUT)),
        }

    def join(self, rows: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray:
        """[total R] float32: rows by (group, sample), one after another."""
        return np.concatenate([rows[key] for key in self._keys()], dtype=np.float32)

    def split(self, joined: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """The inverse of join."""
        ends = np.cumsum([_RESPONSE_LENGTHS[group][sample] for group, sample in self._keys()])
        return dict(zip(self._keys(), np.split(joined, ends[:-1]), strict=True))

    @staticmethod
    def _keys() -> list[tuple[int, int]]:
        return [(group, sample) for group, lengths in enumerate(_RESPONSE_LENGTHS) for sample in range(len(lengths))]


def _make_group(position: int, vocab_size: int) -> Group:
    draw = generator("tokens", position)
    beginning = generator("beginning").integers(0, vocab_size, _BEGINNING)
    prompt_ids = np.concatenate([beginning, draw.integers(0, vocab_size, _PROMPT_LENGTHS[position])])
    prompt = Prompt(f"parity:{position}", prompt_ids, "")
    rollouts = [
        Rollout(position, sample, prompt, [Segment("model", draw.integers(0, vocab_size, length))], "",
                FinishReason.FINISHED, (0,))
        for sample, length in enumerate(_RESPONSE_LENGTHS[position])
    ]  # fmt: skip
    return Group(position, prompt, rollouts)


def _budget(lengths: list[GroupLengths], micro_batches: int) -> int:
    """The largest token budget under which the batch makes this many micro-batches on one rank.

    Raises:
        ValueError: no budget does.
    """
    for budget in range(sum(group.fed_tokens() for group in lengths), 0, -1):
        if len(plan_micro_batches(lengths, budget, 1)[0]) == micro_batches:
            return budget
    raise ValueError(f"check parity: the batch cannot be cut into {micro_batches} micro-batches; use another number")
