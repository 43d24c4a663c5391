"""Our side of the end-to-end benchmarks, behind two functions: a training run and a sampling engine."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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


def sampler(model: Path, prompts: list[list[int]], samples: int, new_tokens: int) -> Callable[[int], tuple[int, float]]:
    """A function seed -> (tokens sampled, seconds): `samples` responses of exactly `new_tokens` to each prompt."""
    import numpy as np

    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.mesh import build_mesh
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.weights import load_weights
    from grpo_mc.rollout.native import NativeEngine, Request
    from grpo_mc.rollout.sampling import SamplingParams

    mesh = build_mesh()
    checkpoint = open_checkpoint(model)
    policy = build_model(checkpoint.architecture, mesh, policy_config(checkpoint.architecture, mesh))
    load_weights(policy, checkpoint, mesh)
    tokenizer = load_tokenizer(model)
    parameters = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [Request(i, np.array(ids, np.int64), tuple(range(samples))) for i, ids in enumerate(prompts)]

    def run(seed: int) -> tuple[int, float]:
        engine = NativeEngine(policy, mesh, tokenizer, seed=seed)
        start = time.perf_counter()
        responses = engine.generate(requests, parameters)
        return sum(len(r.token_ids) for r in responses), time.perf_counter() - start

    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
