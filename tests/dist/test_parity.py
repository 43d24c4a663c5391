"""`grpo-mc check parity`: every layout passes, and what is wrong is seen, shown and ended in time."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from grpo_mc.config.base import ConfigError
from grpo_mc.config.layout import ModelShape
from grpo_mc.megatron.hf_config import model_shape, read_architecture
from grpo_mc.megatron.parity_layout import DEFAULT_LAYOUTS, REFERENCE, TINY_MIXTRAL, fit, parse_layout
from helpers.processes import run_command

pytestmark = pytest.mark.dist

COMMAND = [sys.executable, "-m", "grpo_mc", "check", "parity"]
REQUIRED = {"mb1", "mb2", "mb4", "dp2", "tp2", "pp2", "ep2", "tp2xpp2", "dp2xep2"}
FAULTS = Path(__file__).with_name("parity_faults.py")


def test_every_layout_has_the_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    """From a folder outside the checkout; the table has one line a layout."""
    output = run_command(COMMAND, timeout_s=300, cwd=tmp_path).output
    rows = {cells[0]: cells for line in output.splitlines() if (cells := [c.strip() for c in line.split("│")[1:-1]])}
    assert rows.keys() - {""} == set(DEFAULT_LAYOUTS) and REQUIRED <= set(DEFAULT_LAYOUTS), output
    for name in DEFAULT_LAYOUTS:
        _, processes, loss, gradients, worst, _, ok = rows[name]
        assert ok == "yes" and float(loss) <= 1e-5 and 0 < float(gradients) <= 1e-5 and worst, output
        assert int(processes) == parse_layout(name).processes
    assert "Warning" not in output


def test_a_difference_fails_the_command() -> None:
    """No layout is equal to the last bit, so a tolerance of 1e-12 has to fail."""
    finished = run_command([*COMMAND, "--layout", "mb2", "--tolerance", "1e-12"], timeout_s=120, check=False)
    assert finished.returncode == 1 and re.search(r"mb2.*NO", finished.output), finished.output


def test_faults_are_seen_shown_and_ended() -> None:
    """A wrong gradient, unequal copies, a rank that fails and one that hangs; see parity_faults.py."""
    output = run_command([sys.executable, str(FAULTS)], timeout_s=120).output
    results = dict(re.findall(r"^(\w+): (.*)$", output, re.MULTILINE))
    assert results["dropped_reduction"].startswith("fails at '") and "model" in results["dropped_reduction"], output
    assert results["unequal_copies"].startswith("fails at 'copies of decoder."), output
    assert results["missing_gradient"].startswith("fails at 'sequence_mean: lm_head.weight' by inf"), output
    assert results["nan_gradient"].startswith("fails at 'sequence_mean: lm_head.weight' by inf"), output
    assert "rank 1 ended with status 1" in output and "RuntimeError: rank one gives up" in output
    assert "still ran at the time bound" in results["hang"] and float(results["hang_seconds"]) < 15, output
    assert "in sleep_for_ever" in output  # where it hung
    assert results["children"] == "0", output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "tp2xq3"], "not understood at 'q3'"),
        (["--layout", "tp2xtp2"], "not understood at 'tp2'"),
        (["--layout", "tp0"], "not understood at 'tp0'"),
        (["--layout", "tp4"], "num_kv_heads is 2"),
        (["--layout", "pp3"], "num_layers is 4"),
        (["--layout", "ep3"], "num_experts is 4"),
        (["--model", "/no/such/folder"], "does not exist"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_mc.cli import main

    start = time.monotonic()
    assert main(["check", "parity", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert time.monotonic() - start < 30


def test_layout_names() -> None:
    layout = fit(parse_layout("tp2xpp2xdp2xmb3"), model_shape(TINY_MIXTRAL))
    parallel = layout.parallel
    assert (layout.processes, layout.micro_batches) == (8, 3)
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.ep, parallel.etp) == (2, 2, 2, 1, 2)
    assert parallel.sequence_parallel is True
    spread = fit(parse_layout("dp2xep2"), model_shape(TINY_MIXTRAL))
    assert (spread.processes, spread.parallel.dp, spread.parallel.ep, spread.parallel.etp) == (4, 4, 2, 1)
    assert parse_layout(REFERENCE).micro_batches is None


def test_a_dense_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_mc.cli import main
    from helpers.tiny_models import build_tiny_model

    folder = build_tiny_model(tmp_path, "qwen2", num_hidden_layers=2)
    output = run_command([*COMMAND, "--model", folder, "--layout", "tp2xpp2"], timeout_s=120).output
    assert re.search(r"tp2xpp2.*yes", output), output
    assert main(["check", "parity", "--model", str(folder), "--layout", "ep2"]) == 2
    assert "the model has no experts" in capsys.readouterr().err
    shape = model_shape(read_architecture(folder))
    assert [name for name in DEFAULT_LAYOUTS if not fits(name, shape)] == ["ep2", "dp2xep2", "tp2xep2", "pp2xep2"]


def fits(name: str, shape: ModelShape) -> bool:
    try:
        fit(parse_layout(name), shape)
    except ConfigError:
        return False
    return True
