"""Which parts of the live row fit."""

from __future__ import annotations

import pytest

from grpo_mc.monitor.status_row import Part, StatusRow, bar, fitting

PARTS = [Part("stage", 0, "bold"), Part("[bar]", 2), Part("step 1/2", 1)]


@pytest.mark.parametrize(
    ("width", "row"),
    [(100, "stage  [bar]  step 1/2"), (22, "stage  [bar]  step 1/2"), (21, "stage  step 1/2"), (15, "stage  step 1/2"),
     (14, "stage"), (3, "sta")],
)  # fmt: skip
def test_parts_are_dropped_by_priority_and_keep_their_order(width: int, row: str) -> None:
    assert StatusRow(lambda: PARTS).text(width).plain == row


def test_a_part_that_does_not_fit_ends_the_row() -> None:
    """A shorter one of less importance does not take its place: the row would show another thing at every width."""
    parts = [Part("a", 0), Part("b" * 10, 1), Part("c", 2)]
    assert fitting(parts, 5) == parts[:1]


@pytest.mark.parametrize(("done", "total", "filled"), [(0, 10, 0), (5, 10, 10), (10, 10, 20), (12, 10, 20), (0, 0, 0)])
def test_the_bar(done: int, total: int, filled: int) -> None:
    assert bar(done, total) == f"[{'#' * filled}{'-' * (20 - filled)}]"
