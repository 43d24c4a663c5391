"""reasoning-gym's own verifiers, with their traps."""

from __future__ import annotations

from typing import Any

import pytest
import reasoning_gym

from grpo_mc.data.records import VerdictStatus
from grpo_mc.rewards import Sample
from grpo_mc.rewards.judge import run_scorer
from grpo_mc.rewards.sample import PromptView
from helpers.rewards import make_prompt, make_scorer, score_text


def _entry(task: str, **options: Any) -> dict[str, Any]:
    return reasoning_gym.create_dataset(task, size=1, seed=3, **options)[0]


def _score(task: str, response: str, entry: dict[str, Any], **options: Any) -> Any:
    scorer = make_scorer(type="reasoning_gym", **options)
    return score_text(scorer, response, entry["answer"], data_source=task, entry=entry)


def test_the_verifier_gets_the_bare_answer() -> None:
    """The whole response around a right answer scores 0; the answer extracted from it scores 1."""
    entry = _entry("chain_sum")
    response = f"It is \\boxed{{{entry['answer']}}}."
    assert _score("chain_sum", response, entry) < 1.0
    assert _score("chain_sum", response, entry, extract="boxed") == 1.0
    assert _score("chain_sum", "no number", entry, extract="first_integer") == 0.0


@pytest.mark.parametrize(("task", "answer", "credit"), [("countdown", "zzz", 0.01), ("spell_backward", "", 0.0)])
def test_partial_credit_is_not_right(task: str, answer: str, credit: float) -> None:
    """countdown gives 0.01 for any wrong answer; without partial credit it is 0."""
    entry = _entry(task)
    assert _score(task, answer, entry) == credit
    assert _score(task, answer, entry, partial_credit=False) == 0.0
    assert _score(task, entry["answer"], entry, partial_credit=False) == 1.0


def test_spell_backward_gives_a_share_for_a_wrong_word() -> None:
    entry = _entry("spell_backward")
    wrong = entry["answer"][:-1] + "#"
    assert 0.0 < _score("spell_backward", wrong, entry) < 1.0


def test_a_verifier_that_raises_is_crashed_not_zero() -> None:
    """prime_factorization raises ValueError on garbage."""
    entry = _entry("prime_factorization")
    prompt = PromptView.from_prompt(make_prompt(entry["answer"], data_source="prime_factorization", entry=entry))
    verdict = run_scorer(make_scorer(type="reasoning_gym"), Sample(prompt, "zzz"))
    assert verdict.status is VerdictStatus.CRASHED
    assert verdict.score is None
    assert "ValueError" in verdict.reason


def test_the_task_is_found_in_every_form_of_record() -> None:
    """The kept entry; question, answer and metadata columns; flat columns; a data source alone."""
    entry = _entry("chain_sum", min_terms=2, max_terms=2)
    scorer = make_scorer(type="reasoning_gym")
    answer = entry["answer"]
    assert score_text(scorer, answer, answer, **entry) == 1.0
    assert score_text(scorer, answer, answer, **entry["metadata"], question="q", answer=answer) == 1.0
    assert score_text(scorer, answer, answer, data_source="chain_sum") == 1.0


def test_an_unknown_task_says_which_column_is_missing() -> None:
    with pytest.raises(ValueError, match="'mydata'.*data_source"):
        score_text(make_scorer(type="reasoning_gym"), "1", "1", data_source="mydata")
