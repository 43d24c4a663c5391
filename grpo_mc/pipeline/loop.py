"""The life of a run around its steps: evaluation, checkpoints, resuming, stopping, and what is written on the way."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_mc.config import Config
from grpo_mc.data.records import Group
from grpo_mc.megatron.checkpoint import CheckpointError
from grpo_mc.pipeline.clock import StageClock
from grpo_mc.pipeline.evaluation import EvalResult, HeldOut
from grpo_mc.pipeline.exchange import all_ranks_failed, any_rank, broadcast_from_first
from grpo_mc.pipeline.keeper import Keeper
from grpo_mc.pipeline.rollout_log import ROLLOUTS_DIR, RolloutLog
from grpo_mc.pipeline.scheduler import Scheduler
from grpo_mc.pipeline.self_check import check_first_step
from grpo_mc.pipeline.setup import Runtime
from grpo_mc.pipeline.stall import NothingToTrain, StallWatch
from grpo_mc.pipeline.stop import Interrupted, StepAbandoned, StopRequest
from grpo_mc.pipeline.training_module import peak_memory_bytes
from grpo_mc.rollout.sampling import NonFiniteLogits


class Sink(Protocol):
    """Where a run's numbers and texts go (grpo_mc.monitor.RunMonitor is one)."""

    def recorded_steps(self) -> int: ...
    def resume(self, step: int) -> None: ...
    def stage(self, name: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluation(self, step: int, result: Mapping[str, Any]) -> None: ...
    def samples(self, step: int, groups: Iterable[Group]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class TrainResult:
    """How a run ended."""

    steps: int
    """Training steps done, over all its processes."""
    before: EvalResult | None
    """Of the starting weights; None without evaluation, and where an earlier process of the run measured it."""
    after: EvalResult | None
    """Of the last weights."""
    model_dir: Path | None
    """The trained model as a Hugging Face folder."""


class TrainingRun:
    """Steps, and what happens between them. Every rank makes the same calls in the same order.

    Between two steps, in this order: leave if asked, evaluate if it is due, save if it is due. A checkpoint knows
    whether its step was evaluated, so that a run that left before an evaluation makes it when it goes on.
    """

    def __init__(
        self, runtime: Runtime, scheduler: Scheduler, sink: Sink, *, held_out: HeldOut | None, keeper: Keeper | None
    ) -> None:
        """
        Args:
            held_out: None = nothing is evaluated.
            keeper: None = nothing is trained, so there is nothing to save.
        """
        self.scheduler, self.sink, self.held_out, self.keeper = scheduler, sink, held_out, keeper
        self.config: Config = runtime.config
        self.mesh = runtime.mesh
        self.log = RolloutLog(self.config.run.dir)
        self.request = StopRequest()
        self.stall = StallWatch()
        self.step = 0
        self.evaluated: int | None = None
        """The last step that was evaluated."""
        self.best: dict[str, float] = {}
        """Step and accuracy of the best evaluation so far."""
        self.results: dict[int, EvalResult] = {}

    def resume(self) -> None:
        """Goes on from the newest complete checkpoint; from the start if there is none and no step was recorded.

        Lines of metrics and rollouts of later steps are removed. The learning rate of a step is computed from the
        configuration, never restored: with another run.steps a linear or cosine schedule goes on along the new curve.

        Raises:
            ValueError: The run trains nothing, so it has no checkpoint; or it recorded steps and has no complete one;
                or the checkpoint is of another run.
        """
        if self.keeper is None:
            raise ValueError(
                "train --resume: pipeline.mode is 'rollout_only', which saves no checkpoint to go on from;"
                " start it anew with another run.dir and run.seed"
            )
        latest = self.keeper.latest()
        for path, reason in latest.ignored:
            self.sink.message(f"resume: {path.name} is not complete and is left alone: {reason}")
        if latest.path is None or latest.step is None:
            self._refuse_to_drop_all(latest.ignored)
            self.sink.message("resume: no complete checkpoint and no recorded step, the run starts from step 0")
            self.sink.resume(-1)
        else:
            self._restore(self.keeper.load(latest.path, latest.step))
            steps = self.config.run.steps
            done = f"; {steps} steps are done, raise run.steps for more" if self.step >= steps else ""
            self.sink.message(f"resume: step {self.step}, from {latest.path}{done}")
            self.sink.resume(self.step)
        if self.mesh.rank == 0:
            self.log.truncate_after(self.step)

    def _refuse_to_drop_all(self, ignored: Sequence[tuple[Path, str]]) -> None:
        recorded = max(self.sink.recorded_steps(), self.log.num_steps()) if self.mesh.rank == 0 else 0
        recorded = broadcast_from_first(recorded, self.mesh)
        if not recorded:
            return
        faults = "".join(f"; {path.name} is ignored: {reason}" for path, reason in ignored)
        run_dir = self.config.run.dir
        raise ValueError(
            f"train --resume: {run_dir} has no complete checkpoint to go on from{faults}. It holds {recorded} recorded"
            f" steps, which a start from step 0 would remove; start a new run with another run.dir, or delete {run_dir}"
        )

    def run(self) -> TrainResult:
        """All remaining steps, with evaluations and checkpoints where they are due, then the export.

        Raises:
            Interrupted: SIGTERM or Ctrl-C; the run is saved.
            RunStalled: Batch after batch taught nothing.
        """
        with self.request:
            while True:
                self._leave_if_asked()
                if self._is_evaluation_due():
                    with self._saving_on_failure():
                        self._evaluate()
                if self._is_save_due():
                    self._save()
                if self.step >= self.config.run.steps:
                    break
                self._train_one_step()
            self._leave_if_asked()
            model_dir = self._export()
        return TrainResult(self.step, self.results.get(0), self.results.get(self.step), model_dir)

    def _train_one_step(self) -> None:
        """Does not count if the run is asked to stop before training begins: the prompts are then drawn again."""
        start, step = time.perf_counter(), self.step + 1
        clock = StageClock(self.sink, self._abandon_if_asked)
        state = self.scheduler.collector.state_dict()
        try:
            with self._saving_on_failure():
                batch = self.scheduler.collect(step, clock)
                self.scheduler.infer(clock)
                metrics = self.scheduler.train(clock)
        except StepAbandoned:
            self.scheduler.collector.load_state_dict(state)
            return
        if self.mesh.rank == 0:
            self.log.write(step, batch.groups)
        self.step = step
        metrics["policy/version"] = float(self.scheduler.training.policy_version)
        metrics["memory/peak_bytes"] = peak_memory_bytes(self.mesh.device)
        metrics["time/step_s"] = time.perf_counter() - start
        self.sink.step(step, metrics)
        self.sink.samples(step, batch.groups)
        self._warn(metrics)

    @contextmanager
    def _saving_on_failure(self) -> Iterator[None]:
        """What fails inside in an orderly way ends the run with the last finished step saved, where that is possible.

        It is where the weights are still those of that step, and where every rank failed. If one failed alone, the
        others wait for it inside a collective and cannot save: it leaves after MEETING_S, and the launcher ends them.
        """
        state = self.scheduler.collector.state_dict()
        try:
            yield
        except NonFiniteLogits:  # weights that nobody wants to go on from
            raise
        except (ValueError, OSError):
            self.scheduler.collector.load_state_dict(state)
            self._save_before_failing()
            raise

    def _save_before_failing(self) -> None:
        if self.keeper is None or self.step in (0, self.keeper.last_saved) or self.scheduler.training.is_updating:
            return
        if not all_ranks_failed(self.mesh):
            return
        try:
            self._save()
        except (CheckpointError, OSError) as failure:  # the first failure is the one to report
            self.sink.message(f"step {self.step} is not saved: {failure}")
        else:
            self.sink.message(f"step {self.step} is saved; `grpo-mc train --resume {self.config.run.dir}` goes on")

    def _warn(self, metrics: Mapping[str, float]) -> None:
        if self.keeper is None:
            return
        if self.step == 1:
            for difference in check_first_step(metrics, self.config):
                self.sink.message(f"warning: {difference}")
        try:
            warning = self.stall.after_step(self.step, metrics)
        except NothingToTrain:
            self._save()
            raise
        if warning is not None:
            self.sink.message(f"warning: {warning}")

    def _is_last(self) -> bool:
        return self.step >= self.config.run.steps

    def _is_evaluation_due(self) -> bool:
        if self.held_out is None or self.evaluated == self.step:
            return False
        every = self.config.evaluation.every
        return self.step == 0 or self._is_last() or (every > 0 and self.step % every == 0)

    def _evaluate(self) -> None:
        """Measures the current weights on the held-out prompts; remembers the best."""
        assert self.held_out is not None
        self.sink.stage("evaluation")
        result = self.held_out.measure(self.scheduler.training.policy_version)
        self.sink.evaluation(self.step, result.record())
        self.results[self.step] = result
        self.evaluated = self.step
        if not self.best or result.accuracy > self.best["accuracy"]:
            self.best = {"step": float(self.step), "accuracy": result.accuracy}

    def _is_save_due(self) -> bool:
        if self.step == 0:
            return False
        every = self.config.checkpoint.every
        is_best = self.config.checkpoint.keep_best and self.best.get("step") == self.step
        return self._is_last() or is_best or (every > 0 and self.step % every == 0)

    def _save(self) -> None:
        if self.keeper is None:
            return
        self.sink.stage("checkpoint")
        best_step = int(self.best["step"]) if self.best else None
        self.keeper.save(self.step, self._state(), best_step)

    def _export(self) -> Path | None:
        if self.keeper is None:
            return None
        self.sink.stage("export")
        return self.keeper.export()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "evaluated": self.evaluated,
            "best": self.best,
            "collector": self.scheduler.collector.state_dict(),
            "stall": self.stall.state_dict(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.evaluated, self.best = state["step"], state["evaluated"], state["best"]
        self.scheduler.collector.load_state_dict(state["collector"])
        self.stall.load_state_dict(state["stall"])

    def _is_asked_to_stop(self) -> bool:
        return any_rank(bool(self.request.signum), self.mesh)

    def _abandon_if_asked(self) -> None:
        if self._is_asked_to_stop():
            raise StepAbandoned

    def _leave_if_asked(self) -> None:
        if not self._is_asked_to_stop():
            return
        self._save()
        signum = self.request.signum or signal.SIGTERM  # or another rank was asked
        name, run_dir = signal.Signals(signum).name, self.config.run.dir
        if self.keeper is None:
            kept = f"its rollouts are in {Path(run_dir) / ROLLOUTS_DIR}"
        else:
            kept = f"which is saved; go on with `grpo-mc train --resume {run_dir}`"
        raise Interrupted(signum, f"stopped by {name} after step {self.step}, {kept}")
