"""The CUDA kernels, emulated, give the CPU's bits wherever the package says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from helpers.cuda_emulator import emulated
from helpers.same_bits import assert_same_bits, moved, optimised, quantised


@pytest.mark.parametrize("calls", (quantised, moved, optimised))
def test_results_are_the_cpus(calls: Callable[[str], dict[str, list[Tensor]]]) -> None:
    want = calls("cpu")
    with emulated():
        got = calls("cpu")
    assert_same_bits(got, want)
