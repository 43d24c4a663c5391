r"""Multiple choice: 1 when the letter chosen is the ground truth's letter, else 0.

Options: extract, choices (the letters). The letter is read, in this order, from
1. an answer that is only the letter: B, (B), B., **B**, \text{B}, \boxed{B};
2. the last "answer is B", "answer: B", "choose (B)", "option B";
3. the first line's start: "B) 42", "(B) 42", "B. 42", "B: 42";
4. the one letter in parentheses, when there is only one.
"A" as an English word is therefore no choice. Without any of these the response is wrong.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_mc.rewards.extract import extract_answer, last_boxed
from grpo_mc.rewards.sample import NO_ANSWER, NO_REFERENCE, Sample, Scorer, reference_answer


def build(options: Any) -> Scorer:
    """The scorer for a MultipleChoiceReward."""
    letters = options.choices.upper()
    patterns = _patterns(letters)

    def score(sample: Sample) -> tuple[object, str]:
        reference = reference_answer(sample.prompt)
        if reference is None:
            return NO_REFERENCE
        wanted = re.sub(r"[\s().:*]", "", reference).upper()
        if len(wanted) != 1 or wanted not in letters:
            return None, f"the ground truth {reference!r} is not one of the letters {letters}"
        answer = extract_answer(sample.text, options.extract)
        chosen = None if answer is None else _chosen(answer, patterns)
        if chosen is None:
            return 0.0, NO_ANSWER
        return float(chosen == wanted), f"chose {chosen}, the answer is {wanted}"

    return score


def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    letter = f"([{re.escape(letters)}])"
    decorated = rf"[*_\s]*(?:\\(?:text|textbf|mathrm)\{{)?[*(\[\s]*{letter}[*)\].:\s]*\}}?[*_.\s]*"
    # Only the words before a letter are read without regard to case: "a" and "i" are words themselves.
    announced = r"(?i:answer|option|choice|choose|select)(?i:\s+is)?\s*[:=]?\s*(?:\\boxed\{)?[*$(\[\s]*"
    return (
        re.compile(decorated, re.IGNORECASE),
        re.compile(announced + letter + r"(?![\w'])"),
        re.compile(rf"\s*(?:\*\*)?(?:\({letter}\)|{letter}[).:](?!\w))"),
        re.compile(rf"\({letter}\)"),
    )


def _chosen(
    answer: str, patterns: tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str]]
) -> str | None:
    whole, said, start, inside = patterns
    answer = last_boxed(answer) or answer
    if match := whole.fullmatch(answer):
        return match.group(1).upper()
    if matches := said.findall(answer):
        return str(matches[-1]).upper()
    if match := start.match(answer):
        return (match.group(1) or match.group(2)).upper()
    found = set(inside.findall(answer))
    return found.pop().upper() if len(found) == 1 else None
