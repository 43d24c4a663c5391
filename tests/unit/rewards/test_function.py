"""User functions in TRL's and verl's signatures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mc.data.records import Verdict, VerdictStatus
from grpo_mc.rewards import Sample
from grpo_mc.rewards.judge import run_scorer
from grpo_mc.rewards.sample import PromptView
from helpers.rewards import make_prompt, make_scorer

FUNCTIONS = """
import numpy as np

SEEN = {}

def remember(prompts, completions, **columns):
    SEEN.clear()
    SEEN.update(columns, prompts=prompts, completions=completions)
    return [1.0]

def named(completions, answer):
    return [float(completions[0] == answer[0])]

async def later(prompts, completions, **columns):
    return [0.25]

def array(prompts, completions, **columns):
    return np.array([0.5], dtype=np.float32)

def bools(prompts, completions, **columns):
    return np.array([True])

def none(prompts, completions, **columns):
    return [None]

def two(prompts, completions, **columns):
    return [1.0, 0.0]

def empty(prompts, completions, **columns):
    return []

def scalar(prompts, completions, **columns):
    return 1.0

def text(prompts, completions, **columns):
    return "1"

def nothing(prompts, completions, **columns):
    pass

def raises(prompts, completions, **columns):
    raise KeyError("answer")

def scaled(prompts, completions, factor, **columns):
    return [2.0 * factor]

def verl_remember(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.clear()
    SEEN.update(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)
    return 1.0

def verl_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 0.75, "acc": True}

def verl_no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}

NUMBER = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def _judge(path: Path, name: str, response: str = "4", signature: str = "trl", **columns: Any) -> Verdict:
    options = columns.pop("options", {})
    scorer = make_scorer(type="function", path=f"{path}:{name}", signature=signature, options=options)
    prompt = PromptView.from_prompt(make_prompt(columns.pop("ground_truth", None), **columns))
    return run_scorer(scorer, Sample(prompt, response, (5, 6)))


def _seen() -> dict[str, Any]:
    seen: dict[str, Any] = sys.modules["grpo_mc_reward_my_rewards"].SEEN  # type: ignore[attr-defined]
    return seen


def test_trl_function_gets_lists_of_one(functions: Path) -> None:
    assert _judge(functions, "remember", ground_truth="4", answer="four", level=2).score == 1.0
    assert _seen() == {
        "prompts": ["1 + 1 ="],
        "completions": ["4"],
        "completion_ids": [[5, 6]],
        "ground_truth": ["4"],
        "data_source": [""],
        "answer": ["four"],
        "level": [2],
    }


def test_trl_function_gets_messages_of_a_conversation(functions: Path) -> None:
    user = {"role": "user", "content": "hi"}
    _judge(functions, "remember", "hello", messages=(user,))
    assert _seen()["prompts"] == [[user]]
    assert _seen()["completions"] == [[{"role": "assistant", "content": "hello"}]]


@pytest.mark.parametrize(("name", "score"), [("later", 0.25), ("array", 0.5)])
def test_trl_function_may_be_async_or_return_an_array(functions: Path, name: str, score: float) -> None:
    assert _judge(functions, name).score == score


def test_trl_function_without_kwargs_gets_the_columns_it_names(functions: Path) -> None:
    assert _judge(functions, "named", "4", answer="4", other=1).score == 1.0
    missing = _judge(functions, "named", "4")
    assert missing.status is VerdictStatus.CRASHED
    assert "answer" in missing.reason


def test_options_are_further_arguments(functions: Path) -> None:
    assert _judge(functions, "scaled", options={"factor": 1.5}).score == 3.0


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("none", VerdictStatus.ABSTAINED, "None"),
        ("two", VerdictStatus.BAD_OUTPUT, "2 values for 1 response"),
        ("empty", VerdictStatus.BAD_OUTPUT, "0 values for 1 response"),
        ("scalar", VerdictStatus.BAD_OUTPUT, "1.0, but a list"),
        ("text", VerdictStatus.BAD_OUTPUT, "'1', but a list"),
        ("nothing", VerdictStatus.BAD_OUTPUT, "None, but a list"),
        ("bools", VerdictStatus.BAD_OUTPUT, "bool"),
        ("raises", VerdictStatus.CRASHED, "KeyError: 'answer'"),
    ],
)
def test_wrong_number_of_values_is_not_spread_over_responses(
    functions: Path, name: str, status: VerdictStatus, reason: str
) -> None:
    verdict = _judge(functions, name)
    assert verdict.status is status
    assert verdict.score is None
    assert reason in verdict.reason


def test_verl_function_gets_its_own_ground_truth_object(functions: Path) -> None:
    """verl's ground truth may be a list; the prompt's text of it is for our own functions."""
    columns = {"reward_model": {"ground_truth": [4, 5]}, "extra_info": {"index": 9}, "data_source": "gsm8k"}
    assert _judge(functions, "verl_remember", "4", "verl", ground_truth="[4, 5]", **columns).score == 1.0
    assert _seen() == {
        "data_source": "gsm8k",
        "solution_str": "4",
        "ground_truth": [4, 5],
        "extra_info": {"index": 9},
    }


def test_verl_function_without_extra_info_gets_the_columns(functions: Path) -> None:
    _judge(functions, "verl_remember", "4", "verl", ground_truth="4", level=2)
    assert _seen()["ground_truth"] == "4"
    assert _seen()["extra_info"] == {"level": 2}


def test_verl_dict_needs_a_score(functions: Path) -> None:
    assert _judge(functions, "verl_dict", "4", "verl").score == 0.75
    verdict = _judge(functions, "verl_no_score", "4", "verl")
    assert verdict.status is VerdictStatus.BAD_OUTPUT
    assert "acc" in verdict.reason and "score" in verdict.reason


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{file}:absent", "has no 'absent'"),
        ("{file}:NUMBER", "int, not a function"),
        ("{folder}/none.py:f", "there is no file"),
        ("no_such_module.rewards:f", "No module named 'no_such_module'"),
        (".relative:f", "'.relative' is no module's full name"),
        ("a..b:f", "'a..b' is no module's full name"),
    ],
)
def test_a_function_that_does_not_exist_is_one_clear_error(functions: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match="reward function") as error:
        make_scorer(type="function", path=path.format(file=functions, folder=functions.parent))
    assert message in str(error.value)


def test_a_file_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 0.5\n")
    path = tmp_path / "importing.py"
    path.write_text("from neighbour_of_rewards import VALUE\ndef f(completions, **kw):\n    return [VALUE]\n")
    assert _judge(path, "f").score == 0.5


def test_an_import_that_fails_inside_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "broken.py"
    path.write_text("import no_such_library\n")
    with pytest.raises(ValueError, match="no_such_library"):
        make_scorer(type="function", path=f"{path}:f")
