"""Format: 1 when the response is the tags' blocks in order, else 0.

Option: tags, for example [think, answer]: <think>...</think><answer>...</answer>, each tag once, no block empty,
nothing but white space outside. A prompt that already ends with the first opening tag, as some chat templates do,
counts as the response's beginning.
"""

from __future__ import annotations

from typing import Any

from grpo_mc.rewards.sample import Sample, Scorer


def build(options: Any) -> Scorer:
    """The scorer for a FormatReward."""
    tags = tuple(options.tags)

    def score(sample: Sample) -> tuple[object, str]:
        text = sample.text
        first = f"<{tags[0]}>"
        if sample.prompt.text.rstrip().endswith(first):
            text = first + text
        fault = format_fault(text, tags)
        return (0.0, fault) if fault else (1.0, "")

    return score


def format_fault(text: str, tags: tuple[str, ...]) -> str:
    """What is wrong with the tags in `text`; empty when nothing is."""
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if text.count(mark) != 1:
                return f"{mark} occurs {text.count(mark)} times"
    position = 0
    for tag in tags:
        start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
        if start < position or end < start:
            return f"<{tag}> is out of order"
        if text[position:start].strip():
            return f"text outside the tags, before <{tag}>"
        if not text[start + len(tag) + 2 : end].strip():
            return f"<{tag}> is empty"
        position = end + len(tag) + 3
    return "text outside the tags, at the end" if text[position:].strip() else ""
