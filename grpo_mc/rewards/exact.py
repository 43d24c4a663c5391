"""Exact match: 1 when the answer is the ground truth, character by character, else 0.

Options: extract (which part of the response is the answer), strip (ignore white space around both), ignore_case.
GSM8K's "... #### 72" as a ground truth means 72.
"""

from __future__ import annotations

from typing import Any

from grpo_mc.rewards.extract import extract_answer
from grpo_mc.rewards.sample import NO_ANSWER, NO_REFERENCE, Sample, Scorer, reference_answer


def build(options: Any) -> Scorer:
    """The scorer for an ExactReward."""

    def prepare(text: str) -> str:
        text = text.strip() if options.strip else text
        return text.casefold() if options.ignore_case else text

    def score(sample: Sample) -> tuple[object, str]:
        reference = reference_answer(sample.prompt)
        if reference is None:
            return NO_REFERENCE
        raw = options.extract == "full" and not options.strip
        answer = sample.text if raw else extract_answer(sample.text, options.extract)
        if answer is None:
            return 0.0, NO_ANSWER
        if raw and "####" not in (sample.prompt.ground_truth or ""):
            reference = sample.prompt.ground_truth or ""
        is_right = prepare(answer) == prepare(reference)
        return float(is_right), f"{answer!r} {'is' if is_right else 'is not'} {reference!r}"

    return score
