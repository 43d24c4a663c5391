"""Rollout/trainer mismatch: weights, masks and measures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_mc.algorithms import correct_mismatch
from grpo_mc.algorithms.correction import Correction

CU_SEQLENS = torch.tensor([0, 3, 5])
RATIOS = torch.tensor([0.5, 1.0, 4.0, 2.0, 2.0])
"""exp(old - roll) of two sequences; products 2 and 4, geometric means 2^(1/3) and 2."""


def correct(kind: str, low: float = 0.0, high: float = 2.5, **options: Any) -> Correction:
    mask = options.pop("mask", torch.ones(5, dtype=torch.bool))
    old = options.pop("old", RATIOS.log())
    return correct_mismatch(old, torch.zeros(5), mask, CU_SEQLENS, kind=kind, low=low, high=high, **options)


def test_truncated_importance_sampling_caps_each_token() -> None:
    result = correct("tis")
    assert result.weights is not None
    assert result.weights.tolist() == pytest.approx([0.5, 1, 2.5, 2, 2])
    assert result.loss_mask.all()


def test_token_mask_drops_both_sides() -> None:
    result = correct("mask_token", low=0.75)
    assert result.weights is None
    assert result.loss_mask.tolist() == [False, True, False, True, True]
    assert float(result.metrics["mismatch_masked_count"]) == 2


def test_sequence_weight_is_the_product_or_the_geometric_mean() -> None:
    product, mean = correct("tis_sequence"), correct("tis_sequence", high=1.9, sequence_ratio="geometric_mean")
    assert product.weights is not None and mean.weights is not None
    assert product.weights.tolist() == pytest.approx([2, 2, 2, 2.5, 2.5])
    assert mean.weights.tolist() == pytest.approx([2 ** (1 / 3)] * 3 + [1.9] * 2)


def test_sequence_mask_drops_the_whole_sequence() -> None:
    assert correct("mask_sequence").loss_mask.tolist() == [True] * 3 + [False] * 2
    mean = correct("mask_sequence", low=1.5, sequence_ratio="geometric_mean")
    assert mean.loss_mask.tolist() == [False] * 3 + [True] * 2


def test_masked_tokens_take_no_part() -> None:
    """A tool's token has no log-prob of its own: NaN there moves nothing."""
    old = RATIOS.log()
    old[2] = float("nan")
    result = correct("tis_sequence", mask=torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool), old=old)
    assert result.weights is not None
    assert result.weights[:2].tolist() == pytest.approx([0.5, 0.5])
    assert result.loss_mask.tolist() == [True, True, False, True, True]
    assert float(result.metrics["mismatch_token_count"]) == 4
    assert all(math.isfinite(float(value)) for value in result.metrics.values())


def test_nan_on_a_trained_token_is_dropped_by_the_masks() -> None:
    old = RATIOS.log()
    old[0] = float("nan")
    assert correct("mask_token", old=old, high=9.0).loss_mask.tolist() == [False, True, True, True, True]
    assert correct("mask_sequence", old=old, high=9.0).loss_mask.tolist() == [False] * 3 + [True] * 2


def test_measures() -> None:
    sums = correct("none").metrics
    log2 = math.log(2)
    assert float(sums["mismatch_abs_sum"]) == pytest.approx(5 * log2)
    # k3 of d = old - roll: r - log r - 1 for each ratio r
    assert float(sums["mismatch_k3_sum"]) == pytest.approx(sum(r - math.log(r) - 1 for r in RATIOS.tolist()))
    assert float(sums["mismatch_weight_sum"]) == pytest.approx(9.5)
    assert float(sums["mismatch_weight_sq_sum"]) == pytest.approx(0.25 + 1 + 16 + 4 + 4)


@pytest.mark.parametrize("kind", ["none", "tis", "mask_token", "mask_sequence", "tis_sequence"])
def test_no_tokens(kind: str) -> None:
    """H08."""
    empty = torch.zeros(0)
    result = correct_mismatch(empty, empty, empty.bool(), torch.tensor([0, 0]), kind=kind, low=0.0, high=2.0)
    assert result.loss_mask.shape == (0,)
    assert all(float(value) == 0 for value in result.metrics.values())


def test_enormous_mismatch_stays_finite() -> None:
    result = correct("tis_sequence", old=torch.tensor([300.0, -300, 300, 300, 300]))
    assert result.weights is not None and result.weights.tolist() == pytest.approx([2.5] * 5)
    assert all(math.isfinite(float(value)) for value in result.metrics.values())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("icepop", {}, "kind is 'icepop'"),
        ("tis", {"low": 3.0}, "low is 3.0"),
        ("tis", {"sequence_ratio": "max"}, "sequence_ratio is 'max'"),
        ("tis", {"old": torch.zeros(4)}, r"\[4\]"),
    ],
)
def test_wrong_arguments_are_named(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(kind, **options)
