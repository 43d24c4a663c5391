"""The operators' own tests over the CUDA kernels, which an emulator runs thread by thread on the CPU.

Each file runs twice, with the threads of a block taken in opposite orders between barriers: a missing barrier gives
another result in one of them. Families with kernels for one architecture run for that one too; there the first order
copies at once what is copied asynchronously and the second as late as can be. What a GPU alone can show (memory order,
speed, the hardware's own instructions) is left to tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import cuda_emulator

TESTS = Path(__file__).resolve().parents[1]
FAMILIES = {
    "adam": [],
    "adam_states": ["test_training_ends_where_float32_ends"],  # thousands of steps; the bits are in test_same_bits
    "fp8": [],
    "fp8_grouped": [],
    "group_advantages": [],
    "int4": [],
    "int8": [],
    "linear_logprobs": [],
    "moe": [],
    "paged_attention": [],
    "policy_loss": [],
    "policy_loss_twin": [],
    "rms_norm": [],
    "row_linear": [],
    "token_logprobs": [],
}
"""Operator families with CUDA kernels; each with the tests left out, and below why."""

HOPPER = ("fp8", "fp8_grouped")
"""Families with kernels of their own for sm_90a."""
ARCHITECTURES = {family: ("80", "90") if family in HOPPER else ("80",) for family in FAMILIES}
ORDERS = ("17", pytest.param("ascending", marks=pytest.mark.slow), pytest.param("descending", marks=pytest.mark.slow))
"""Of the threads of a block: any two that a barrier is missing between stand in either order in one of them. A shuffled
one (a seed) is enough for every day."""
RUNS = [(family, each) for family, architectures in ARCHITECTURES.items() for each in architectures]
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def emulated() -> str:
    return str(cuda_emulator.library())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("family", "architecture"), RUNS)
def test_operator_tests_hold_for_the_cuda_kernels(family: str, order: str, architecture: str, emulated: str) -> None:
    environment = os.environ | {
        "GRPO_MC_TEST_EMULATED": "1",
        "GRPO_MC_EMULATOR_ORDER": order,
        "GRPO_MC_EMULATED_ARCHITECTURE": architecture,
    }
    file = f"tests/ops/test_{family}.py"
    command = [sys.executable, "-m", "pytest", file, "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [f"--deselect={file}::{name}" for name in FAMILIES[family]]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_are_reached() -> None:
    """With a broken launcher the operators' tests would still pass on the CPU's kernels: a call must be seen."""
    code = (
        "import torch\nfrom helpers import cuda_emulator\nfrom grpo_mc import ops\n"
        "plain = ops.rms_norm(torch.ones(1, 3), torch.ones(3), 0.0)\n"
        "torch.ops.grpo_mc.load_cuda(str(cuda_emulator.library()), True)\n"
        "import os; os.environ['GRPO_MC_EMULATOR_TRACE'] = '1'\n"
        "assert torch.equal(ops.rms_norm(torch.ones(1, 3), torch.ones(3), 0.0), plain)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "emulator: grid 1 x 1 x 1, block 256 x 1 x 1" in done.stderr


def test_an_architecture_has_its_own_kernels() -> None:
    """3 x 128 threads multiply 128 rows on sm_90; elsewhere 256 threads do."""
    code = (
        "import torch\nfrom helpers import cuda_emulator\nfrom grpo_mc import ops\n"
        "torch.ops.grpo_mc.load_cuda(str(cuda_emulator.library()), True)\n"
        "codes, scale = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(128, 1)\n"
        "assert (ops.fp8_gemm(codes, scale, codes, scale) == 128).all()\n"
    )
    for architecture, threads in (("80", 256), ("90", 384), ("100", 256)):
        environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "GRPO_MC_EMULATOR_TRACE": "1"}
        environment["GRPO_MC_EMULATED_ARCHITECTURE"] = architecture
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert f"block {threads} x 1 x 1" in done.stderr
