"""The stages of a step: how long each takes, who is told, and where a step may still be given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Who is told where the run is."""

    def stage(self, name: str) -> None:
        """A stage begins."""


class StageClock:
    """Wall time of each stage of one step, in seconds."""

    def __init__(self, progress: Progress, before_stage: Callable[[], None] | None = None) -> None:
        """
        Args:
            before_stage: Called as each stage begins, on all ranks alike. It may raise to give the step up: the stages
                that come before training leave nothing behind, and training is the last one.
        """
        self.seconds: dict[str, float] = {}
        self._progress, self._before_stage = progress, before_stage

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block, adding to what the stage took before in this step."""
        if self._before_stage is not None:
            self._before_stage()
        self._progress.stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
