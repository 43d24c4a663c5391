"""The reasoning-gym task's own verifier, `score_answer(answer, entry)`: 0 to 1.

Options: extract (the verifiers want the bare answer, not the response around it), partial_credit. Many verifiers give
partial credit for wrong answers (0.01 for any answer to countdown, 0.167 for some to spell_backward, the share of the
text that is the answer in most): a score above 0 does not mean right, only 1 does. partial_credit=false keeps only 1.

The task is the record's source_dataset (in its metadata or a column), else its data_source. A verifier that
raises on an answer (prime_factorization does on "zzz") gives the verdict "crashed".
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
                raise ValueError(
                    f"reasoning_gym: the record's task is {task!r}, which reasoning-gym does not have; "
                    "give the record a column data_source (or source_dataset) with the task's name"
                )
            verifiers[task] = get_score_answer_fn(task)
        return verifiers[task]

    def score(sample: Sample) -> tuple[object, str]:
        task, entry = task_entry(sample.prompt)
        score_answer = verifier(task)
        answer = extract_answer(sample.text, options.extract)
        if answer is None:
            return 0.0, NO_ANSWER
        value = float(score_answer(answer, entry))
        if value < 1.0 and not options.partial_credit:
            return 0.0, f"{answer!r}: {value:g} without partial credit is 0"
        return value, f"{answer!r} scores {value:g}"

    return score


def task_entry(prompt: PromptView) -> tuple[str, dict[str, Any]]:
    """The task's name and the task's own record, {question, answer, metadata}.

    The record is the column `entry` where the source kept it; else it is rebuilt from the columns question, answer and
    metadata (all columns together stand for the metadata where there is no such column).
    """
    fields = prompt.fields
    kept = fields.get("entry")
    if isinstance(kept, dict) and "answer" in kept:
        entry = kept
    else:
        entry = {
            "question": fields.get("question", prompt.text),
            "answer": fields.get("answer", prompt.ground_truth),
            "metadata": fields["metadata"] if isinstance(fields.get("metadata"), dict) else fields,
        }
    metadata = entry.get("metadata")
    named = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return str(named or prompt.data_source), entry
