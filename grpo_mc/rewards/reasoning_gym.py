"""The reasoning-gym task's own verifier, `score_answer(answer, entry)`: 0 to 1.

Options: extract (the verifiers want the bare answer, not the response around it), partial_credit. Many verifiers give
partial credit for wrong answers (0.01 for any answer to countdown, 0.167 for some to spell_backward, the share of the
text that is the answer in most): a score above 0 does not mean right, only 1 does. partial_credit=false keeps only 1.

The task is the record's metadata.source_dataset, else its data source. A verifier that raises on an answer
(prime_factorization does on "zzz") gives the verdict "crashed".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_mc.rewards.extract import extract_answer
from grpo_mc.rewards.sample import NO_ANSWER, PromptView, Sample, Scorer

Verifier = Callable[[str, dict[str, Any]], float]


def build(options: Any) -> Scorer:
    """The scorer for a ReasoningGymReward. Imports reasoning_gym, some seconds."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    verifiers: dict[str, Verifier] = {}

    def verifier(task: str) -> Verifier:
        if task not in verifiers:
            if task not in DATASETS:
                raise ValueError(f"reasoning_gym: the record's task is {task!r}, which reasoning-gym does not have")
            verifiers[task] = get_score_answer_fn(task)
        return verifiers[task]

    def score(sample: Sample) -> tuple[object, str]:
        score_answer = verifier(_task(sample.prompt))
        answer = extract_answer(sample.text, options.extract)
        if answer is None:
            return 0.0, NO_ANSWER
        value = float(score_answer(answer, _entry(sample.prompt)))
        if value < 1.0 and not options.partial_credit:
            return 0.0, f"{answer!r}: {value:g} without partial credit is 0"
        return value, f"{answer!r} scores {value:g}"

    return score


def _entry(prompt: PromptView) -> dict[str, Any]:
    """The task's own record, rebuilt from the prompt's columns."""
    entry = dict(prompt.fields)
    entry.setdefault("question", prompt.text)
    entry.setdefault("answer", prompt.ground_truth)
    entry.setdefault("metadata", {})
    return entry


def _task(prompt: PromptView) -> str:
    metadata = prompt.fields.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return str(name or prompt.data_source)
