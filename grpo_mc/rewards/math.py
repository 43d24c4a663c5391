r"""Mathematical equality: 1 when the answer equals the ground truth (math-verify), else 0.

Option: extract. Three passes, cheapest first:
1. the same text after light clean-up is right;
2. two numbers are compared exactly: 1/2 = 0.5 = \frac12, 8,000 = 8000, and 2/3 is not 2;
3. math-verify parses both and compares them symbolically: x(x+2) = x^2+2x, (1,2) = (1, 2), {1,2} = {2,1}.

A ground truth in words (three letters or more, "no", or inside \text{}) is compared as text: symbolic comparison would
multiply its letters and call every anagram right. math-verify's own time limit is off: it needs signal.alarm, which
exists only in a process's main thread; the reward pool ends the worker process instead.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from grpo_mc.rewards.extract import extract_answer, has_balanced_braces, last_boxed, strip_full_stop
from grpo_mc.rewards.number_text import normalize_numbers, parse_number
from grpo_mc.rewards.sample import NO_ANSWER, NO_REFERENCE, Sample, Scorer, reference_answer

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\\(?:q?quad)(?![a-zA-Z])|~")


def build(options: Any) -> Scorer:
    """The scorer for a MathReward. Imports math-verify, about one second."""
    import math_verify

    # Both warn at every call that their own time limit is off, which is wanted here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(sample: Sample) -> tuple[object, str]:
        reference = reference_answer(sample.prompt)
        if reference is None:
            return NO_REFERENCE
        if re.search(r"\\(?:boxed|fbox)", reference):
            reference = last_boxed(reference) or reference
        answer = extract_answer(sample.text, options.extract)
        if answer is None:
            return 0.0, NO_ANSWER
        verdict = compare_cheaply(reference, answer)
        if verdict is None:
            return _compare_symbolically(math_verify, reference, answer)
        return float(verdict), f"{answer!r} {'equals' if verdict else 'is not'} {reference!r}"

    return score


def clean_math(text: str) -> str:
    r"""`text` without what carries no meaning: math delimiters, sizes, spacing, a trailing full stop."""
    text = strip_full_stop(normalize_numbers(text))
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            inner = text[len(opening) : len(text) - len(closing)]
            if "$" not in inner:
                text = strip_full_stop(inner)
    return text.strip()


def compare_cheaply(reference: str, answer: str) -> bool | None:
    """Whether the answer is right, when text and exact numbers decide it; None when only symbols can."""
    reference, answer = clean_math(reference), clean_math(answer)
    if _squeeze(reference) == _squeeze(answer):
        return True
    wanted, value = parse_number(reference), parse_number(answer)
    if wanted is not None and value is not None:
        return wanted == value
    words = _TEXT_COMMAND.sub(r"\1", reference).strip()
    has_words = words != reference or len(re.findall(r"[A-Za-z]", words)) >= 3 or words.casefold() == "no"
    if has_words and re.fullmatch(r"[A-Za-z][A-Za-z '()-]*", words):
        return words.casefold() == _TEXT_COMMAND.sub(r"\1", answer).strip().casefold()
    return None


def _squeeze(text: str) -> str:
    """`text` for comparing spellings: white space only between words, no LaTeX spacing, one fraction command."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", _SPACING.sub("", re.sub(r"\\[dt]frac", r"\\frac", text)))


def _compare_symbolically(math_verify: Any, reference: str, answer: str) -> tuple[object, str]:
    gold = math_verify.parse(_one_box(reference), parsing_timeout=None)
    if not gold:
        return None, f"math-verify cannot read the ground truth {reference!r}"
    if not has_balanced_braces(answer):
        return 0.0, f"{answer!r} has unbalanced braces"  # it would close the box and open another: a second answer
    parsed = math_verify.parse(_one_box(answer), parsing_timeout=None)
    if not parsed:
        return 0.0, f"{answer!r} is not mathematics"
    try:
        is_right = math_verify.verify(gold, parsed, timeout_seconds=None, raise_on_error=True)
    except Exception as error:  # sympy raises anything on strange input; the answer caused it: it is wrong
        return 0.0, f"{answer!r} cannot be compared with {reference!r}: {type(error).__name__}: {error}"
    return float(is_right), f"{answer!r} {'equals' if is_right else 'is not'} {reference!r}"


def _one_box(text: str) -> str:
    """`text` as math-verify reads it: in a box, so that all of it is one answer and none is looked for inside.

    Thousands commas go, except inside brackets, where a comma may separate.
    """
    text = clean_math(text)
    if not re.search(r"[(\[]|\\\{", text):
        text = re.sub(r"(?<![\d,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,])", lambda m: m.group().replace(",", ""), text)
    return f"\\boxed{{{text}}}"
