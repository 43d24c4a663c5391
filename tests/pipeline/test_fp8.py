"""model.fp8 in whole runs: the reference is the policy at the start, the mismatch is told, either precision resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.runs import read_lines, run, run_with_files, tiny_config

FP8 = ("model.fp8=tile_scaled", "algorithm.beta=0.05", "algorithm.correction=tis", "checkpoint.every=1")


def test_a_run_in_fp8(model: Path, tmp_path: Path) -> None:
    """The KL to the reference starts at 0, since that multiplies in FP8 too; sampling does not, and nobody warns."""
    _, sink = run(tiny_config(model, tmp_path, *FP8))
    first = sink.metrics[0]
    assert first["policy/kl"] == 0 and first["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert 1e-3 < first["mismatch/logprob_abs_diff"] < 0.3
    assert all(line["grad/norm"] > 0 for line in sink.metrics)
    assert not [text for text in sink.messages if "warning" in text], sink.messages
    _, plain = run(tiny_config(model, tmp_path / "plain", *FP8[1:]))
    assert plain.metrics[0]["mismatch/logprob_abs_diff"] < 1e-3
    assert first["grad/norm"] == pytest.approx(plain.metrics[0]["grad/norm"], rel=0.2)


def test_a_checkpoint_resumes_in_either_precision(model: Path, tmp_path: Path) -> None:
    run_with_files(tiny_config(model, tmp_path, *FP8, "run.steps=1"))
    for steps, fp8 in ((2, "none"), (3, "tile_scaled")):
        config = tiny_config(model, tmp_path, *FP8, f"model.fp8={fp8}", f"run.steps={steps}")
        run_with_files(config, resume=True)
        lines = read_lines(tmp_path / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert (lines[-1]["mismatch/logprob_abs_diff"] > 1e-3) == (fp8 == "tile_scaled")
