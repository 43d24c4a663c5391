"""Small SVG charts for the report: lines, stacked areas, values with error bars. No dependency, no script.

Every function returns one `<figure>` as text. Values that are not finite leave a gap and are counted under the chart;
a series longer than MAX_POINTS is thinned by keeping the lowest and highest value of each stretch, so that spikes
stay. Colours come from CSS classes (`s0` .. `s6`, see html.py), so the page decides between light and dark. Hovering
a chart shows the values of that step (an SVG <title>).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 28
MAX_POINTS = 400
MAX_HOVER_STRIPS = 200
NUM_COLORS = 7
MAX_LABELLED_STEPS = 6
"""So many steps or fewer are each labelled, where there is room; more get round numbers."""
FLAT = 1e-6
"""Values that differ by less than this part of the largest are taken as equal: what differs is rounding."""


@dataclass(frozen=True)
class Series:
    """A named curve."""

    name: str
    points: list[tuple[float, float]]
    """(step, value), by step; values may be NaN or inf."""
    is_faint: bool = False
    """Drawn thin and pale (raw values behind their running mean)."""
    errors: list[float] = field(default_factory=list)
    """Half lengths of the error bars, one a point, or empty."""


@dataclass(frozen=True)
class _Scale:
    """Maps data to pixels; y grows upwards."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]; low < high."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_label(value: float, spacing: float) -> str:
    """A short label that still tells ticks `spacing` apart from each other."""
    if value == 0 or abs(value) < spacing * 1e-6:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace(".00e", "e")
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return f"{value:,.{min(digits, 8)}f}"


def padded_range(values: Sequence[float], *, include_zero: bool = False) -> tuple[float, float]:
    """A range that holds every finite value with a little air, which does not reach below 0 where no value does.

    (0, 1) when there is no value, or only zeros: fractions and counts are never negative.
    """
    finite = [v for v in values if math.isfinite(v)]
    if include_zero:
        finite.append(0.0)
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low == high == 0.0:
        return 0.0, 1.0
    is_flat = high - low <= FLAT * max(abs(low), abs(high))
    pad = (0.1 * max(abs(low), abs(high)) if is_flat else 0.05 * (high - low)) or 0.5
    return (max(0.0, low - pad) if low >= 0.0 else low - pad), high + pad


