"""The CUDA kernels, emulated, give the CPU's bits wherever the package says so."""

from __future__ import annotations

from helpers.cuda_emulator import emulated
from helpers.same_bits import assert_same_bits, quantised


def test_codes_are_the_cpus() -> None:
    want = quantised("cpu")
    with emulated():
        got = quantised("cpu")
    assert_same_bits(got, want)
