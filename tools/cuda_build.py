"""Compiles csrc/cuda/*.cu with nvcc and links grpo_mc/ops/_cuda.so. Needs nvcc, neither torch nor a GPU.

Every file names its architectures in its first line (`// nvcc: sm_80 sm_90 sm_100`). Warnings are errors, and a kernel
that spills registers fails the build. Objects are kept in build/cuda and compiled again only when a source, a header, a
flag or nvcc has changed. setup.py calls this for a torch with CUDA; by hand:

    python tools/cuda_build.py                 compile what changed and link
    python tools/cuda_build.py --report FILE   and write the table of registers, shared memory and spills (JSON)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "cuda"
OBJECTS = ROOT / "build" / "cuda"
LIBRARY = ROOT / "grpo_mc" / "ops" / "_cuda.so"
# -fmad=false: a * b + c rounds twice, as on the CPU; kernels that want one rounding say fmaf.
FLAGS = [
    "-O3", "-std=c++20", "-lineinfo", "-fmad=false", "-Werror=all-warnings", "-Xptxas=-v,--warn-on-spills",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Werror", "--expt-relaxed-constexpr",
]  # fmt: skip
TIMEOUT_S = 900


def find_nvcc() -> str | None:
    """nvcc of CUDA_HOME, of the PATH, or of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return found if Path(found).exists() else None


def find_cuobjdump() -> str | None:
    """The disassembler of the toolkit, or of the package nvidia-cuda-cuobjdump; nvdisasm lies next to it."""
    nvcc = find_nvcc()
    beside = [Path(nvcc).resolve().parent] if nvcc else []
    packages = [Path(folder, "nvidia", "cu13", "bin") for folder in sys.path]
    found = shutil.which("cuobjdump", path=os.pathsep.join(map(str, beside + packages)))
    return found or shutil.which("cuobjdump")


def architectures(source: Path) -> list[str]:
    """What the file's first line names: ["sm_80", ...]."""
    first = source.read_text().split("\n", 1)[0]
    match = re.fullmatch(r"// nvcc: ((?:sm_\d+a?)(?: sm_\d+a?)*)", first)
    if match is None:
        raise SystemExit(f"{source}: line 1 is {first!r}; it must name architectures: '// nvcc: sm_80 sm_90'")
    return match.group(1).split()


def gencode(names: list[str]) -> list[str]:
    """One machine code each, and PTX of the newest portable one, for GPUs to come."""
    flags = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in names]
    portable = [name for name in names if not name.endswith("a")]
    return flags + [f"-gencode=arch=compute_{portable[-1][3:]},code=compute_{portable[-1][3:]}"] if portable else flags


def fingerprint(source: Path, command: list[str], nvcc: str) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(subprocess.run([nvcc, "--version"], capture_output=True, timeout=60, check=True).stdout)
    for path in [source, *sorted(SOURCES.glob("*.h")), *sorted((ROOT / "csrc" / "common").glob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_file(source: Path, nvcc: str) -> tuple[Path, str, float]:
    """The object file, what ptxas said, and the seconds that it took (0 when nothing had changed)."""
    object_file, log = OBJECTS / f"{source.stem}.o", OBJECTS / f"{source.stem}.log"
    command = [nvcc, *FLAGS, *gencode(architectures(source)), f"-I{ROOT / 'csrc'}"]
    command += ["-c", str(source), "-o", str(object_file)]
    stamp, mark = OBJECTS / f"{source.stem}.sha256", fingerprint(source, command, nvcc)
    if object_file.exists() and log.exists() and stamp.exists() and stamp.read_text() == mark:
        return object_file, log.read_text(), 0.0
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"cuda_build: nvcc refused {source}:\n{done.stdout}{done.stderr}")
    log.write_text(done.stdout + done.stderr)
    stamp.write_text(mark)
    return object_file, log.read_text(), time.monotonic() - start


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, timeout=60, check=True).stdout
    plain = text.replace("grpo_mc::cuda::", "").replace("(anonymous namespace)::", "")
    return [re.sub(r"^void |\(.*$", "", line) for line in plain.splitlines()]


def resources(stem: str, log: str) -> list[dict[str, object]]:
    """A row for each kernel and architecture of one file, from ptxas -v."""
    rows: list[dict[str, object]] = []
    for block in re.split(r"Compiling entry function ", log)[1:]:
        head = re.match(r"'(\w+)' for '(sm_\w+)'", block)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers", block)
        if head is None or used is None:
            continue
        shared = re.search(r"(\d+) bytes smem", block)
        rows.append({
            "file": f"{stem}.cu", "kernel": head.group(1), "architecture": head.group(2),
            "registers": int(used.group(1)),
            "shared_bytes": int(shared.group(1)) if shared else 0,
            "stack_bytes": int(spills.group(1)) if spills else 0,
            "spill_bytes": int(spills.group(2)) + int(spills.group(3)) if spills else 0,
        })  # fmt: skip
    for row, name in zip(rows, demangle([str(row["kernel"]) for row in rows]), strict=True):
        row["kernel"] = name
    return rows


def build(library: Path = LIBRARY, jobs: int | None = None) -> list[dict[str, object]]:
    """Compiles, and links `library`; the resource table.

    Raises:
        SystemExit: no nvcc, a file that nvcc refuses, or a kernel that spills.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("cuda_build: nvcc was not found; install the CUDA toolkit (13.0) or set CUDA_HOME")
    OBJECTS.mkdir(parents=True, exist_ok=True)
    files = sorted(SOURCES.glob("*.cu"))
    rows: list[dict[str, object]] = []
    objects = []
    with ThreadPoolExecutor(jobs or int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        compiled = pool.map(lambda source: compile_file(source, nvcc), files)
        for source, (object_file, log, seconds) in zip(files, compiled, strict=True):
            found = resources(source.stem, log)
            print(f"{source.name:<24} {len(found):3d} kernels {seconds:6.1f} s", flush=True)
            rows += found
            objects.append(str(object_file))
    described = "{file}: {kernel} for {architecture}: {spill_bytes} bytes"
    spilling = [described.format(**row) for row in rows if row["spill_bytes"]]
    if spilling:
        raise SystemExit("cuda_build: kernels that spill registers:\n" + "\n".join(spilling))
    link = [nvcc, "-shared", "-cudart=static", *objects, "-o", str(library)]
    subprocess.run(link, timeout=TIMEOUT_S, check=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", type=Path, help="write the resource table here, as JSON")
    parser.add_argument("--jobs", type=int, help="files compiled at once (MAX_JOBS, or the number of cores)")
    parser.add_argument("--if-nvcc", action="store_true", help="where nvcc is not found, say so and succeed")
    arguments = parser.parse_args()
    if arguments.if_nvcc and find_nvcc() is None:
        print("cuda_build: no nvcc here, the CUDA kernels are not compiled")
        return
    start = time.monotonic()
    rows = build(jobs=arguments.jobs)
    if arguments.report:
        arguments.report.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{LIBRARY.relative_to(ROOT)}: {len(rows)} kernels, {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
