"""Our side of the end-to-end benchmarks: a training run in a fresh process."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

CONFIG = measure.REPOSITORY / "configs/bench/vs_trl.yaml"


def train(
    model: Path | str,
    *,
    prompts: int,
    group_size: int,
    max_new_tokens: int,
    steps: int,
    seed: int = 0,
    evaluate_every: int | None = None,
    overrides: Sequence[str] = (),
    config: Path = CONFIG,
    timeout_s: float = 3600.0,
) -> dict[str, Any]:
    """One `grpo_mc train` in a fresh process.

    Args:
        model: model.path.
        evaluate_every: evaluate on the held-out file before, after and every so many steps (0 = before and after);
            None = no evaluation.
        overrides: more `section.key=value` arguments; they win.
        timeout_s: bound of the run.

    Returns: what trl_runner.py prints, under the same names.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        settings = {
            "model.path": model,
            "data.prompts_per_step": prompts,
            "rollout.group_size": group_size,
            "rollout.max_new_tokens": max_new_tokens,
            "run.steps": steps,
            "run.seed": seed,
            "run.dir": run_dir,
        }
        if evaluate_every is not None:
            source = {"kind": "jsonl", "path": str(measure.HELDOUT), "chat": False}
            settings |= {"evaluation.source": json.dumps(source), "evaluation.every": evaluate_every}
        command = [sys.executable, "-m", "grpo_mc", "train", config, *(f"{k}={v}" for k, v in settings.items())]
        done = measure.run_measured([*command, *overrides], timeout_s=timeout_s, cwd=measure.REPOSITORY)
        metrics = _lines(run_dir / "metrics.jsonl")
        evaluations = _lines(run_dir / "evaluations.jsonl") if evaluate_every is not None else []
    steps_s = [float(row["time/step_s"]) for row in metrics]
    step_s = statistics.median(steps_s[1:] or steps_s)
    return {
        "side": "ours",
        "step_s": step_s,
        "steps_s": steps_s,
        "rollouts_per_s": prompts * group_size / step_s,
        "response_tokens_mean": statistics.mean(row["response/length_mean"] for row in metrics),
        "reward_mean": statistics.mean(row["reward/mean"] for row in metrics),
        "peak_bytes": done.peak_bytes,
        "evaluations": [
            {"step": row["step"], "train_s": sum(steps_s[: row["step"]]), "accuracy": row["accuracy"]}
            for row in evaluations
        ],
        "seed": seed,
        "wall_s": done.seconds,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
