"""The emulator itself: right results for right kernels, a message or a difference for each mistake it is there for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from helpers import cuda_emulator

PROGRAM = """
#include "cuda/launch.h"
using namespace grpo_mc::cuda;
namespace {
void turn_round(const int* from, int* to) {  // the block's values in reverse order, by way of shared memory
  __shared__ int values[64];
  values[threadIdx.x] = from[threadIdx.x];
  %(barrier)s
  to[threadIdx.x] = values[63 - threadIdx.x];
}
void half_a_barrier(int* to) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncwarp(%(mask)s);
  to[threadIdx.x] = 1;
}
void too_far(int* to) { dynamic_shared()[blockDim.x * 4 + threadIdx.x %% 8] = 1; to[0] = 1; }
void sums(const int* from, int* to) {
  __shared__ int scratch[32];
  const int total = block_sum(from[threadIdx.x], scratch);
  to[threadIdx.x] = total + __shfl_sync(kAllLanes, from[threadIdx.x], 5) * 0 + warp_max(from[threadIdx.x]);
}
}  // namespace
int main() {
  int values[64], results[64] = {}, *from = values, *to = results;
  for (int i = 0; i < 64; ++i) from[i] = i;
  const char* problem = launch(%(call)s);
  if (problem != nullptr) { std::puts(problem); return 1; }
  for (int value : results) std::printf("%%d ", value);
}
"""
REVERSED = list(range(63, -1, -1))


def run(
    folder: Path, call: str, order: str = "ascending", barrier: str = "__syncthreads();", mask: str = "kAllLanes"
) -> subprocess.CompletedProcess[str]:
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM % {"barrier": barrier, "call": call, "mask": mask})
    command = ["c++", *cuda_emulator.FLAGS, "-Wno-unused-function", str(source)]
    command += [str(cuda_emulator.EMULATOR / "emulator.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    environment = os.environ | {"GRPO_MC_EMULATOR_ORDER": order}
    return subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("order", ("ascending", "descending", "7"))
def test_a_right_kernel_gives_the_same_in_every_order(order: str, tmp_path: Path) -> None:
    done = run(tmp_path, "turn_round, 1, 64, 0, nullptr, from, to", order)
    assert [int(word) for word in done.stdout.split()] == REVERSED


def test_a_missing_barrier_shows_in_one_of_two_orders(tmp_path: Path) -> None:
    results = [
        [int(word) for word in run(tmp_path, "turn_round, 1, 64, 0, nullptr, from, to", order, "").stdout.split()]
        for order in ("ascending", "descending")
    ]
    assert all(len(result) == 64 and result != REVERSED for result in results)
    assert results[0] != results[1]


def test_a_barrier_that_half_the_block_skips_ends_with_a_message(tmp_path: Path) -> None:
    """Threads that have returned no longer count, as on the hardware; ones that wait elsewhere do."""
    done = run(tmp_path, "half_a_barrier, 1, 64, 0, nullptr, to", mask="1u << 31")
    assert done.returncode != 0 and "a lane takes part in a warp operation whose mask leaves it out" in done.stderr
    done = run(tmp_path, "half_a_barrier, 1, 48, 0, nullptr, to")
    assert done.returncode == 0


def test_writing_behind_shared_memory_ends_with_a_message(tmp_path: Path) -> None:
    done = run(tmp_path, "too_far, 1, 64, 256, nullptr, to")
    assert done.returncode != 0 and "wrote behind its dynamic shared memory" in done.stderr


def test_sums_over_a_block_and_the_largest_of_a_warp(tmp_path: Path) -> None:
    done = run(tmp_path, "sums, 1, 64, 0, nullptr, from, to", "descending")
    assert [int(word) for word in done.stdout.split()] == [2016 + 31] * 32 + [2016 + 63] * 32


@pytest.mark.parametrize(("grid", "block"), (("0", "64"), ("dim3(1, 70000)", "64"), ("1", "2048")))
def test_a_launch_that_cuda_would_refuse_is_refused(grid: str, block: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"turn_round, {grid}, {block}, 0, nullptr, from, to")
    assert done.returncode == 1 and "invalid configuration argument" in done.stdout
