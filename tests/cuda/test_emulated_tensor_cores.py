"""The emulator's tensor cores, asynchronous copies and barriers: right for right kernels, and every mistake shows."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from helpers import cuda_emulator

PROGRAM = """
#include "cuda/hopper.h"
#include "cuda/mma.h"
using namespace grpo_mc::cuda;
namespace {
constexpr int kRows = 64, kColumns = 32, kDepth = 64;
// codes of small integers: 0 to 7 times 2^-9, exact in every sum
unsigned char a[kRows][128], b[kColumns][128];
alignas(16) float right[kRows][kColumns], got[kRows][kColumns];

// One warpgroup: boxes of both operands, then two products of 32 entries of the depth each.
__global__ void boxes(const TensorMap a_map, const TensorMap b_map, float* out) {
  unsigned char* boxes = dynamic_shared();
  uint64_t* barrier = reinterpret_cast<uint64_t*>(boxes + (kRows + kColumns) * 128);
  if (threadIdx.x == 0) init_barrier(barrier, %(count)s);
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_announcing(barrier, %(bytes)s);
    load_box(boxes, &a_map, barrier, 0, 0, 0);
    load_box(boxes + kRows * 128, &b_map, barrier, 0, 0, 0);
  }
  %(wait)s
  float sums[kColumns / 2] = {};
  const uint64_t left = matrix_descriptor(shared_address(boxes));
  const uint64_t right = matrix_descriptor(shared_address(boxes + kRows * 128)) %(descriptor)s;
  begin_products();
  for (int k = 0; k < kDepth / 32; ++k) start_product<kColumns>(sums, left + k * %(step)s, right + k * 2, k > 0);
  commit_products();
  %(finish)s
  const int row = threadIdx.x / 32 * 16 + threadIdx.x %% 32 / 4, column = threadIdx.x %% 4 * 2;
  for (int i = 0; i < kColumns / 2; ++i) out[(row + i %% 4 / 2 * 8) * kColumns + i / 4 * 8 + column + i %% 2] = sums[i];
}

// One warp: 16 bytes for each lane, by way of shared memory.
__global__ void copies(const unsigned char* from, float* out) {
  copy_async(dynamic_shared() + threadIdx.x * 16, from + threadIdx.x * 16, threadIdx.x == 31 ? 4 : 16);
  commit_copies();
  %(copied)s
  __syncthreads();
  for (int i = threadIdx.x; i < 512; i += 32) out[i] = dynamic_shared()[i];
}

// One warp: fp16 halves of 16 x 16 and 16 x 8 small integers.
__global__ void halves(float* out) {
  const auto half = [](int x) { return static_cast<unsigned>(_cvtss_sh(static_cast<float>(x), 0)); };
  const auto pair = [&](int x, int y) { return half(x) | half(y) << 16; };
  const int g = threadIdx.x / 4, t = threadIdx.x %% 4;
  const auto left = [&](int row, int k) { return pair(row + 2 * k, row + 2 * k + 2); };
  const auto right = [&](int k, int column) { return pair(3 * k - column, 3 * k + 3 - column); };
  const unsigned x[4] = {left(g, 2 * t), left(g + 8, 2 * t), left(g, 2 * t + 8), left(g + 8, 2 * t + 8)};
  const unsigned y[2] = {right(2 * t, g), right(2 * t + 8, g)};
  float sums[4] = {1, 1, 1, 1};
  mma_16x8x16(sums, x, y);
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i %% 2] = sums[i];
}
}  // namespace

