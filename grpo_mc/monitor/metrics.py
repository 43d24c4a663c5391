"""MetricsWriter: the numbers and texts of a run, one flushed JSON line at a time, and their TensorBoard / W&B copies.

Only rank 0 writes; on other ranks every method checks its arguments and does nothing more. Files are described in
run_files.py. On resume, lines of steps after the resumed one are removed, so that a step is never there twice and the
joined file reads like that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from grpo_mc.monitor.external import ExternalWriter, open_external_writers
from grpo_mc.monitor.run_files import (
    CHECKPOINTS_DIR,
    EVALUATIONS_FILE,
    METRICS_FILE,
    ROLLOUTS_DIR,
    SAMPLES_FILE,
    open_for_append,
    read_line_file,
    to_line,
    truncate_after,
)
from grpo_mc.monitor.run_lock import RunLock

if TYPE_CHECKING:
    from grpo_mc.config import Config
    from grpo_mc.data.records import Group, Rollout


def process_rank() -> int:
    """This process's rank under torchrun (environment variable RANK), 0 without it."""
    return int(os.environ.get("RANK", "0"))


class MetricsWriter:
    """Writes metrics.jsonl, evaluations.jsonl and samples.jsonl of one run directory.

    From construction to `close` rank 0 holds the directory's lock (run_lock.py), taken before anything is written.

    Args:
        run_dir: the run directory; made when missing.
        config: the resolved configuration; `monitor.tensorboard`, `monitor.wandb`, `monitor.samples_per_step` and
            `run.resume` are read.
        rank: rank of this process; default RANK of the environment. Only rank 0 writes.

    Raises:
        ValueError: another process has the directory in use; it already holds steps of a run and `run.resume` is false;
            a writer was asked for whose package is not installed.
    """

    def __init__(self, run_dir: Path | str, config: Config, *, rank: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.samples_per_step: int = config.monitor.samples_per_step
        self._is_writer = (process_rank() if rank is None else rank) == 0
        self._files: dict[str, TextIO] = {}
        self._external: list[ExternalWriter] = []
        self._lock: RunLock | None = None
        if not self._is_writer:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.run_dir)
        try:
            if not config.run.resume:
                _refuse_used_directory(self.run_dir)
            self._external = open_external_writers(self.run_dir, config)
        except BaseException:
            self._lock.release()
            raise

    def recorded_steps(self) -> int:
        """Steps in metrics.jsonl; 0 on ranks other than 0."""
        return _recorded_steps(self.run_dir) if self._is_writer else 0

    def resume(self, step: int) -> None:
        """Continues after `step`: removes the lines of later steps (0: every step after the first evaluation)."""
        if not self._is_writer:
            return
        self._close_files()
        for name in (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE):
            truncate_after(self.run_dir / name, step)
        for writer in self._external:
            writer.resume(step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step's metrics.

        Args:
            step: optimizer steps done, from 1.
            metrics: numbers by name (design names such as "reward/mean"); Python or numpy numbers or one-element
                tensors; NaN and inf are kept (see run_files.py).

        Raises:
            ValueError: a value is no number.
        """
        numbers = {name: _as_number(name, value) for name, value in metrics.items()}
        if not self._is_writer:
            return
        self._append(METRICS_FILE, {"step": int(step), **numbers})
        for writer in self._external:
            writer.write(int(step), numbers)

    def write_evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """Appends one evaluation: `accuracy` and/or `reward_mean`, `stderr`, `n` and what else `result` holds."""
        if not self._is_writer:
            return
        self._append(EVALUATIONS_FILE, {"step": int(step), **result})
        numbers = {
            f"evaluation/{name}": float(value)
            for name, value in result.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for writer in self._external:
            writer.write(int(step), numbers)

    def write_samples(self, step: int, groups: Iterable[Group]) -> None:
        """Appends up to `monitor.samples_per_step` scored rollouts of the step: the best and the worst of the first
        group, then of the next, so that a reader sees what is rewarded and what is not."""
        if not self._is_writer or self.samples_per_step <= 0:
            return
        for rollout in pick_samples(groups, self.samples_per_step):
            self._append(SAMPLES_FILE, sample_record(step, rollout))

    def close(self) -> None:
        """Closes every file and writer and gives the directory free; may be called twice."""
        try:
            self._close_files()
            for writer in self._external:
                writer.close()
            self._external = []
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, name: str, record: dict[str, Any]) -> None:
        path = self.run_dir / name
        try:
            if name not in self._files:
                self._files[name] = open_for_append(path)
            handle = self._files[name]
            size = path.stat().st_size
            try:
                handle.write(to_line(record))
                handle.flush()
            except OSError:
                self._abandon(name, size)
                raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"write metrics: {path} cannot be written ({error.strerror or error}); free some space there or set "
                "run.dir to another disk",
            ) from error

    def _abandon(self, name: str, size: int) -> None:
        """Closes a file that takes no more, without the part of a line at its end."""
        handle = self._files.pop(name)
        with contextlib.suppress(OSError):  # closing tries to write what is buffered once more
            handle.close()
        with contextlib.suppress(OSError):
            os.truncate(self.run_dir / name, size)

    def _close_files(self) -> None:
        for handle in self._files.values():
            handle.close()
        self._files = {}


def sample_record(step: int, rollout: Rollout) -> dict[str, Any]:
    """The line of samples.jsonl for one rollout."""
    return {
        "step": int(step),
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "ground_truth": rollout.prompt.ground_truth,
        "response_length": rollout.response_length,
        "reward": rollout.reward,
        "rewards": dict(rollout.rewards),
        "verdicts": [
            {"name": v.name, "status": str(v.status), "score": v.score, "reason": v.reason} for v in rollout.verdicts
        ],
        "finish_reason": str(rollout.finish_reason),
    }


def pick_samples(groups: Iterable[Group], count: int) -> list[Rollout]:
    """At most `count` rollouts: of each group in order its best, then its worst by reward (unscored ones last)."""
    picked: list[Rollout] = []
    for group in groups:
        if len(picked) >= count:
            break
        ranked = sorted(group.rollouts, key=lambda r: (r.reward is None, -(r.reward or 0.0), r.sample_index))
        scored = [r for r in ranked if r.reward is not None] or ranked
        picked.extend(scored[:1] if len(scored) == 1 else [scored[0], scored[-1]] if scored else [])
    return picked[:count]


def _as_number(name: str, value: Any) -> float | int:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metrics: '{name}' is {value!r} ({type(value).__name__}); a metric is one number; write texts elsewhere"
        ) from error


def _recorded_steps(run_dir: Path) -> int:
    return len(read_line_file(run_dir / METRICS_FILE).records)


def _refuse_used_directory(run_dir: Path) -> None:
    counts = {
        "steps": _recorded_steps(run_dir),
        "checkpoints": len(list((run_dir / CHECKPOINTS_DIR).glob("step_*"))),
        "rollout files": len(list((run_dir / ROLLOUTS_DIR).glob("step_*"))),
    }
    for name, count in counts.items():
        if count:
            raise ValueError(
                f"train: run.dir {run_dir} already holds {count} {name} of a run; give another run.dir, or continue "
                f"it with `train --resume {run_dir}`, on as many processes"
            )
