"""Batches that teach nothing, one after the other: said when it happens, and the end of the run when it goes on."""

from __future__ import annotations

from collections.abc import Mapping

MAX_EMPTY_BATCHES = 50
"""So many training batches in a row without a token in the loss end the run."""
MAX_NON_FINITE_BATCHES = 3
"""So many training batches in a row in which no gradient was finite end the run."""


class RunStalled(ValueError):
    """The run cannot go on usefully; what to change is in the message. The same on every rank, between two steps."""


class NothingToTrain(RunStalled):
    """Batch after batch was empty. The weights are good."""


class StallWatch:
    """Looks at every step's metrics. Its counts go into checkpoints."""

    def __init__(self) -> None:
        self.empty = 0
        """Empty batches in a row so far."""
        self.non_finite = 0
        """Batches in a row, so far, in which no gradient was finite."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A warning, if this step deserves one. Empty batches warn when their number in a row is a power of two.

        Args:
            metrics: of TrainingModule.run, with the counters of the collector.

        Raises:
            NothingToTrain: MAX_EMPTY_BATCHES in a row were empty.
            RunStalled: In MAX_NON_FINITE_BATCHES in a row no gradient was finite.
        """
        updates, failed = metrics["optimizer/steps"], metrics["optimizer/non_finite_steps"]
        self.empty = self.empty + 1 if updates == failed == 0 else 0
        self.non_finite = self.non_finite + 1 if failed and not updates else 0
        if self.non_finite >= MAX_NON_FINITE_BATCHES:
            raise RunStalled(
                f"train: the gradient was not finite in {self.non_finite} training batches in a row, the last in step"
                f" {step}; lower optimizer.lr or use model.dtype fp32, and resume from a checkpoint before step"
                f" {step - self.non_finite + 1} or start again"
            )
        if self.empty >= MAX_EMPTY_BATCHES:
            raise NothingToTrain(f"train: {self.empty} batches in a row were empty; in step {step}, {why(metrics)}")
        if failed:
            return f"step {step}: the gradient was not finite in {failed:.0f} optimizer steps, which were left out"
        if self.empty and not self.empty & (self.empty - 1):
            return f"step {step} has nothing to train on ({self.empty} in a row): {why(metrics)}"
        return None

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return {"empty": self.empty, "non_finite": self.non_finite}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets what state_dict returned."""
        self.empty, self.non_finite = state["empty"], state["non_finite"]


def why(metrics: Mapping[str, float]) -> str:
    """Why a batch is empty, and what to change."""
    count = {name: int(metrics.get(f"filter/{name}_groups", 0)) for name in ("sampled", "kept", "filtered", "dropped")}
    text = (
        f"of {count['sampled']} groups {count['filtered']} were left out for equal rewards and {count['dropped']} for"
        " fewer than two scored rollouts"
    )
    truncated = int(metrics.get("rollouts/truncated_masked", 0))
    if count["kept"]:
        text += f", and {count['kept']} others have no token in the loss ({truncated} truncated rollouts are masked)"
    advice = {
        "filtered": "take easier or harder prompts, a larger rollout.group_size, more algorithm.max_refills, or set"
        " algorithm.filter_zero_variance=false",
        "dropped": "mend the reward functions (try `grpo-mc rewards score`)",
        "kept": "raise rollout.max_new_tokens, or set algorithm.mask_truncated=false",
    }
    largest = max(advice, key=lambda name: count[name])
    return f"{text}; {advice[largest]}"
