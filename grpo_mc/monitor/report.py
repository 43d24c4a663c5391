"""write_report: one self-contained HTML file about a run, finished, going or killed.

Sections: what is missing or damaged, headline figures, evaluations with error bars, curves, where the time goes,
samples with the reasons of their rewards, a table of every metric, the objective, the configuration. A part whose data
is not there says so; nothing of a run's state makes the report fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mc.monitor import html
from grpo_mc.monitor.evaluations import evaluation_text, evaluation_value
from grpo_mc.monitor.formats import counted, format_duration, format_measured, format_number
from grpo_mc.monitor.run_files import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    decode_number,
    latest_by_step,
    read_line_file,
    write_atomically,
)
from grpo_mc.monitor.svg import Series, is_constant, line_chart, running_mean, stacked_chart

MAX_SAMPLES = 24
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """Metrics of metrics.jsonl that are drawn together."""

    title: str
    labels: dict[str, str]
    """Metric -> what its curve is called; a single one is called as the chart."""
    from_zero: bool = True
    """Whether the axis starts at 0."""
    unit: float = 1.0
    """What a value is divided by before it is drawn."""


CHARTS = (
    Chart("Reward, spread inside the batch", {"reward/std": ""}),
    Chart("Response length, tokens", {"response/length_mean": "mean", "response/length_max": "longest"}),
    Chart("Truncated responses, fraction", {"response/truncated_frac": ""}),
    Chart("Groups without spread, fraction", {"group/zero_std_frac": ""}),
    Chart("Loss", {"loss": "loss", "policy/surrogate": "its surrogate alone"}, from_zero=False),
    Chart("KL to the reference", {"policy/kl": ""}, from_zero=False),
    Chart("Entropy, nats per token", {"policy/entropy": ""}, from_zero=False),
    Chart("Clipped tokens, fraction",
          {"policy/clip_frac_low": "at the lower bound", "policy/clip_frac_high": "at the upper bound"}),
    Chart("Ratio, mean", {"policy/ratio_mean": ""}, from_zero=False),
    Chart("Rollout and trainer log-probs, mean absolute difference", {"mismatch/logprob_abs_diff": ""}),
    Chart("Gradient norm", {"grad/norm": ""}),
    Chart("Learning rate", {"optimizer/lr": ""}),
    Chart("Staleness, policy versions", {"staleness/mean": "mean", "staleness/max": "largest"}),
    Chart("Peak memory, GB", {"memory/peak_bytes": ""}, unit=1e9),
    Chart("Throughput, tokens/s",
          {"throughput/rollout_tokens_per_s": "rollout", "throughput/train_tokens_per_s": "training"}),
)  # fmt: skip


@dataclass(frozen=True)
class RunData:
    """Everything the report reads."""

    run_dir: Path
    config_text: str | None
    metrics: Records
    """By step."""
    evaluations: Records
    """By step."""
    samples: Records
    problems: list[str]


def read_run(run_dir: Path | str) -> RunData:
    """Reads what is there of a run directory.

    Raises:
        FileNotFoundError: no such directory, or one with neither config.yaml nor metrics.jsonl in it.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"report: {path} is no directory; give the run.dir of a training run")
    config_path = path / CONFIG_FILE
    if not config_path.exists() and not (path / METRICS_FILE).exists():
        raise FileNotFoundError(
            f"report: {path} holds neither {CONFIG_FILE} nor {METRICS_FILE}; give the run.dir of a training run"
        )
    files = {name: read_line_file(path / name) for name in (METRICS_FILE, EVALUATIONS_FILE, SAMPLES_FILE)}
    problems = [problem for file in files.values() for problem in file.problems]
    config_text = config_path.read_text(encoding="utf-8", errors="replace") if config_path.exists() else None
    if config_text is None:
        problems.append(f"{CONFIG_FILE} is missing: the configuration is not shown")
    metrics = latest_by_step(files[METRICS_FILE].records)
    evaluations = latest_by_step(files[EVALUATIONS_FILE].records)
    if not metrics:
        problems.append("no finished step: metrics.jsonl is missing or empty")
    if not evaluations:
        problems.append("no evaluation: evaluations.jsonl is missing or empty")
    return RunData(path, config_text, metrics, evaluations, files[SAMPLES_FILE].records, problems)


def write_report(run_dir: Path | str, output: Path | str | None = None) -> Path:
    """Writes the report of a run and returns its path.

    Args:
        run_dir: the run directory.
        output: the file to write; default RUN_DIR/report.html. Replaced atomically.

    Raises:
        FileNotFoundError: `run_dir` is no run directory.
    """
    data = read_run(run_dir)
    target = Path(output) if output is not None else data.run_dir / REPORT_FILE
    write_atomically(target, render(data))
    return target


