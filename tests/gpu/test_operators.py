"""The operators' own tests on a GPU: the same files as on the CPU, every call carried to the device and back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_mc import ops
from helpers.same_bits import assert_same_bits, moved, optimised, quantised

TESTS = Path(__file__).resolve().parents[1]
NOT_OF_A_KERNEL = ("test_argument_checks", "test_bench", "test_loader")
FILES = [path for path in sorted((TESTS / "ops").glob("test_*.py")) if path.stem not in NOT_OF_A_KERNEL]
TIMEOUT_S = 240

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in ops.info()["devices"], reason="the CUDA operators cannot run here"),  # type: ignore[operator]
]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_operator_tests_hold_on_the_gpu(file: Path) -> None:
    environment = os.environ | {"GRPO_MC_TEST_CUDA": "1"}
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "--maxfail=5"]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("repeats", (100,))
def test_results_are_the_same_every_time(repeats: int) -> None:
    """Kernels sum in a fixed order: no result may change between runs, on a busy stream either."""
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300, 777, generator=draw, device="cuda")
    codes, scale = ops.quantize_fp8(x)
    first = ops.fp8_gemm(codes, scale, codes, scale, out_dtype=torch.float32)
    for _ in range(repeats):
        again = ops.fp8_gemm(*ops.quantize_fp8(x), *ops.quantize_fp8(x), out_dtype=torch.float32)
        assert torch.equal(again, first)


@pytest.mark.parametrize("calls", (quantised, moved, optimised))
def test_codes_and_rows_have_the_bits_of_the_cpu(calls: Callable[[str], dict[str, list[torch.Tensor]]]) -> None:
    assert_same_bits(calls("cuda"), calls("cpu"))
