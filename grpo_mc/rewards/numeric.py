"""Numeric match: 1 when the answer equals the ground truth as a number, else 0.

Options: extract, tolerance (absolute), relative_tolerance (a part of the ground truth). An answer x is right for a
ground truth g when |x - g| <= max(tolerance, relative_tolerance * |g|), in exact fractions, so that 0 means equal.
Thousands commas, currency signs, percent signs, fractions and units in \\text{} are read as in
grpo_mc.rewards.number_text. A ground truth that is not a number makes the function abstain.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from grpo_mc.rewards.extract import extract_answer
from grpo_mc.rewards.number_text import parse_number
from grpo_mc.rewards.sample import NO_ANSWER, NO_REFERENCE, Sample, Scorer, reference_answer


def build(options: Any) -> Scorer:
    """The scorer for a NumericReward."""
    absolute, relative = Fraction(str(options.tolerance)), Fraction(str(options.relative_tolerance))

    def score(sample: Sample) -> tuple[object, str]:
        reference = reference_answer(sample.prompt)
        if reference is None:
            return NO_REFERENCE
        wanted = parse_number(reference)
        if wanted is None:
            return None, f"the ground truth {reference!r} is not a number"
        answer = extract_answer(sample.text, options.extract)
        if answer is None:
            return 0.0, NO_ANSWER
        value = parse_number(answer)
        if value is None:
            return 0.0, f"{answer!r} is not a number"
        is_right = abs(value - wanted) <= max(absolute, relative * abs(wanted))
        return float(is_right), f"{answer!r} {'equals' if is_right else 'is not'} {reference!r}"

    return score