int main(int, char** arguments) {
  const int kernel = std::atoi(arguments[1]);
  for (int i = 0; i < kRows; ++i)
    for (int k = 0; k < 128; ++k) a[i][k] = static_cast<unsigned char>((i * 5 + k * 3 + (i + k) * k / 5) %% 8);
  for (int i = 0; i < kColumns; ++i)
    for (int k = 0; k < 128; ++k) b[i][k] = static_cast<unsigned char>((i * 3 + k + (i + 2 * k) * k / 7) %% 8);
  const char* problem = nullptr;
  float* out = &got[0][0];
  bool same = true;
  if (kernel == 0) {
    TensorMap a_map, b_map;
    problem = describe_boxes(&a_map, a, {kDepth, kRows, 1}, {128, 128 * kRows}, kRows);
    if (problem == nullptr) problem = describe_boxes(&b_map, b, {kDepth, kColumns, 1}, {128, 128 * kColumns}, kColumns);
    if (problem == nullptr) problem = launch(boxes, 1, 128, (kRows + kColumns) * 128 + 8, nullptr, a_map, b_map, out);
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kColumns; ++j) {
        int sum = 0;
        for (int k = 0; k < kDepth; ++k) sum += a[i][k] * b[j][k];
        same &= got[i][j] == static_cast<float>(sum) / 262144.0f;
      }
  } else if (kernel == 1) {
    problem = launch(copies, 1, 32, 512, nullptr, &a[0][0], out);
    for (int i = 0; i < 512; ++i) same &= out[i] == static_cast<float>(i < 500 ? (&a[0][0])[i] : 0);
  } else {
    problem = launch(halves, 1, 32, 0, nullptr, out);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        int sum = 1;
        for (int k = 0; k < 16; ++k) sum += (i + 2 * k) * (3 * k - j);
        same &= out[i * 8 + j] == static_cast<float>(sum);
      }
  }
  std::puts(problem != nullptr ? problem : same ? "right" : "wrong");
}
"""
RIGHT = {
    "count": "1", "bytes": "(kRows + kColumns) * 128", "wait": "wait_for(barrier, 0);", "step": "2", "descriptor": "",
    "finish": "finish_products(sums);", "copied": "wait_for_copies<0>();",
}  # fmt: skip
BOXES, COPIES, HALVES = range(3)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("emulator") / "emulator.o"
    source = cuda_emulator.EMULATOR / "emulator.cpp"
    subprocess.run(["c++", *cuda_emulator.FLAGS, "-c", str(source), "-o", str(target)], check=True, timeout=300)
    return target


def build(folder: Path, emulator: Path, **changes: str) -> Path:
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM % (RIGHT | changes))
    command = ["c++", *cuda_emulator.FLAGS, "-Wno-unused", "-Wno-uninitialized", str(source), str(emulator)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=300)
    return program


def run(program: Path, kernel: int, order: str = "ascending") -> str:
    """What the program says: right, wrong, or the emulator's sentence."""
    environment = os.environ | {"GRPO_MC_EMULATOR_ORDER": order}
    done = subprocess.run([program, str(kernel)], env=environment, capture_output=True, text=True, timeout=300)
    return (done.stdout + done.stderr).strip()


def test_right_kernels_in_every_order(emulator: Path, tmp_path: Path) -> None:
    program = build(tmp_path, emulator)
    for kernel, order in itertools.product((BOXES, COPIES, HALVES), ("ascending", "descending", "7")):
        assert run(program, kernel, order) == "right", (kernel, order)


@pytest.mark.parametrize(
    "kernel, order, words, mistake",
    [
        (BOXES, "ascending", "wrong", {"step": "1"}),  # 16 bytes on instead of 32
        (
            BOXES,
            "ascending",
            "wrong",
            {"descriptor": "- (uint64_t{32} << 32)"},
        ),  # the next 8 rows 512 bytes on, not 1024
        (BOXES, "ascending", "wrong", {"finish": ""}),  # sums read before they are there
        (BOXES, "ascending", "names another layout", {"descriptor": "^ (uint64_t{3} << 62)"}),
        (BOXES, "ascending", "threads spin for ever", {"bytes": "(kRows + kColumns) * 128 + 16"}),  # more than come
        (BOXES, "descending", "copies that no thread has waited for", {"wait": ""}),
        (COPIES, "ascending", "wrong", {"copied": ""}),
    ],
    ids=str,
)
def test_every_mistake_shows(
    kernel: int, order: str, words: str, mistake: dict[str, str], emulator: Path, tmp_path: Path
) -> None:
    assert words in run(build(tmp_path, emulator, **mistake), kernel, order)
