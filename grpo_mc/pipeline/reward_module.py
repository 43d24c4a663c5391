"""The reward module: fills the verdicts and rewards of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_mc.config import RewardsConfig
from grpo_mc.data.records import Group, VerdictStatus
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.pipeline.exchange import gather_groups
from grpo_mc.rewards import RewardPool


class RewardModule:
    """Each model group's leader scores its groups in a pool of processes; then every rank learns all groups."""

    def __init__(self, config: RewardsConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.has_scored = False
        """Whether any rollout was ever scored."""
        self.pool = RewardPool(config) if mesh.is_model_leader else None

    def run(self, groups: list[Group]) -> list[Group]:
        """Scores this rank's groups.

        Returns:
            The scored groups of all data-parallel ranks, by group id, the same on every rank.

        Raises:
            ValueError: Not one rollout could be scored, in the first call. Later such groups have no reward, so that a
                verifier that is away for a while does not end the run.
        """
        if self.pool is not None:
            self.pool.score(groups)
        scored = gather_groups(groups, self.mesh)
        if not self.has_scored:
            refuse_unscored(scored)
            self.has_scored = True
        return scored

    def close(self) -> None:
        """Ends the worker processes."""
        if self.pool is not None:
            self.pool.close()


def refuse_unscored(groups: Sequence[Group]) -> None:
    """Raises when no reward function scored anything: a run without any reward can only waste time."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts or any(rollout.reward is not None for rollout in rollouts):
        return
    failures = [v for rollout in rollouts for v in rollout.verdicts if v.status is not VerdictStatus.SCORED]
    counts = Counter((v.name, str(v.status), v.reason) for v in failures).most_common(3)
    seen = "; ".join(f"{name} {status} {count} times ({reason})" for (name, status, reason), count in counts)
    raise ValueError(
        f"rewards: none of {len(rollouts)} rollouts could be scored: {seen or 'no reward function is configured'};"
        " mend the reward function or the records' fields (try `grpo-mc rewards score`)"
    )
