"""The reward pool: judges the rollouts of groups in worker processes that cannot hurt the run.

    prompt columns + response -> worker process -> verdicts -> rollout.verdicts, rollout.rewards, rollout.reward

grpo_mc.rewards.dispatch holds the time limits and the replacement of lost workers, grpo_mc.rewards.process the life of
one worker, grpo_mc.rewards.worker the program that it runs.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_mc.data.records import FinishReason, Group, Rollout, Verdict, VerdictStatus
from grpo_mc.rewards.dispatch import Dispatcher
from grpo_mc.rewards.judge import record_verdicts
from grpo_mc.rewards.sample import PromptView, Sample

if TYPE_CHECKING:  # workers import this package, and start faster without the configuration's libraries
    from grpo_mc.config.rewards import RewardsConfig

_PENDING_PER_WORKER = 64


class RewardPool:
    """Judges rollouts in worker processes. Use it as a context manager, or call close().

    Args:
        config: the functions, the number of workers, the time limit of a call, the most samples handed out at a time.

    Raises:
        ValueError: a function that cannot be built from its options (a missing module, a wrong name, code that fails or
            does not end when it is imported).
        RuntimeError: a worker that could not start for another reason; the message holds its traceback.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self.names = [f.name or f.type for f in config.functions]
        self._weights = {f.name or f.type: f.weight for f in config.functions}
        if len(self._weights) < len(self.names):
            raise ValueError(f"rewards.functions: names must differ, but are {self.names}; give each its own `name`")
        self._takes_ids = any(f.type == "function" for f in config.functions)
        self._lock = threading.Lock()
        self._is_closed = False
        self._next_ticket = 0
        self._dispatcher = Dispatcher(
            pickle.dumps([_plain_options(f) for f in config.functions]),
            self.names,
            config.workers if self.names else 0,
            config.timeout_s,
            config.max_pending or _PENDING_PER_WORKER * config.workers,
        )

    def score(self, groups: Sequence[Group]) -> None:
        """Judge every rollout of the groups; fills their `verdicts`, `rewards` and `reward`.

        Verdicts stand in the order of the configured functions, whatever order they were reached in. A rollout that
        failed or was aborted has no complete response: every function abstains. Safe to call from any thread; calls
        from several threads take turns.

        Raises:
            ValueError: a replacement for a lost worker cannot build the functions.
            RuntimeError: the pool is closed, or a replacement cannot start for another reason.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("RewardPool.score: the pool is closed; make a new one")
            rollouts, tasks = self._tasks(groups)
            verdicts = self._dispatcher.run(tasks) if self.names else {}
        for ticket, rollout in rollouts.items():
            judged = verdicts[ticket] if ticket in verdicts else self._abstentions(rollout)
            record_verdicts(rollout, judged, self._weights)

    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._dispatcher.worker_pids()

    def close(self) -> None:
        """End the workers and all that they started. Safe to call again."""
        with self._lock:
            self._is_closed = True
            self._dispatcher.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tasks(self, groups: Sequence[Group]) -> tuple[dict[int, Rollout], dict[int, Sample]]:
        """Every rollout by a new ticket, and the samples of those that have a complete response."""
        rollouts: dict[int, Rollout] = {}
        tasks: dict[int, Sample] = {}
        for group in groups:
            view = PromptView.from_prompt(group.prompt)
            for rollout in group.rollouts:
                ticket = self._next_ticket
                self._next_ticket += 1
                rollouts[ticket] = rollout
                if rollout.finish_reason in (FinishReason.FINISHED, FinishReason.TRUNCATED):
                    tasks[ticket] = Sample.from_rollout(rollout, view, with_ids=self._takes_ids)
        return rollouts, tasks

    def _abstentions(self, rollout: Rollout) -> list[Verdict]:
        reason = f"the rollout is {rollout.finish_reason}"
        return [Verdict(name, VerdictStatus.ABSTAINED, None, reason) for name in self.names]


def _plain_options(function: Any) -> SimpleNamespace:
    """The options as a plain object, so that a worker needs no configuration library; a file path made absolute."""
    options = SimpleNamespace(**function.model_dump())
    path, separator, name = getattr(options, "path", "").rpartition(":")
    if separator and path.endswith(".py"):
        options.path = f"{os.path.abspath(path)}:{name}"
    return options
