"""RunMonitor: the one sink that the pipeline is handed; it fans out to the files, the outside writers and the display.

The pipeline knows only these methods, never this class: `stage`, `step`, `evaluation`, `samples`, `message`, `resume`,
`close`. Every rank calls them alike; only rank 0 writes or shows anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mc.monitor.metrics import MetricsWriter
from grpo_mc.monitor.progress import ProgressDisplay, format_number

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
        self.display = ProgressDisplay(config.run.steps, enabled=config.monitor.progress, rank=rank)
        self.display.start()

    def resume(self, step: int) -> None:
        """The run continues after `step`: later lines of an earlier process are removed; -1 removes all."""
        self.writer.resume(step)
        self.display.step_done = max(step, 0)

    def stage(self, name: str) -> None:
        """The run is now in stage `name`."""
        self.display.stage(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done."""
        self.writer.write(step, metrics)
        self.display.step(step, metrics)

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """An evaluation after `step` steps: `accuracy` and/or `reward_mean`, `stderr`, `n`, ..."""
        self.writer.write_evaluation(step, result)
        self.display.evaluation_done()
        self.display.message(evaluation_line(step, result))

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


def evaluation_line(step: int, result: Mapping[str, Any]) -> str:
    """One line of text for an evaluation, e.g. "evaluation at step 40: accuracy 0.6125 +- 0.02436 (n = 400)"."""
    name = next((key for key in ("accuracy", "reward_mean") if key in result), None)
    if name is None:
        return f"evaluation at step {step}: {dict(result)}"
    error = f" +- {format_number(float(result['stderr']))}" if result.get("stderr") is not None else ""
    count = f" (n = {result['n']})" if "n" in result else ""
    return f"evaluation at step {step}: {name} {format_number(float(result[name]))}{error}{count}"
