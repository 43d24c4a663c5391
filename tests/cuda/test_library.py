"""What nvcc makes of csrc/cuda: no spilled registers, every architecture, and a library that loads without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402

needs_nvcc = pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, object]]:
    return cuda_build.build()


@needs_nvcc
def test_every_kernel_is_there_for_every_architecture_of_its_file(kernels: list[dict[str, object]]) -> None:
    assert len(kernels) >= 3
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        rows = [row for row in kernels if row["file"] == source.name]
        names = {row["kernel"] for row in rows}
        assert {(row["kernel"], row["architecture"]) for row in rows} == {
            (name, architecture) for name in names for architecture in cuda_build.architectures(source)
        }


@needs_nvcc
def test_no_kernel_spills_registers(kernels: list[dict[str, object]]) -> None:
    assert all(row["spill_bytes"] == 0 and int(str(row["registers"])) <= 255 for row in kernels)


@needs_nvcc
@pytest.mark.skipif(cuda_build.find_cuobjdump() is None, reason="neither the toolkit nor pip has cuobjdump here")
@pytest.mark.parametrize(
    ("source", "architecture", "instruction", "least"),
    [
        ("fp8_hopper", "sm_90a", r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", 8),  # one block of the depth, two kernels
        ("fp8_hopper", "sm_90a", r"QGMMA\.64x32x32\.F32\.E4M3\.E4M3", 8),
        ("fp8_hopper", "sm_90a", r"UTMALDG\.3D", 8),
        ("fp8_gemm", "sm_90", r"F2FP\.F16\.E4M3\.UNPACK_B", 24),
        ("fp8_gemm", "sm_90", r"HMMA\.16816\.F32", 24),
        ("fp8_gemm", "sm_80", r"HMMA\.16816\.F32", 24),
    ],
)
def test_products_of_fp8_use_the_tensor_cores(
    source: str, architecture: str, instruction: str, least: int, kernels: list[dict[str, object]]
) -> None:
    """In the machine code, not only in the source: the assembler may make something slower of it."""
    tool = cuda_build.find_cuobjdump()
    assert tool is not None
    command = [tool, "-sass", "-arch", architecture, str(cuda_build.OBJECTS / f"{source}.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert len(re.findall(instruction, done.stdout)) >= least


@needs_nvcc
def test_the_library_loads_without_a_gpu_and_has_every_launcher(kernels: list[dict[str, object]]) -> None:
    code = f"import torch, grpo_mc.ops\ntorch.ops.grpo_mc.load_cuda({str(cuda_build.LIBRARY)!r}, False)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_without_architectures_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("// a kernel\n")
    with pytest.raises(SystemExit, match="must name architectures"):
        cuda_build.architectures(source)


def test_another_library_is_refused() -> None:
    import torch

    import grpo_mc.ops as ops

    with pytest.raises(RuntimeError, match="is no CUDA library of this package"):
        torch.ops.grpo_mc.load_cuda(str(Path(ops.__file__).parent / "_C.abi3.so"), False)
    with pytest.raises(RuntimeError, match="does not load"):
        torch.ops.grpo_mc.load_cuda("/nowhere/_cuda.so", False)