def render(data: RunData) -> str:
    """The report as HTML text."""
    planned = _planned_steps(data.config_text)
    done = int(data.metrics[-1]["step"]) if data.metrics else 0
    problems = list(data.problems)
    if planned is not None and done < planned:
        problems.append(f"{done} of {planned} steps are done: the run is going, was stopped or was killed")
    name = _config_value(data.config_text, "run", "name") or data.run_dir.resolve().name
    model = _config_value(data.config_text, "model", "path")
    subtitle = " - ".join(
        part for part in (f"model {model}" if model else "", counted(done, "step"), str(data.run_dir)) if part
    )
    sections = [
        html.problems(problems),
        html.tiles(_headlines(data, done, planned)),
        html.section("Evaluation", _evaluation(data.evaluations)),
        html.section("Curves", _charts(data.metrics)),
        html.section("Samples", _samples(data.samples)),
        html.section("All metrics", _metrics_table(data.metrics)),
        html.section("Objective", _objective(data.run_dir)),
        html.section("Configuration", html.folded(CONFIG_FILE, data.config_text) if data.config_text else ""),
    ]
    return html.page(f"GRPO run {name}", subtitle, sections)


def metric_points(metrics: Records, name: str) -> list[tuple[float, float]]:
    """(step, value) of one metric where it is there."""
    found = ((record["step"], decode_number(record.get(name))) for record in metrics)
    return [(float(step), value) for step, value in found if value is not None]


