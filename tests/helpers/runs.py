"""Whole runs on a tiny model, in this process or in the ranks of run_distributed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.processes import REPOSITORY

SMOKE = REPOSITORY / "configs/smoke/cpu.yaml"
BASE = (
    "model.init=pretrained", "model.tokenizer=null", "algorithm.beta=0", "evaluation.source=null", "checkpoint.every=0",
    "optimizer.schedule=constant", "optimizer.warmup_steps=0", "monitor.progress=false", "rollout.max_new_tokens=5",
    'rewards.functions=[{type: regex, name: early, pattern: "[A-Oa-o]"}, {type: regex, name: digit, pattern: "[0-9]"}]',
)  # fmt: skip
"""configs/smoke/cpu.yaml with a byte tokenizer, whose rewards vary inside most groups, and little around the steps."""
WALL_CLOCK = ("time/", "throughput/", "memory/")
"""Metrics that differ from run to run."""


def tiny_config(model: Path, run_dir: Path, *overrides: str) -> Any:
    """The configuration of a run of three steps of 4 groups of 4, without evaluation."""
    from grpo_mc.config import load_config

    return load_config(SMOKE, [f"model.path={model}", f"run.dir={run_dir}", *BASE, *overrides])


@dataclass
class RecordingSink:
    """Keeps what a run tells; calls `on_stage(name, steps done)` as a stage begins."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    parts_done: list[tuple[int, int]] = field(default_factory=list)
    on_stage: Any = None

    def recorded_steps(self) -> int:
        return 0

    def resume(self, step: int) -> None:
        self.messages.append(f"resumed after {step}")

    def stage(self, name: str) -> None:
        self.stages.append(name)
        if self.on_stage is not None:
            self.on_stage(name, len(self.metrics))

    def progress(self, done: int, total: int) -> None:
        self.parts_done.append((done, total))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append({"step": step, **metrics})

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        self.evaluations.append((step, dict(result)))

    def samples(self, step: int, groups: Iterable[Any]) -> None:
        self.groups.append(list(groups))

    def message(self, text: str) -> None:
        self.messages.append(text)


@contextmanager
def own_environment() -> Iterator[None]:
    """What the block sets in os.environ (a process group's address, say) is gone after it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(config: Any, *, resume: bool = False, on_stage: Any = None) -> tuple[Any, RecordingSink]:
    """Runs a configuration in this process; returns its TrainResult and what it told."""
    from grpo_mc.pipeline.run import train

    sink = RecordingSink(on_stage=on_stage)
    with own_environment():
        return train(config, resume_dir=Path(config.run.dir) if resume else None, sink=sink), sink


def run_with_files(config: Any, *, resume: bool = False) -> Any:
    """As the command `train` runs it, with metrics.jsonl and the other files; returns its TrainResult."""
    from grpo_mc.cli.calls import mark_resumed
    from grpo_mc.monitor import RunMonitor
    from grpo_mc.pipeline.run import train

    config = mark_resumed(config) if resume else config
    with own_environment(), RunMonitor(config.run.dir, config) as monitor:
        return train(config, resume_dir=Path(config.run.dir) if resume else None, sink=monitor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def comparable(metrics: Iterable[Mapping[str, Any]], *more: str) -> list[dict[str, Any]]:
    """Metrics without those that no two runs share, and without names that begin with one of `more`."""
    return [{name: x for name, x in line.items() if not name.startswith((*WALL_CLOCK, *more))} for line in metrics]


def model_bytes(run_dir: Path) -> bytes:
    """The exported weights."""
    return (run_dir / "model/model.safetensors").read_bytes()
