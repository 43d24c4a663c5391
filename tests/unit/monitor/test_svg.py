"""Charts: ticks, ranges, thinning, gaps, and that the SVG is well formed whatever the data."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from grpo_mc.monitor import svg
from grpo_mc.monitor.svg import Series

NAN, INF = math.nan, math.inf


def parse(figure: str) -> ElementTree.Element:
    """The figure as XML; raises when it is not well formed."""
    return ElementTree.fromstring(figure)


def coordinates(figure: str) -> list[float]:
    return [float(n) for attribute in re.findall(r' (?:x|y|cx|cy|x1|y1|points|width|height)="([^"]*)"', figure)
            for n in re.split(r"[ ,]", attribute)]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 40, [0, 10, 20, 30, 40]), (-3, 7, [-2, 0, 2, 4, 6]),
     (0.97, 1.03, [0.98, 1.0, 1.02])],
)  # fmt: skip
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float, expected: list[float]) -> None:
    assert svg.nice_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 1e-12), (1e15, 1e15 + 4), (-1e300, 1e300), (0.1, 0.1000001)])
def test_ticks_of_extreme_ranges_are_few_and_inside(low: float, high: float) -> None:
    ticks = svg.nice_ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 2 <= len(ticks) <= 11
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@pytest.mark.parametrize(
    ("value", "spacing", "label"),
    [(0, 1, "0"), (1e-20, 0.1, "0"), (0.25, 0.05, "0.25"), (1500, 500, "1,500"), (2e6, 1e6, "2e6"),
     (2.5e-5, 1e-5, "2.50e-5"), (1.0, 0.02, "1.00"), (1.0000002, 2e-7, "1.0000002")],
)  # fmt: skip
def test_tick_labels(value: float, spacing: float, label: str) -> None:
    assert svg.tick_label(value, spacing) == label


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], (0, 1)), ([NAN, INF], (0, 1)), ([0.0, 0.0], (0, 1)), ([2.0, 2.0, NAN], (1.8, 2.2)),
     ([0.0, 10.0], (0, 10.5)), ([1.0, 10.0], (0.55, 10.45)), ([-10.0, 10.0], (-11, 11)),
     ([1.0, 1.0 + 1e-8], (0.9, 1.1))],
)  # fmt: skip
def test_range_has_air_and_is_never_empty(values: list[float], expected: tuple[float, float]) -> None:
    assert svg.padded_range(values) == pytest.approx(expected)


def test_a_range_from_zero_starts_at_zero() -> None:
    assert svg.padded_range([4.0, 10.0], include_zero=True) == pytest.approx((0.0, 10.5))


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[1234] = (1234.0, 99.0)
    points[7777] = (7777.0, NAN)
    points[8888] = (8888.0, -7.0)
    kept = svg.thin(points)
    assert len(kept) < 1000
    assert {0.0, 1234.0, 7777.0, 8888.0, 9999.0} <= {x for x, _ in kept}
    assert svg.thin(points[:10]) == points[:10]


def test_running_mean_skips_values_that_are_not_finite() -> None:
    points = [(1.0, NAN), (2.0, 2.0), (3.0, INF), (4.0, 4.0), (5.0, 6.0)]
    assert svg.running_mean(points, 2) == [(2.0, 2.0), (3.0, 2.0), (4.0, 3.0), (5.0, 5.0)]


def test_a_gap_splits_the_curve_and_is_counted() -> None:
    figure = svg.line_chart("kl", [Series("kl", [(1, 1), (2, 2), (3, NAN), (4, 1), (5, INF), (6, 3), (7, 4)])])
    root = parse(figure)
    assert len(root.findall(".//polyline")) == 2
    assert len(root.findall(".//circle")) == 1, "the lone point between two gaps is a dot"
    assert "left out: 2" in figure


@pytest.mark.parametrize(
    ("points", "text"), [([], "no data"), ([(1, NAN), (2, INF)], "no finite value (2 NaN or inf)")]
)
def test_nothing_to_draw_is_said(points: list[tuple[float, float]], text: str) -> None:
    for chart in (svg.line_chart, svg.stacked_chart):
        root = parse(chart("kl", [Series("kl", points)]))
        assert root.find(".//svg") is None
        assert text in "".join(root.itertext())


@pytest.mark.parametrize(
    "points",
    [[(1, 0.5)], [(0, 0.0)], [(1, 1.0), (2, 1.0)], [(1, 1e-300), (2, 2e-300)], [(1, -1e30), (2, 1e30)],
     [(5, 3.0), (5.0, 3.0)], [(i, float(i % 7)) for i in range(3000)]],
)  # fmt: skip
def test_every_coordinate_is_finite_and_inside(points: list[tuple[float, float]]) -> None:
    for chart in (svg.line_chart, svg.stacked_chart):
        figure = chart("t", [Series("a", points), Series("b", points)])
        parse(figure)
        values = coordinates(figure)
        assert all(math.isfinite(v) and -20 <= v <= svg.WIDTH + 20 for v in values)


def test_error_bars_enlarge_the_range() -> None:
    figure = svg.line_chart("accuracy", [Series("accuracy", [(0, 0.3), (40, 0.6)], errors=[0.02, NAN])])
    root = parse(figure)
    bars = [e for e in root.iter("path") if "bar" in e.get("class", "")]
    assert len(bars) == 1, "a missing error draws no bar"
    assert "0.3 +- 0.02" in figure


def test_error_bars_end_at_the_lowest_value_there_can_be() -> None:
    """0 of 16 right: the axis of the accuracy reached below 0."""
    figure = svg.line_chart("accuracy", [Series("accuracy", [(0, 0.0)], errors=[0.03])], lowest=0.0)
    (bar,) = (e for e in parse(figure).iter("path") if "bar" in e.get("class", ""))
    assert f" {svg.HEIGHT - svg.BOTTOM:.1f}V" in bar.get("d", ""), "from the axis up"
    assert not [label for label in tick_texts(figure) if label.startswith("-")]


def tick_texts(figure: str) -> list[str]:
    return [e.text or "" for e in parse(figure).iter("text")]


def test_all_zero_is_drawn_on_an_axis_from_0_to_1() -> None:
    labels = tick_texts(svg.line_chart("fraction", [Series("fraction", [(1, 0.0), (2, 0.0)])]))
    assert labels == ["0", "0.2", "0.4", "0.6", "0.8", "1.0", "1", "2"]


def test_rounding_is_not_drawn_as_a_curve() -> None:
    """A ratio of 1 +- 1e-7 had four ticks "1.000000"."""
    labels = tick_texts(svg.line_chart("ratio", [Series("ratio", [(1, 1.0), (2, 1.0 + 1e-7), (9, 1.0 - 1e-7)])]))
    assert len(set(labels)) == len(labels) and "1.00" in labels


@pytest.mark.parametrize(
    ("steps", "labels"),
    [([0], ["0"]), ([0, 48], ["0", "48"]), ([0, 20, 40], ["0", "20", "40"]),
     ([0, 1, 40], ["0", "10", "20", "30", "40"]), (list(range(0, 41)), ["0", "10", "20", "30", "40"])],
)  # fmt: skip
def test_few_steps_are_labelled_each(steps: list[int], labels: list[str]) -> None:
    """One evaluation at step 0 had the ticks -1, 0 and 1."""
    figure = svg.line_chart("accuracy", [Series("accuracy", [(float(step), 0.5) for step in steps])])
    assert [e.text for e in parse(figure).iter("text") if e.get("text-anchor") == "middle"] == labels


@pytest.mark.parametrize(
    ("values", "expected"),
    [([2.0, 2.0], True), ([0.0, 0.0, 0.0], True), ([1.0, 1.0 + 1e-8], True), ([1.0, 1.001], False), ([1.0], False),
     ([NAN, NAN], False), ([1.0, NAN], False), ([], False)],
)  # fmt: skip
def test_what_counts_as_constant(values: list[float], expected: bool) -> None:
    assert svg.is_constant([(float(i), v) for i, v in enumerate(values)]) is expected


def test_stacks_add_up() -> None:
    figure = svg.stacked_chart("time", [Series("a", [(1, 1.0), (2, 1.0)]), Series("b", [(1, 3.0), (2, NAN)])])
    first, second = (e.get("points", "").split() for e in parse(figure).iter("polygon"))
    # The upper edge of a is the lower edge of b; where b is missing the two edges meet.
    assert first[:2] == list(reversed(second[2:]))
    assert second[1] == first[1]


def test_names_from_a_run_are_escaped() -> None:
    figure = svg.line_chart("<x>", [Series("a<script>&", [(1, 1)]), Series("b", [(1, 2)])])
    parse(figure)
    assert "<script>" not in figure
