"""Builds the compiled operators (csrc/) into grpo_mc/ops/_C.abi3.so; everything else is in pyproject.toml.

The CPU part is always built. Files in csrc/cpu/ are compiled once per instruction set and chosen at run time by cpuid,
so one build runs on every x86-64 machine (there is no -march=native). The CUDA part (grpo_mc/ops/_cuda.so, see
tools/cuda_build.py) is built when nvcc is found and torch is a CUDA build.

The build needs the torch it will run with, so use `pip install --no-build-isolation`. Environment variables:

    GRPO_MC_CUDA      auto (default), 0 (never build CUDA), 1 (fail when it cannot be built)
    GRPO_MC_DEBUG     1: -O1 -g and bounds-checking standard library, for debugging the operators
    GRPO_MC_WERROR    1: compiler warnings are errors (CI)
    MAX_JOBS          number of parallel compile jobs (torch's own variable)
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))
from cuda_build import build as build_cuda  # noqa: E402
from cuda_build import find_nvcc  # noqa: E402

INCLUDE = str(ROOT / "csrc")
ISA_FLAGS: dict[str, list[str]] = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]


def sources(folder: str, pattern: str) -> list[str]:
    """Sources under csrc/folder, relative to the root and sorted, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob(pattern))


def flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise SystemExit(f"{name}={value!r}: set it to 0 or 1")
    return value == "1"


def compile_flags() -> list[str]:
    optimise = ["-O1", "-g", "-D_GLIBCXX_ASSERTIONS"] if flag("GRPO_MC_DEBUG") else ["-O3", "-g0", "-DNDEBUG"]
    # Contraction is off so that a * b + c rounds the same in every translation unit; kernels call fma explicitly.
    flags = optimise + ["-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wno-psabi"]
    flags += [f'-DGRPO_MC_TORCH_VERSION="{torch.__version__}"']
    flags += ["-DGRPO_MC_HAVE_AVX2=1"] if "avx2" in ISA_FLAGS else []
    return flags + (["-Werror"] if flag("GRPO_MC_WERROR") else [])


def should_build_cuda() -> bool:
    choice = os.environ.get("GRPO_MC_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"GRPO_MC_CUDA={choice!r}: set it to auto, 0 or 1")
    problems = []
    if torch.version.cuda is None:
        problems.append(f"torch {torch.__version__} is a build without CUDA")
    if find_nvcc() is None:
        problems.append("nvcc was not found (set CUDA_HOME)")
    if choice == "1" and problems:
        raise SystemExit("GRPO_MC_CUDA=1 but the CUDA operators cannot be built: " + "; ".join(problems))
    return choice != "0" and not problems


class BuildOperators(BuildExtension):
    """BuildExtension that first compiles csrc/cpu/ once per instruction set, and last the CUDA library."""

    def build_extension(self, ext):
        for isa, isa_flags in ISA_FLAGS.items():
            ext.extra_objects += self.compiler.compile(
                sources("cpu", "*.cpp"),
                output_dir=str(Path(self.build_temp, isa)),
                include_dirs=[INCLUDE],
                extra_postargs=[*compile_flags(), "-Wextra", *isa_flags, f"-DGRPO_MC_ISA={isa}"],
                depends=ext.depends,
            )
        super().build_extension(ext)
        if should_build_cuda():
            build_cuda(Path(self.get_ext_fullpath(ext.name)).parent / "_cuda.so")


def extension():
    with_cuda = should_build_cuda()
    kind = CUDAExtension if with_cuda else CppExtension  # the drivers ask c10/cuda for the stream
    return kind(
        "grpo_mc.ops._C",
        ["csrc/ops.cpp", *sources("autograd", "*.cpp"), *sources("drivers", "*.cpp")],
        extra_compile_args=compile_flags() + (["-DGRPO_MC_WITH_CUDA=1"] if with_cuda else []),
        include_dirs=[INCLUDE],
        py_limited_api=True,
        depends=sources(".", "**/*.h"),
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildOperators},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
