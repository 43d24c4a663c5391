"""The inference module: log-probs of sampled responses under a frozen reference policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_mc.data.micro_batches import measure, plan_micro_batches
from grpo_mc.data.packing import pack
from grpo_mc.data.records import Group
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import make_micro_batch
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.megatron.train_step import compute_logprobs
from grpo_mc.pipeline.exchange import gather_from_leaders

RolloutLogprobs = dict[tuple[int, int], np.ndarray]
"""(group position, sample position) -> [R] float32."""


def logprobs_of_groups(
    model: PolicyModel, mesh: Mesh, groups: Sequence[Group], *, max_tokens: int, temperature: float
) -> RolloutLogprobs:
    """Log-probs of every response token of the groups, on every rank; the work is split over data-parallel ranks.

    Args:
        groups: The same on every rank.
        max_tokens: Packed tokens of one forward pass.
    """
    plan = plan_micro_batches([measure(group) for group in groups], max_tokens, mesh.dp)[mesh.dp_rank]
    packed = [pack(groups, micro_batch, pad_multiple=mesh.tp) for micro_batch in plan]
    scored = compute_logprobs(model, mesh, [make_micro_batch(p, mesh.device) for p in packed], temperature)
    own: RolloutLogprobs = {}
    for batch, logprobs in zip(packed, scored, strict=True):
        own.update(zip(batch.rollout_order, batch.per_rollout(logprobs), strict=True))
    merged: RolloutLogprobs = {}
    for part in gather_from_leaders(own, mesh):
        merged.update(part)
    return merged


class InferenceModule:
    """Scores groups with the reference model, a frozen copy of the weights that the run started from."""

    def __init__(self, reference: PolicyModel, mesh: Mesh, *, max_tokens: int, temperature: float) -> None:
        self.reference, self.mesh = reference, mesh
        self.max_tokens, self.temperature = max_tokens, temperature

    def run(self, groups: list[Group]) -> list[Group]:
        """Fills `ref_logprobs` of every rollout; returns the groups."""
        scored = logprobs_of_groups(
            self.reference, self.mesh, groups, max_tokens=self.max_tokens, temperature=self.temperature
        )
        for (group, sample), logprobs in scored.items():
            groups[group].rollouts[sample].ref_logprobs = logprobs.astype(np.float32)
        return groups
