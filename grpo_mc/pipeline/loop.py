"""The life of a run around its steps: evaluation, checkpoints, resuming, stopping, and what is written on the way."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_mc.config import Config
from grpo_mc.data.records import Group
from grpo_mc.data.sampler import PromptSampler
from grpo_mc.megatron.checkpoint import find_latest, load_checkpoint, prune, save_checkpoint
from grpo_mc.megatron.convert import save_hf
from grpo_mc.pipeline.evaluation import EvalResult, Evaluator
from grpo_mc.pipeline.exchange import any_rank, broadcast_from_first
from grpo_mc.pipeline.rollout_log import RolloutLog
from grpo_mc.pipeline.scheduler import Scheduler, StageClock
from grpo_mc.pipeline.self_check import check_first_step
from grpo_mc.pipeline.setup import Runtime
from grpo_mc.pipeline.stop import Interrupted, StopRequest
from grpo_mc.pipeline.training_module import peak_memory_bytes

_log = logging.getLogger(__name__)

CHECKPOINTS_DIR = "checkpoints"
MODEL_DIR = "model"


class Sink(Protocol):
    """Where a run's numbers and texts go (grpo_mc.monitor.RunMonitor is one)."""

    def resume(self, step: int) -> None: ...
    def stage(self, name: str) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluation(self, step: int, result: Mapping[str, Any]) -> None: ...
    def samples(self, step: int, groups: Iterable[Group]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass
class TrainResult:
    """How a run ended."""

    steps: int
    """Training steps done."""
    before: EvalResult | None
    after: EvalResult | None
    model_dir: Path | None
    """The trained model as a Hugging Face folder."""


class TrainingRun:
    """Steps, and what happens between them. Every rank makes the same calls in the same order."""

    def __init__(
        self, runtime: Runtime, scheduler: Scheduler, sampler: PromptSampler, evaluator: Evaluator | None, sink: Sink
    ) -> None:
        self.runtime, self.scheduler, self.sampler, self.evaluator, self.sink = (
            runtime, scheduler, sampler, evaluator, sink,
        )  # fmt: skip
        self.config: Config = runtime.config
        self.mesh = runtime.mesh
        self.run_dir = Path(self.config.run.dir)
        self.log = RolloutLog(self.run_dir)
        self.step = 0
        self.last_saved = -1
        self.best: dict[str, float] = {}
        """Step and accuracy of the best evaluation so far."""

    @property
    def training(self):  # type: ignore[no-untyped-def]
        """The training module."""
        return self.scheduler.training

    def resume(self) -> None:
        """Goes on from the newest complete checkpoint; from the start if there is none."""
        latest = broadcast_from_first(find_latest(self.run_dir / CHECKPOINTS_DIR), self.mesh)
        for path, reason in latest.ignored:
            self.sink.message(f"resume: {path.name} is not complete and is left alone: {reason}")
        if latest.path is None:
            self.sink.message("resume: no complete checkpoint, the run starts again from step 0")
        else:
            extra = load_checkpoint(self.training.policy, self.mesh, latest.path)
            self.step = self.last_saved = int(extra["step"])
            self.training.policy_version = int(extra["policy_version"])
            self.sampler.load_state_dict(extra["sampler"])
            self.best = dict(extra["best"])
        self.sink.resume(self.step)
        if self.mesh.rank == 0:
            self.log.truncate_after(self.step)

    def run(self) -> TrainResult:
        """All remaining steps, then the last evaluation, checkpoint and export.

        Raises:
            Interrupted: SIGTERM or Ctrl-C; the run is saved.
        """
        steps = self.config.run.steps
        before = self.evaluate() if self.step == 0 else None
        with StopRequest() as request:
            while self.step < steps:
                self._train_one_step()
                self._leave_if_asked(request)
                every = self.config.evaluation.every
                if every and self.step % every == 0 and self.step < steps:
                    self.evaluate()
                every = self.config.checkpoint.every
                if every and self.step % every == 0 and self.step < steps:
                    self.save()
        after = self.evaluate() if steps else None
        if self.last_saved != self.step and self.step:
            self.save()
        return TrainResult(self.step, before, after, self._export())

    def _train_one_step(self) -> None:
        start, step = time.perf_counter(), self.step + 1
        clock = StageClock(self.sink)
        batch = self.scheduler.collect(step, clock)
        self.scheduler.infer(clock)
        metrics = self.scheduler.train(clock)
        if self.mesh.rank == 0:
            self.log.write(step, batch.groups)
        self.step = step
        metrics["policy/version"] = float(self.training.policy_version)
        metrics["memory/peak_bytes"] = peak_memory_bytes(self.mesh.device)
        metrics["time/step_s"] = time.perf_counter() - start
        self.sink.step(step, metrics)
        self.sink.samples(step, batch.groups)
        if step == 1:
            for warning in check_first_step(metrics, self.config):
                self.sink.message(f"warning: {warning}")

    def evaluate(self) -> EvalResult | None:
        """Measures the current weights on the held-out prompts, if there are any; remembers the best."""
        if self.evaluator is None:
            return None
        self.sink.stage("evaluation")
        result = self.evaluator.run(self.scheduler.rollout, self.scheduler.rewards, self.training.policy_version)
        self.sink.evaluation(self.step, result.record())
        if not self.best or result.accuracy > self.best["accuracy"]:
            self.best = {"step": float(self.step), "accuracy": result.accuracy}
        return result

    def save(self) -> None:
        """A checkpoint of this step; older ones are pruned as the configuration says."""
        self.sink.stage("checkpoint")
        root = self.run_dir / CHECKPOINTS_DIR
        extra = {
            "step": self.step,
            "policy_version": self.training.policy_version,
            "sampler": self.sampler.state_dict(),
            "best": self.best,
        }
        save_checkpoint(self.training.policy, self.mesh, root / f"step_{self.step}", extra)
        self.last_saved = self.step
        if self.mesh.rank == 0:
            keep = {int(self.best["step"])} if self.config.checkpoint.keep_best and self.best else set()
            prune(root, self.config.checkpoint.keep_last, keep)

    def _export(self) -> Path | None:
        if not self.config.checkpoint.export_hf:
            return None
        self.sink.stage("export")
        folder = self.run_dir / MODEL_DIR
        save_hf(self.runtime.model, self.mesh, folder, self.runtime.tokenizer, self.config.model.dtype)
        return folder

    def _leave_if_asked(self, request: StopRequest) -> None:
        if not any_rank(bool(request.signum), self.mesh):
            return
        if self.last_saved != self.step:
            self.save()
        signum = request.signum or signal.SIGTERM
        raise Interrupted(
            signum,
            f"stopped by {signal.Signals(signum).name} after step {self.step}, which is saved; go on with"
            f" `grpo-mc train --resume {self.run_dir}`",
        )