def _headlines(data: RunData, done: int, planned: int | None) -> list[tuple[str, str]]:
    items: list[tuple[str, str]] = []
    figures = [(r["step"], figure) for r in data.evaluations if (figure := evaluation_value(r)) is not None]
    for step, figure in figures[:1] + figures[1:][-1:]:
        when = "before training" if step == 0 else f"after step {step}"
        items.append((f"{figure[0]} {when}", format_measured(*figure[1:])))
    rewards = [y for _, y in metric_points(data.metrics, "reward/mean") if math.isfinite(y)]
    if rewards:
        window = max(1, min(10, len(rewards) // 4))
        first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
        steps = "step" if window == 1 else f"{window} steps"
        items.append((f"training reward, first and last {steps}", f"{format_number(first)} -> {format_number(last)}"))
    items.append(("steps", f"{done} of {planned}" if planned is not None else str(done)))
    seconds = [y for _, y in metric_points(data.metrics, "time/step_s") if math.isfinite(y)]
    if seconds:
        items.append(("time in steps", format_duration(sum(seconds))))
        items.append(("median step", format_duration(sorted(seconds)[len(seconds) // 2])))
    return items


def _evaluation(evaluations: Records) -> str:
    if not evaluations:
        return ""
    figures = [(record["step"], figure) for record in evaluations if (figure := evaluation_value(record)) is not None]
    chart = ""
    if figures:
        name = figures[0][1][0]
        points = [(float(step), value) for step, (key, value, _) in figures if key == name]
        errors = [error if error is not None else math.nan for _, (key, _, error) in figures if key == name]
        lowest = 0.0 if name == "accuracy" else None
        chart = line_chart(f"Held-out {name}", [Series(name, points, errors=errors)], lowest=lowest)
        chart = f'<div class="charts">{chart}</div>'
    names = ["step"] + sorted({key for record in evaluations for key in record if key != "step"}, key=_evaluation_order)
    rows = [[record.get(name) if decode_number(record.get(name)) is None else decode_number(record[name])
             for name in names] for record in evaluations]  # fmt: skip
    note = (
        '<p class="sub">Error bars: for an accuracy half the width of the Wilson interval of one standard deviation, '
        "for a reward one standard error over the problems.</p>"
    )
    return chart + note + html.table(names, rows)


def _evaluation_order(name: str) -> tuple[int, str]:
    first = ["accuracy", "accuracy_error", "reward_mean", "reward_stderr", "stderr", "n"]
    return (first.index(name) if name in first else len(first), name)


def _charts(metrics: Records) -> str:
    if not metrics:
        return ""
    drawn, other = [_reward_chart(metrics)], list[str]()
    constant: list[list[Any]] = []
    for chart in (*CHARTS, *_other_charts(metrics)):
        series = _series(chart, metrics)
        if series and all(is_constant(one.points) for one in series):
            constant += [[_row_name(chart, one), one.points[0][1]] for one in series]
        elif series:
            (drawn if chart in CHARTS else other).append(line_chart(chart.title, series, include_zero=chart.from_zero))
    drawn.append(_timing_chart(metrics))
    parts = [f'<div class="charts">{"".join(drawn)}</div>']
    if other:
        parts.append(html.folded_charts("Other metrics", other))
    if constant:
        table = html.table(["metric", "value"], constant, css="scroll")
        parts.append(html.folded_table("Constant over the run", table))
    return "".join(parts)


def _series(chart: Chart, metrics: Records) -> list[Series]:
    found = {label or chart.title: metric_points(metrics, name) for name, label in chart.labels.items()}
    return [Series(label, [(x, y / chart.unit) for x, y in points]) for label, points in found.items() if points]


def _row_name(chart: Chart, series: Series) -> str:
    return chart.title if series.name == chart.title else f"{chart.title}: {series.name}"


def _other_charts(metrics: Records) -> list[Chart]:
    """One for each metric that has no chart, under its own name; times and rewards are in charts of their own."""
    charted = {name for chart in CHARTS for name in chart.labels} | {"step", "reward/mean"}
    names = sorted({key for record in metrics for key in record} - charted)
    return [
        Chart(name, {name: ""}, from_zero=False)
        for name in names
        if not name.startswith(("time/", "reward/")) or name == "time/step_s"
    ]


def _reward_chart(metrics: Records) -> str:
    points = metric_points(metrics, "reward/mean")
    # A mean over fewer than 5 steps smooths too little to be worth a second curve.
    window = len(points) // 10 if len(points) >= 50 else min(5, len(points) // 4)
    series = [Series("reward", points)]
    if window > 1:
        series = [Series("reward", points, is_faint=True),
                  Series(f"mean of last {window}", running_mean(points, window))]  # fmt: skip
    parts = sorted({k for r in metrics for k in r if k.startswith("reward/") and k.endswith("/mean")} - {"reward/mean"})
    if len(parts) > 1:
        series += [
            Series(name.removeprefix("reward/").removesuffix("/mean"), metric_points(metrics, name)) for name in parts
        ]
    return line_chart("Reward", series)


def _timing_chart(metrics: Records) -> str:
    names = sorted({k for r in metrics for k in r if k.startswith("time/") and k.endswith("_s")} - {"time/step_s"})
    stages = [Series(name.removeprefix("time/").removesuffix("_s"), metric_points(metrics, name)) for name in names]
    # The largest at the bottom, so that the order is the order of interest and the small ones do not jitter.
    stages.sort(key=lambda s: -sum(y for _, y in s.points if math.isfinite(y)))
    return stacked_chart("Where the time goes, seconds a step", stages) if stages else ""


def _samples(samples: Records) -> str:
    if len(samples) > MAX_SAMPLES:
        half = MAX_SAMPLES // 2
        note = f'<p class="sub">The first and last {half} of {len(samples)} kept; the others are in {SAMPLES_FILE}.</p>'
        samples = samples[:half] + samples[-half:]
    else:
        note = ""
    return f'{note}<div class="samples">{"".join(map(html.sample, samples))}</div>' if samples else ""


def _metrics_table(metrics: Records) -> str:
    names = sorted({key for record in metrics for key in record} - {"step"})
    rows: list[list[Any]] = []
    for name in names:
        values = [y for _, y in metric_points(metrics, name)]
        finite = [v for v in values if math.isfinite(v)]
        if values:
            rows.append([name, values[0], values[-1], min(finite, default=None), max(finite, default=None),
                         len(values) - len(finite) or None])  # fmt: skip
    return html.table(["metric", "first", "last", "lowest", "highest", "not finite"], rows) if rows else ""


def _parse_config(config_text: str | None) -> dict[str, Any]:
    import yaml

    if config_text is None:
        return {}
    try:
        parsed = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _config_value(config_text: str | None, section: str, key: str) -> Any:
    values = _parse_config(config_text).get(section)
    return values.get(key) if isinstance(values, dict) else None


def _planned_steps(config_text: str | None) -> int | None:
    steps = _config_value(config_text, "run", "steps")
    return steps if isinstance(steps, int) else None


def _objective(run_dir: Path) -> str:
    """The objective as a formula, where this version can still read the run's configuration."""
    from grpo_mc.config import load_config, objective_formula

    try:
        formula = objective_formula(load_config(run_dir / CONFIG_FILE, []))
    except (ValueError, OSError) as error:
        return f'<p class="sub">{html.text(f"not shown: {error}")}</p>'
    return f'<div class="card"><pre>{html.text(formula)}</pre></div>'


def summary_lines(data: RunData) -> list[str]:
    """The evaluations as lines of text for the terminal."""
    records = [record for record in data.evaluations if evaluation_value(record) is not None]
    return [f"evaluation at step {record['step']}: {evaluation_text(record)}" for record in records]
