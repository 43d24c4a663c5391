"""Error figures for tests: what differs, by how much, where."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

FP8_SUMS = 2e-3 if os.environ.get("GRPO_MC_TEST_CUDA") else 3e-6
"""Relative error of FP8 products summed in float32. Hopper's FP8 tensor cores keep some 14 bits while they add up 128
of them: about 2e-4 of a sum."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; 0 where both are 0, inf where only `expected` is."""
    difference = float((actual.double() - expected.double()).norm())
    size = float(expected.double().norm())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else float("inf")


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to noise in decibels: 20 log10(||expected|| / ||actual - expected||)."""
    error = relative_error(actual, expected)
    return -20 * math.log10(error) if error else math.inf


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, case: Any = "") -> None:
    """Fails unless relative_error <= tolerance; the message has max and mean difference and the worst index."""
    assert actual.shape == expected.shape, f"{case}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    nan_differs = torch.isnan(actual) != torch.isnan(expected)
    assert not bool(nan_differs.any()), f"{case}: NaN at {nan_differs.nonzero()[0].tolist()} on one side only"
    error = relative_error(actual.nan_to_num(), expected.nan_to_num())
    if error <= tolerance:
        return
    difference = (actual.double() - expected.double()).abs().nan_to_num()
    worst = int(difference.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), difference.shape)]
    raise AssertionError(
        f"{case}: relative error {error:.3e} > {tolerance:.1e}; max difference {float(difference.max()):.3e}, "
        f"mean {float(difference.mean()):.3e}; worst at {index}: "
        f"got {float(actual.flatten()[worst])!r}, expected {float(expected.flatten()[worst])!r}"
    )


def assert_all_close(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float, case: Any = ""
) -> None:
    """assert_close for each name; the names must be the same."""
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    assert not missing and not extra, f"{case}: missing {missing}, unexpected {extra}"
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, tolerance, f"{case} {name}")