def is_constant(points: Sequence[tuple[float, float]]) -> bool:
    """Whether two or more values are finite and the same but for rounding."""
    values = [y for _, y in points]
    if len(values) < 2 or not all(math.isfinite(v) for v in values):
        return False
    return max(values) - min(values) <= FLAT * max(abs(max(values)), abs(min(values)))


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about `limit` points: first, last, and the lowest and highest of each stretch between."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), size):
        # A stretch keeps one gap marker as well, so that a NaN does not vanish by thinning.
        stretch = range(start, min(start + size, len(points)))
        finite = [i for i in stretch if math.isfinite(points[i][1])]
        if len(finite) < len(stretch):
            kept.add(next(i for i in stretch if not math.isfinite(points[i][1])))
        if finite:
            kept.add(min(finite, key=lambda i: points[i][1]))
            kept.add(max(finite, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def running_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """At each point the mean of the last `window` finite values up to it; starts at the first finite value."""
    result: list[tuple[float, float]] = []
    recent: list[float] = []
    for x, y in points:
        if math.isfinite(y):
            recent = [*recent, y][-window:]
        if recent:
            result.append((x, sum(recent) / len(recent)))
    return result


def line_chart(title: str, series: Sequence[Series], *, include_zero: bool = False, lowest: float | None = None) -> str:
    """Curves over steps.

    Args:
        include_zero: the axis holds 0.
        lowest: error bars end here: no value can be below it.
    """
    drawn = [s if len(s.points) <= MAX_POINTS else Series(s.name, thin(s.points), s.is_faint) for s in series]
    floor = -math.inf if lowest is None else lowest
    values = [y for s in drawn for _, y in s.points] + [
        edge
        for s in drawn
        for (_, y), e in zip(s.points, s.errors, strict=False)
        for edge in (max(y - e, floor), y + e)
    ]
    if not any(math.isfinite(v) for v in values):
        return _empty(title, series)
    scale = _scale(drawn, padded_range(values, include_zero=include_zero))
    body = [_axes(scale, drawn)]
    for index, one in enumerate(drawn):
        color = f"s{_color_index(drawn, index)}"
        body.append(_path(one, scale, f"{color} faint" if one.is_faint else color))
        body.extend(_error_bars(one, scale, color, floor))
    body.extend(_hover_strips(drawn, scale))
    return _figure(title, body, drawn, series)


def stacked_chart(title: str, series: Sequence[Series]) -> str:
    """Non-negative parts stacked over steps; a missing or non-finite part counts as 0 in its stack."""
    steps = sorted({x for s in series for x, _ in s.points})
    parts = [{x: max(0.0, y) for x, y in s.points if math.isfinite(y)} for s in series]
    if not steps or not any(parts):
        return _empty(title, series)
    # Averaging stretches of steps keeps the areas true; the extremes kept by thin() would not.
    size = math.ceil(len(steps) / MAX_POINTS)
    stretches = [steps[i : i + size] for i in range(0, len(steps), size)]
    xs = [stretch[0] for stretch in stretches]
    heights = [[sum(part.get(x, 0.0) for x in stretch) / len(stretch) for stretch in stretches] for part in parts]
    tops = [sum(column) for column in zip(*heights, strict=True)]
    scale = _scale([Series("", list(zip(xs, tops, strict=True)))], padded_range(tops, include_zero=True))
    body: list[str] = []
    floor = [0.0] * len(xs)
    for index, layer in enumerate(heights):
        ceiling = [a + b for a, b in zip(floor, layer, strict=True)]
        body.append(_area(xs, floor, ceiling, scale, f"a{index % NUM_COLORS}"))
        floor = ceiling
    named = [Series(s.name, list(zip(xs, h, strict=True))) for s, h in zip(series, heights, strict=True)]
    body.append(_axes(scale, named))
    body.extend(_hover_strips(named, scale))
    return _figure(title, body, named, series)


def _scale(series: Sequence[Series], y_range: tuple[float, float]) -> _Scale:
    xs = [x for s in series for x, _ in s.points]
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 1, high + 1
    return _Scale(low, high, *y_range)


def _step_ticks(scale: _Scale, series: Sequence[Series]) -> list[float]:
    """The steps themselves where they are few and apart, else round numbers."""
    steps = sorted({x for s in series for x, _ in s.points})
    room = (scale.x_high - scale.x_low) / (2 * MAX_LABELLED_STEPS)
    if len(steps) <= MAX_LABELLED_STEPS and all(b - a >= room for a, b in zip(steps, steps[1:], strict=False)):
        return steps
    return nice_ticks(scale.x_low, scale.x_high, 6)


def _axes(scale: _Scale, series: Sequence[Series]) -> str:
    parts: list[str] = []
    y_ticks = nice_ticks(scale.y_low, scale.y_high)
    spacing = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else scale.y_high - scale.y_low
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick_label(tick, spacing)}</text>')
    for tick in _step_ticks(scale, series):
        if tick == int(tick):
            parts.append(f'<text x="{scale.x(tick):.1f}" y="{HEIGHT - 9}" text-anchor="middle">{int(tick):,}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts)


def _path(series: Series, scale: _Scale, css: str) -> str:
    """The curve, broken at values that are not finite; a point with no finite neighbour becomes a dot."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if math.isfinite(y):
            runs[-1].append((scale.x(x), scale.y(y)))
        elif runs[-1]:
            runs.append([])
    parts: list[str] = []
    for run in runs:
        if len(run) == 1:
            parts.append(f'<circle class="{css}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="3"/>')
        elif run:
            parts.append(f'<polyline class="{css}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in run)}"/>')
    return "".join(parts)


def _error_bars(series: Series, scale: _Scale, color: str, floor: float) -> list[str]:
    parts: list[str] = []
    for (x, y), error in zip(series.points, series.errors, strict=False):
        if not (math.isfinite(y) and math.isfinite(error)):
            continue
        px, low, high = scale.x(x), scale.y(max(y - error, floor)), scale.y(y + error)
        parts.append(
            f'<path class="{color} bar" d="M{px:.1f} {low:.1f}V{high:.1f}M{px - 4:.1f} {low:.1f}h8M{px - 4:.1f} '
            f'{high:.1f}h8"/><circle class="{color}" cx="{px:.1f}" cy="{scale.y(y):.1f}" r="3.5"/>'
        )
    return parts


def _area(xs: list[float], floor: list[float], ceiling: list[float], scale: _Scale, css: str) -> str:
    if len(xs) == 1:  # one step: a bar, since an area needs two
        x = scale.x(xs[0])
        return (
            f'<rect class="{css}" x="{x - 12:.1f}" width="24" y="{scale.y(ceiling[0]):.1f}" '
            f'height="{scale.y(floor[0]) - scale.y(ceiling[0]):.1f}"/>'
        )
    upper = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(xs, ceiling, strict=True)]
    lower = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(xs, floor, strict=True)]
    return f'<polygon class="{css}" points="{" ".join([*upper, *reversed(lower)])}"/>'


def _hover_strips(series: Sequence[Series], scale: _Scale) -> list[str]:
    """Invisible full-height strips whose <title> tells the values around that step."""
    values: dict[float, list[str]] = {}
    for one in series:
        for index, (x, y) in enumerate(one.points):
            error = f" +- {one.errors[index]:.3g}" if index < len(one.errors) else ""
            values.setdefault(x, []).append(f"{one.name}: {y:.6g}{error}")
    xs = sorted(values)
    xs = xs[:: math.ceil(len(xs) / MAX_HOVER_STRIPS)]
    strips: list[str] = []
    for index, x in enumerate(xs):
        left = (scale.x(xs[index - 1]) + scale.x(x)) / 2 if index else LEFT
        right = (scale.x(xs[index + 1]) + scale.x(x)) / 2 if index + 1 < len(xs) else WIDTH - RIGHT
        title = html.escape("\n".join([f"step {x:g}", *values[x]]))
        strips.append(
            f'<rect class="hover" x="{left:.1f}" width="{max(0.0, right - left):.1f}" y="{TOP}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{title}</title></rect>'
        )
    return strips


def _color_index(series: Sequence[Series], index: int) -> int:
    """A faint series shares the colour of the next strong one (its running mean)."""
    return sum(not s.is_faint for s in series[:index]) % NUM_COLORS


def _count_bad(series: Sequence[Series]) -> int:
    return sum(not math.isfinite(y) for s in series for _, y in s.points)


def _figure(title: str, body: Sequence[str], drawn: Sequence[Series], raw: Sequence[Series]) -> str:
    text = html.escape(title)
    keys = [f"k{_color_index(drawn, i)}{' faint' if s.is_faint else ''}" for i, s in enumerate(drawn)]
    names = [f'<span class="{key}">{html.escape(s.name)}</span>' for key, s in zip(keys, drawn, strict=True)]
    legend = f'<div class="legend">{"".join(names)}</div>' if len(drawn) > 1 else ""
    bad = _count_bad(raw)
    note = f'<div class="note">not finite (NaN or inf), left out: {bad}</div>' if bad else ""
    return (
        f'<figure><figcaption>{text}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}">'
        f"{''.join(body)}</svg>{legend}{note}</figure>"
    )


def _empty(title: str, raw: Sequence[Series]) -> str:
    bad = _count_bad(raw)
    why = f"no finite value ({bad} NaN or inf)" if bad else "no data"
    return f'<figure><figcaption>{html.escape(title)}</figcaption><div class="empty">{why}</div></figure>'
