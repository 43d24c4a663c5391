"""One row of a terminal that never wraps: what matters least is left out where the terminal is too narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

GAP = 2
"""Spaces between two parts."""
BAR_WIDTH = 20


@dataclass(frozen=True)
class Part:
    """A piece of the row."""

    text: str
    """Plain text, never markup; one terminal cell a character."""
    priority: int
    """Parts are taken in this order, lowest first, until one does not fit."""
    style: str = ""
    """A style of rich's, e.g. "bold"."""


def fitting(parts: Sequence[Part], width: int) -> list[Part]:
    """The parts that fit into `width` cells, in the order given; at least the first by priority, which may be cut."""
    chosen: list[Part] = []
    used = -GAP
    for part in sorted(parts, key=lambda part: part.priority):
        used += GAP + len(part.text)
        if chosen and used > width:
            break
        chosen.append(part)
    return [part for part in parts if part in chosen]


def bar(done: int, total: int) -> str:
    """ "[#####---------------]"."""
    filled = round(BAR_WIDTH * min(1.0, done / total)) if total > 0 else 0
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]"


class StatusRow:
    """The row as something that rich draws at whatever width the terminal has at that moment."""

    def __init__(self, parts: Callable[[], Sequence[Part]]) -> None:
        self._parts = parts

    def text(self, width: int) -> Text:
        """The row for a terminal of `width` cells."""
        from rich.text import Text

        row = Text(no_wrap=True, overflow="crop", end="")
        for part in fitting(self._parts(), width):
            row.append(" " * GAP if row else "").append(part.text, style=part.style)
        row.truncate(width)
        return row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text(options.max_width)
