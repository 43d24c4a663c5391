"""The benchmark runner: its fields, the comparison with an earlier file, and that every row's baseline agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from grpo_mc.ops import bench
from grpo_mc.ops.bench import fp8_grouped_wgrad, paged_attention, policy_loss, timing, token_logprobs

FIELDS = {
    "op", "device", "shape", "dtype", "threads", "seconds", "baseline_seconds", "ratio", "baseline_name",
    "rel_error", "peak_bytes",
}  # fmt: skip


def test_every_operator_has_a_benchmark() -> None:
    from grpo_mc.ops import reference

    # Timed as parts of others: of token_logprobs and linear_logprobs, or so little beside the operator before it.
    parts = {"PolicyLoss", "token_logprob_stats", "token_logprobs_backward", "linear_logprob_stats"}
    parts |= {"dequantize_fp8", "dequantize_int4", "dequantize_int8", "moe_route"}
    assert set(bench.names()) == set(reference.__all__) - parts


def test_json_rows_and_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.run("group_advantages", as_json=True, rounds=1) == 0
    text = capsys.readouterr().out
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert FIELDS <= set(row) and ("gbps" in row) != ("gflops" in row)
        assert row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"])
        assert row["rel_error"] < 1e-6
    earlier = tmp_path / "before.jsonl"
    earlier.write_text("a header\n" + text)
    bench.run("group_advantages", compare=earlier, rounds=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("before: " in line for line in lines)
    assert all("x faster than " in line or "x slower than " in line for line in lines)


def test_the_ratio_in_words_says_which_way_it_goes() -> None:
    assert [bench.speed_text(ratio) for ratio in (4.05, 1.0, 0.8)] == ["4.05x faster", "1.00x faster", "1.25x slower"]


def test_user_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no operator 'nothing'; operators are adam_step, fp8_gemm, "):
        bench.run("nothing")
    (tmp_path / "empty").write_text("no rows here\n")
    with pytest.raises(ValueError, match="holds no JSON rows"):
        bench.run("group_advantages", compare=tmp_path / "empty")
    (tmp_path / "other").write_text('{"op": "x"}\n')
    with pytest.raises(ValueError, match="lacks device"):
        bench.run("group_advantages", compare=tmp_path / "other")


@pytest.mark.parametrize("module", (fp8_grouped_wgrad, paged_attention, policy_loss, token_logprobs))
def test_cases_run_and_agree_with_their_baselines(module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row at a small size: ours and the baseline compute the same thing, and the stated error is small."""
    if module is token_logprobs:
        monkeypatch.setattr(module, "TOKENS", 12)
        monkeypatch.setattr(module, "VOCAB", 200)
        monkeypatch.setattr(torch, "compile", lambda function: function)
    elif module is fp8_grouped_wgrad:
        monkeypatch.setattr(module, "OUTPUTS", 40)
        monkeypatch.setattr(module, "INPUTS", 30)
    elif module is policy_loss:
        monkeypatch.setattr(module, "TOKENS", 100)
    else:
        monkeypatch.setattr(module, "SHAPES", ({"B": 3, "Hq": 4, "Hkv": 2, "D": 8, "length": 21},))
    for case in module.cases():
        bound = 1e-5 if case.dtype == "float32" else 1e-2
        results = []
        for function in (case.ours, case.baseline):
            result = function(case.prepare())
            results.append([x.clone() for x in (result if isinstance(result, tuple) else (result,))])
        assert case.error(results[0] if len(results[0]) > 1 else results[0][0]) < bound
        shared = min(map(len, results))
        assert timing.relative_error(results[0][:shared], results[1][:shared]) < bound, case.baseline_name


def test_peak_memory_sees_a_large_temporary() -> None:
    peak = timing.peak_bytes(lambda _: torch.ones(2**24).add(1).sum(), lambda: None)
    assert peak is None or 2**26 <= peak < 2**28


def test_relative_error_takes_the_worst_tensor() -> None:
    one = torch.ones(4)
    assert timing.relative_error([one, one * 1.5], [one, one]) == pytest.approx(0.5)
    assert timing.relative_error([torch.zeros(2)], [torch.zeros(2)]) == 0.0
