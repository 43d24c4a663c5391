"""Synthetic run directories, written as the pipeline writes them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment, Verdict, VerdictStatus

CONFIG_YAML = """\
model:
  path: models/tiny
data:
  train: {kind: reasoning_gym, task: chain_sum, seed: 1}
  prompts_per_step: 4
rewards:
  functions: [{type: exact}]
run:
  dir: runs/demo
  name: demo <run>
  steps: 40
"""


@pytest.fixture
def make_config() -> Any:
    """A stand-in with the settings that the monitor reads."""

    def make(**changes: Any) -> SimpleNamespace:
        values = {"tensorboard": False, "wandb": None, "samples_per_step": 2, "progress": True, "resume": False,
                  "steps": 40, "name": "demo", "dir": "runs/demo", "source": None, "every": 0, "mode": "train",
                  **changes}  # fmt: skip
        monitor = {key: values[key] for key in ("tensorboard", "wandb", "samples_per_step", "progress")}
        run = {key: values[key] for key in ("resume", "steps", "name", "dir")}
        return SimpleNamespace(
            monitor=SimpleNamespace(**monitor), run=SimpleNamespace(**run),
            pipeline=SimpleNamespace(mode=values["mode"]),
            evaluation=SimpleNamespace(source=values["source"], every=values["every"]),
        )  # fmt: skip

    return make


def _make_rollout(group_id: int, index: int, text: str, reward: float | None, reason: str = "") -> Rollout:
    prompt = Prompt(f"source:{group_id}", np.arange(3), "1 + 1 = <b>?</b>", ground_truth="2")
    status = VerdictStatus.SCORED if reward is not None else VerdictStatus.CRASHED
    return Rollout(
        group_id=group_id,
        sample_index=index,
        prompt=prompt,
        segments=[Segment("model", np.arange(4), np.zeros(4, np.float32))],
        text=text,
        finish_reason=FinishReason.FINISHED,
        policy_versions=(0,),
        rewards={} if reward is None else {"exact": reward},
        verdicts=[Verdict("exact", status, reward, reason)],
        reward=reward,
    )


def _make_group(group_id: int, rewards: list[float | None]) -> Group:
    rollouts = [_make_rollout(group_id, i, f"answer {i}", r, "equal" if r else "not equal")
                for i, r in enumerate(rewards)]  # fmt: skip
    return Group(group_id, rollouts[0].prompt, rollouts)


def _step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.2 + 0.01 * step + 0.05 * math.sin(step),
        "reward/std": 0.4,
        "response/length_mean": 5.5,
        "response/truncated_frac": 0.1,
        "group/zero_std_frac": 0.25,
        "policy/kl": 1e-4 * step,
        "policy/entropy": 1.5 - 0.01 * step,
        "policy/clip_frac_low": 0.0,
        "policy/clip_frac_high": 0.01,
        "policy/ratio_mean": 1.0,
        "grad/norm": 2.0,
        "time/step_s": 4.0,
        "time/rollout_s": 1.5,
        "time/training_s": 2.0,
        "time/rewards_s": 0.1,
        "throughput/rollout_tokens_per_s": 300.0,
        "throughput/train_tokens_per_s": 500.0,
        "memory/peak_bytes": 2.5e9,
    }


@pytest.fixture
def make_group() -> Any:
    """make_group(group_id, rewards): a group with one rollout a reward; None = its verifier crashed."""
    return _make_group


@pytest.fixture
def step_metrics() -> Any:
    """step_metrics(step): what a step writes."""
    return _step_metrics


@pytest.fixture
def run_dir(tmp_path: Path, make_config: Any) -> Path:
    """A finished run of 40 steps with evaluations before, half way and after."""
    from grpo_mc.monitor.metrics import MetricsWriter

    path = tmp_path / "demo"
    with MetricsWriter(path, make_config(), rank=0) as writer:
        writer.write_evaluation(0, {"accuracy": 0.31, "stderr": 0.023, "n": 400, "pass@1": 0.31})
        for step in range(1, 41):
            writer.write(step, _step_metrics(step))
            writer.write_samples(step, [_make_group(step, [1.0, 0.0, None])])
            if step % 20 == 0:
                writer.write_evaluation(step, {"accuracy": 0.31 + step / 100, "stderr": 0.023, "n": 400})
    (path / "config.yaml").write_text(CONFIG_YAML, encoding="utf-8")
    return path
