"""The report on finished, running, killed, empty and damaged runs."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.monitor.metrics import MetricsWriter
from grpo_mc.monitor.report import evaluation_value, read_run, render, summary_lines, write_report

VOID = {"meta", "link", "br"}


class Balance(html.parser.HTMLParser):
    """Checks that tags are closed in order and collects the text and the addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> tuple[str, Balance]:
    """The text of a page, after checking that it is balanced, without script and without outside parts."""
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.addresses == []
    assert "script" not in parser.tags
    assert "url(" not in page and "@import" not in page and "http" not in page.replace("http-equiv", "")
    return re.sub(r"\s+", " ", " ".join(parser.text)), parser


def test_a_finished_run(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    text, _ = check(path.read_text(encoding="utf-8"))
    assert "GRPO run demo <run>" in text
    assert "0.31 +- 0.023" in text and "0.71 +- 0.023" in text
    assert "40 of 40" in text
    for title in ("Held-out accuracy", "Reward", "Response length, tokens", "KL to the reference",
                  "Entropy, nats per token", "Clipped tokens, fraction", "Gradient norm",
                  "Where the time goes, seconds a step", "Throughput, tokens/s"):  # fmt: skip
        assert title in text, title
    assert "1 + 1 = <b>?</b>" in text and "not equal" in text
    assert "This report is incomplete" not in text
    assert "A_i = " in text, "the objective's formula"
    assert "task: chain_sum" in text, "the configuration"
    lines = [f"evaluation at step {step}: accuracy {0.31 + step / 100:g} +- 0.023 (n = 400)" for step in (0, 20, 40)]
    assert summary_lines(read_run(run_dir)) == lines


def test_a_metric_without_a_chart_of_its_own_is_under_other_metrics(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 41, "mismatch/k3": 0.5, "a<b>": 1}\n')
    page = render(read_run(run_dir))
    check(page)
    other = page.split("Other metrics")[1].split("Constant over the run")[0]
    assert "<figcaption>mismatch/k3</figcaption>" in other and "a&lt;b&gt;" in other


def test_what_never_changes_is_a_row_of_a_small_table_and_no_chart(run_dir: Path) -> None:
    page = render(read_run(run_dir))
    constant = page.split("Constant over the run")[1].split("</details>")[0]
    text = re.sub(r"<[^>]+>", " ", constant)
    for row in ("Gradient norm +2 ", "Peak memory, GB +2.5 ", "Clipped tokens, fraction: at the lower bound +0 ",
                "Throughput, tokens/s: training +500 "):  # fmt: skip
        assert re.search(row, text), row
    for title in ("Gradient norm", "Clipped tokens, fraction", "Peak memory, GB"):
        assert f"<figcaption>{title}</figcaption>" not in page
    for title in ("Reward", "KL to the reference", "Entropy, nats per token"):
        assert f"<figcaption>{title}</figcaption>" in page


def test_curves_are_named_for_people(run_dir: Path) -> None:
    """The memory's curve was called memory/peak_bytes under the title "Peak memory, GB"."""
    with (run_dir / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 41, "memory/peak_bytes": 3.5e9, "policy/clip_frac_low": 0.5}\n')
    page = render(read_run(run_dir))
    assert "<figcaption>Peak memory, GB</figcaption>" in page and "Peak memory, GB: 3.5" in page
    assert "at the lower bound" in page
    assert "memory/peak_bytes" not in page.split("All metrics")[0]


def test_a_killed_run_says_what_is_missing(run_dir: Path) -> None:
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(metrics[:7]) + metrics[7][:30])
    (run_dir / "evaluations.jsonl").unlink()
    (run_dir / "samples.jsonl").unlink()
    text, _ = check(render(read_run(run_dir)))
    assert "7 of 40 steps are done" in text
    assert "metrics.jsonl, line 8: not complete JSON" in text
    assert "no evaluation" in text


@pytest.mark.parametrize("present", [["config.yaml"], ["metrics.jsonl"], ["metrics.jsonl", "evaluations.jsonl"]])
def test_a_run_of_0_steps_and_one_without_config(run_dir: Path, present: list[str]) -> None:
    for path in list(run_dir.iterdir()):
        if path.name not in present:
            path.unlink()
    if "evaluations.jsonl" not in present and "metrics.jsonl" in present:
        (run_dir / "metrics.jsonl").write_text("")
    text, _ = check(render(read_run(run_dir)))
    assert "This report is incomplete" in text


