r"""Where the answer stands in a response.

    full           the whole response
    first_line     the text before the first line break, so that it is the same whether or not the engine stopped there
    first_integer  the first number of the first line that is not blank, when it is an integer
    last_number    the last number of the response (grpo_mc.rewards.number_text says what a number is)
    boxed          the inside of the last \boxed{...} or \fbox{...}: the whole balanced group
    answer_tag     the inside of the last <answer>...</answer>

A box or tag that is opened and never closed is no answer, even after a complete one: the last attempt counts.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from grpo_mc.rewards.number_text import find_numbers

ExtractMode = Literal["full", "first_line", "first_integer", "last_number", "boxed", "answer_tag"]
EXTRACT_MODES: tuple[str, ...] = get_args(ExtractMode)

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"


def extract_answer(text: str, mode: str) -> str | None:
    """The answer in `text`, without surrounding space; None when there is none.

    Raises:
        ValueError: `mode` is not one of EXTRACT_MODES.
    """
    if mode == "full":
        return text.strip() or None
    if mode == "first_line":
        return text.split("\n", 1)[0].strip() or None
    if mode == "first_integer":
        numbers = find_numbers(text.lstrip().split("\n", 1)[0])
        return numbers[0] if numbers and re.fullmatch(r"[+-]?[\d,]+", numbers[0]) else None
    if mode == "last_number":
        numbers = find_numbers(text)
        return numbers[-1] if numbers else None
    if mode == "boxed":
        return last_boxed(text)
    if mode == "answer_tag":
        return last_answer_tag(text)
    raise ValueError(f"extract is {mode!r}, but must be one of {', '.join(EXTRACT_MODES)}; correct the reward function")


def last_boxed(text: str) -> str | None:
    r"""The inside of the last outermost box; a box that holds only a box is opened again.

    `\boxed 7` and `\boxed7`, LaTeX's one-token argument, count as a box around 7.
    """
    answer: str | None = None
    position = 0
    while match := _BOX.search(text, position):
        start = match.end()
        while start < len(text) and text[start].isspace():
            start += 1
        if start < len(text) and text[start] == "{":
            end = _closing_brace(text, start)
            if end is None:
                return None
            answer, position = text[start + 1 : end], end + 1
        else:
            token = re.match(r"[+-]?[\w.,]*\w", text[start:])
            answer, position = (token.group() if token else None), start
    if answer is None:
        return None
    answer = answer.strip()
    inner = _BOX.match(answer)
    return last_boxed(answer) if inner and answer.endswith("}") else (answer or None)


def _closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one at `start`; escaped braces are text. None when it never closes."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def has_balanced_braces(text: str) -> bool:
    """Whether every brace of `text` that is not escaped has its partner inside it."""
    return _closing_brace("{" + text + "}", 0) == len(text) + 1


def last_answer_tag(text: str) -> str | None:
    """The inside of the last <answer>...</answer>, or None when the last one is not closed or is empty."""
    start = text.rfind(_OPEN_TAG)
    if start < 0:
        return None
    start += len(_OPEN_TAG)
    end = text.find(_CLOSE_TAG, start)
    return text[start:end].strip() or None if end >= 0 else None


def strip_full_stop(text: str) -> str:
    """`text` without surrounding space and one trailing full stop (an ellipsis stays)."""
    text = text.strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text
