"""Every preset and every correction trains a step through the whole pipeline."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_mc.config import PRESETS
from helpers.runs import run, tiny_config


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_trains_a_step(model: Path, tmp_path: Path, preset: str) -> None:
    beta = PRESETS[preset].algorithm["beta"]
    overrides = (f"algorithm.preset={preset}", f"algorithm.beta={beta}", "run.steps=1", "checkpoint.export_hf=false")
    _, sink = run(tiny_config(model, tmp_path, *overrides))
    (line,) = sink.metrics
    assert line["optimizer/steps"] == PRESETS[preset].algorithm["epochs"]
    assert math.isfinite(line["loss"]) and line["grad/norm"] > 0
    assert ("policy/kl" in line) == (beta > 0), "reference log-probs exist exactly where the objective asks for them"
    assert not [message for message in sink.messages if message.startswith("warning")]


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "mask_token", "mask_sequence"])
def test_a_correction_changes_nothing_where_sampler_and_trainer_agree(
    model: Path, tmp_path: Path, correction: str
) -> None:
    _, plain = run(tiny_config(model, tmp_path / "plain", "run.steps=1"))
    overrides = (f"algorithm.correction={correction}", "algorithm.correction_low=0.5", "run.steps=1")
    _, corrected = run(tiny_config(model, tmp_path / "corrected", *overrides))
    ours, theirs = corrected.metrics[0], plain.metrics[0]
    assert ours["mismatch/masked_frac"] == 0
    assert ours["mismatch/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert ours["grad/norm"] == pytest.approx(theirs["grad/norm"], rel=1e-5)