def test_values_that_are_not_finite_do_not_stop_the_report(tmp_path: Path, make_config: Any, step_metrics: Any) -> None:
    """H03, H08: a run that went wrong is the one whose report is needed."""
    with MetricsWriter(tmp_path / "run", make_config(), rank=0) as writer:
        writer.write_evaluation(0, {"accuracy": float("nan"), "stderr": float("nan"), "n": 0})
        for step in range(1, 6):
            bad = [float("nan"), float("inf"), float("-inf"), 0.0, 1e308][step - 1]
            writer.write(step, {name: bad for name in step_metrics(1)})
        writer.write_evaluation(5, {"accuracy": 0.5, "stderr": None, "n": 1})
    text, _ = check(render(read_run(tmp_path / "run")))
    assert "left out: 3" in text


def test_only_values_that_are_not_finite(tmp_path: Path, make_config: Any, step_metrics: Any) -> None:
    with MetricsWriter(tmp_path / "run", make_config(), rank=0) as writer:
        writer.write(1, {name: float("nan") for name in step_metrics(1)})
    text, _ = check(render(read_run(tmp_path / "run")))
    assert "no finite value (1 NaN or inf)" in text


def test_html_and_control_characters_in_samples_are_shown_not_run(run_dir: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> \x00\x1b[31m \ud83d\ude00 \u4f60\u597d & &lt;"
    record = {"step": 1, "prompt": evil, "response": evil, "reward": None, "ground_truth": evil, "finish_reason": evil,
              "verdicts": [{"name": evil, "status": evil, "score": "NaN", "reason": evil}]}  # fmt: skip
    (run_dir / "samples.jsonl").write_text(json.dumps(record) + "\n")
    page = write_report(run_dir).read_text(encoding="utf-8")
    text, parser = check(page)
    assert {"script", "img"}.isdisjoint(parser.tags)
    assert "<script>alert(1)</script>" in text and "\u4f60\u597d & &lt;" in text
    assert "\x00" not in page and "\x1b" not in page
    assert "unscored" in text


@pytest.mark.parametrize(
    "record",
    [{"step": 1}, {"step": "x", "verdicts": "none", "rewards": 3}, {"step": 1, "rewards": {"a": 0.5}, "reward": True},
     {"step": 1, "verdicts": [1, None, {}]}],
)  # fmt: skip
def test_samples_of_odd_shape_are_shown_as_far_as_they_go(run_dir: Path, record: dict[str, Any]) -> None:
    (run_dir / "samples.jsonl").write_text(json.dumps(record) + "\n")
    check(render(read_run(run_dir)))


def test_evaluations_of_odd_shape(run_dir: Path) -> None:
    rows = [{"step": 0, "reward_mean": 0.2, "stderr": 0.1}, {"step": 1, "other": [1, 2]}, {"step": 2, "accuracy": "x"}]
    (run_dir / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text, _ = check(render(read_run(run_dir)))
    assert "reward_mean before training 0.2 +- 0.1" in text
    assert evaluation_value(rows[1]) is None and evaluation_value(rows[2]) is None


def test_many_samples_are_cut_and_the_cut_is_said(run_dir: Path) -> None:
    text, _ = check(render(read_run(run_dir)))
    assert "The first and last 12 of 80 kept" in text


def test_a_config_this_version_cannot_read_is_still_shown(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("run: {steps: 40, name: [1\n")
    text, _ = check(render(read_run(run_dir)))
    assert "not shown:" in text and "run: {steps: 40" in text


def test_a_wrong_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no directory; give the run.dir"):
        write_report(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds neither config.yaml nor metrics.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_run_gives_a_small_file(tmp_path: Path, make_config: Any, step_metrics: Any) -> None:
    with MetricsWriter(tmp_path / "run", make_config(), rank=0) as writer:
        for step in range(1, 5001):
            writer.write(step, step_metrics(step))
    path = write_report(tmp_path / "run", tmp_path / "out.html")
    assert path == tmp_path / "out.html"
    assert path.stat().st_size < 2_000_000
