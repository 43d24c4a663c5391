"""RunMonitor: the one sink that the pipeline is handed; it fans out to the files, the outside writers and the display.

The pipeline knows only these methods, never this class: `stage`, `progress`, `step`, `evaluation`, `samples`,
`message`, `recorded_steps`, `resume`, `close`. Every rank calls them alike; only rank 0 writes or shows anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mc.monitor.evaluations import evaluation_text
from grpo_mc.monitor.metrics import MetricsWriter
from grpo_mc.monitor.progress import ProgressDisplay

if TYPE_CHECKING:
    from grpo_mc.config import Config
    from grpo_mc.data.records import Group


class RunMonitor:
    """Metrics, samples, evaluations and progress of one run.

    Args:
        run_dir: the run directory.
        config: the resolved configuration (`monitor`, `run.steps`, `run.resume` are read).
        rank: default RANK of the environment.

    Raises:
        ValueError: as MetricsWriter.
    """

    def __init__(self, run_dir: Path | str, config: Config, *, rank: int | None = None) -> None:
        self.writer = MetricsWriter(run_dir, config, rank=rank)
        self.display = ProgressDisplay(
            config.run.steps, evaluate_every=evaluate_every(config), enabled=config.monitor.progress, rank=rank
        )
        self.display.start()

    def recorded_steps(self) -> int:
        """Steps of an earlier process of the run whose metrics are there; 0 on ranks other than 0."""
        return self.writer.recorded_steps()

    def resume(self, step: int) -> None:
        """The run continues after `step`: later lines of an earlier process are removed; -1 removes all."""
        self.writer.resume(step)
        self.display.step_done = max(step, 0)

    def stage(self, name: str) -> None:
        """The run is now in stage `name`."""
        self.display.stage(name)

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` responses of the stage are there."""
        self.display.progress(done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done."""
        self.writer.write(step, metrics)
        self.display.step(step, metrics)

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """An evaluation after `step` steps: `accuracy` and/or `reward_mean`, `stderr`, `n`, ..."""
        self.writer.write_evaluation(step, result)
        self.display.evaluation_done()
        self.display.message(f"evaluation at step {step}: {evaluation_text(result)}")

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """The step's groups, of which a few rollouts are kept for the report."""
        self.writer.write_samples(step, groups)

    def message(self, text: str) -> None:
        """A line for the person watching."""
        self.display.message(text)

    def close(self) -> None:
        """Flushes and closes everything; may be called twice."""
        self.display.close()
        self.writer.close()

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def evaluate_every(config: Config) -> int | None:
    """`evaluation.every` where the run evaluates at all, None where it does not."""
    is_evaluated = config.pipeline.mode == "train" and config.evaluation.source is not None
    return config.evaluation.every if is_evaluated else None
