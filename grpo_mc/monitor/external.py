"""Copies of the metrics in TensorBoard and Weights & Biases, when they are asked for and installed.

Neither is a dependency. Asked for but not installed is an error before the run starts, never a silent skip.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from grpo_mc.config import Config

WANDB_ID_FILE = "wandb_id.txt"


class ExternalWriter(Protocol):
    """A place outside the run directory's own files that takes a step's numbers."""

    def resume(self, step: int) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_external_writers(run_dir: Path, config: Config) -> list[ExternalWriter]:
    """The writers that `config.monitor` asks for.

    Raises:
        ValueError: a package is missing; names the extra that brings it.
    """
    writers: list[ExternalWriter] = []
    if config.monitor.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard"))
    if config.monitor.wandb:
        writers.append(WandbWriter(run_dir, project=config.monitor.wandb, name=config.run.name or None))
    return writers


def _import_optional(module: str, *, package: str, option: str, off: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"monitor: {option} is set but {package} is not installed; "
            f"run `pip install 'grpo_mc[{package}]'` or set {option}={off}"
        ) from error


class TensorBoardWriter:
    """Event files under `log_dir`, one scalar a metric, x = step."""

    def __init__(self, log_dir: Path) -> None:
        _import_optional("tensorboard", package="tensorboard", option="monitor.tensorboard", off="false")
        self._summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._log_dir = log_dir
        self._writer: Any = None
        self._purge_step: int | None = None

    def resume(self, step: int) -> None:
        """Makes TensorBoard hide what an earlier process wrote after `step`."""
        self.close()
        self._purge_step = step + 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._summary_writer(log_dir=str(self._log_dir), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbWriter:
    """One W&B run; its id is kept in the run directory, so that a resumed run continues it."""

    def __init__(self, run_dir: Path, *, project: str, name: str | None) -> None:
        wandb = _import_optional("wandb", package="wandb", option="monitor.wandb", off="null")
        id_file = run_dir / WANDB_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else wandb.util.generate_id()
        id_file.write_text(run_id + "\n", encoding="utf-8")
        self._run = wandb.init(project=project, name=name, dir=str(run_dir), id=run_id, resume="allow")
        # W&B's own step counter cannot go back, so a resumed run that repeats steps would lose them: "train_step" is
        # the x axis instead.
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def resume(self, step: int) -> None:
        """Nothing to undo: later values of the same train_step follow the earlier ones."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"train_step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
