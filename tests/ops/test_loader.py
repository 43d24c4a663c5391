"""Loading the compiled library: what info() says, and that a missing or foreign library is refused with a way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mc import ops
from grpo_mc.ops import loader


def test_info_says_what_runs() -> None:
    info = ops.info()
    assert str(info["built_torch"]).split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["cpu_isa"] in ("avx2", "generic") and "cpu" in info["devices"]
    assert info["threads"] == torch.get_num_threads()
    assert loader.built_torch(loader.LIBRARY) == info["built_torch"]


def test_library_of_another_torch_is_refused() -> None:
    loader.check_version("2.13.0+cpu", "2.13.1+cu130")
    with pytest.raises(ops.OperatorsMissing, match="built with torch 2.11.0 but torch 2.13.0 is running; build"):
        loader.check_version("2.11.0", "2.13.0")


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"\x7fELF nothing of ours")
    with pytest.raises(ops.OperatorsMissing, match="no library of this package"):
        loader.built_torch(tmp_path / "x.so")


def test_missing_library_says_how_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "LIBRARY", tmp_path / "absent.so")
    with pytest.raises(ImportError, match="are not built .* run: pip install --no-build-isolation"):
        loader.load.__wrapped__()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_plain_code_is_chosen_on_request_and_agrees() -> None:
    """GRPO_MC_CPU_ISA=generic runs the code of machines without AVX2; the numbers agree with this process's."""
    code = (
        "import torch\nfrom grpo_mc import ops\nassert ops.info()['cpu_isa'] == 'generic'\n"
        "g = torch.Generator().manual_seed(0)\nx = torch.randn(3, 999, generator=g)\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "  leaf = x.to(dtype, copy=True).requires_grad_()\n"
        "  lp, h = ops.token_logprobs(leaf, torch.tensor([0, 5, 998]), with_entropy=True)\n"
        "  (lp.sum() + h.sum()).backward()\n"
        "  print(float(lp.sum().detach()), float(h.sum().detach()), float(leaf.grad.double().square().sum()))\n"
    )
    plain = run_python(code, GRPO_MC_CPU_ISA="generic")
    chosen = run_python(code.replace("assert", "_ ="), GRPO_MC_CPU_ISA="auto")
    assert plain.returncode == chosen.returncode == 0, plain.stderr + chosen.stderr
    numbers = [[float(x) for x in run.stdout.split()] for run in (plain, chosen)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-6)


def test_unknown_instruction_set_is_a_value_error() -> None:
    result = run_python("from grpo_mc import ops; ops.info()", GRPO_MC_CPU_ISA="avx512")
    assert result.returncode != 0
    assert "GRPO_MC_CPU_ISA is 'avx512'; set it to auto, generic or avx2" in result.stderr


def test_sources_newer_than_the_library_are_found(tmp_path: Path) -> None:
    library, sources = tmp_path / "_C.abi3.so", tmp_path / "csrc"
    (sources / "cpu").mkdir(parents=True)
    for place, name in enumerate(("cpu/old.cpp", "new.h", "notes.txt")):
        (sources / name).touch()
        os.utime(sources / name, (1000 + place, 1000 + place))
    library.touch()
    os.utime(library, (1001, 1001))
    assert loader.newer_source(library, sources) is None
    os.utime(library, (1000, 1000))
    assert loader.newer_source(library, sources) == sources / "new.h"
    assert loader.newer_source(library, tmp_path / "absent") is None
