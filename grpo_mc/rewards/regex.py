"""Regular expression: 1 when the pattern matches, else 0.

Options: extract, pattern (Python's syntax; "." matches line ends too), full_match (the whole text must match, not any
part). A pattern with a named group `answer` must also find the ground truth there: (?P<answer>...) of the last match
is compared with it, white space around both ignored. A pattern that backtracks for ever ends in "timed out".
"""

from __future__ import annotations

import re
from typing import Any

from grpo_mc.rewards.extract import extract_answer
from grpo_mc.rewards.sample import NO_ANSWER, NO_REFERENCE, Sample, Scorer, reference_answer


def build(options: Any) -> Scorer:
    """The scorer for a RegexReward."""
    pattern = re.compile(options.pattern, re.DOTALL)
    compares = "answer" in pattern.groupindex

    def find(text: str) -> re.Match[str] | None:
        if options.full_match:
            return pattern.fullmatch(text)
        if not compares:
            return pattern.search(text)
        matches = list(pattern.finditer(text))
        return matches[-1] if matches else None

    def score(sample: Sample) -> tuple[object, str]:
        text = sample.text if options.extract == "full" else extract_answer(sample.text, options.extract)
        match = None if text is None else find(text)
        if not compares:
            return (0.0, NO_ANSWER) if text is None else (float(match is not None), "")
        reference = reference_answer(sample.prompt)
        if reference is None:
            return NO_REFERENCE
        answer = None if match is None else match.group("answer")
        if answer is None:
            return 0.0, NO_ANSWER
        is_right = answer.strip() == reference
        return float(is_right), f"{answer.strip()!r} {'is' if is_right else 'is not'} {reference!r}"

    return score
