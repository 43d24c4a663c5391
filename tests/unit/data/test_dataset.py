"""Datasets: what is kept, what is left out and counted, and the committed held-out file."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from grpo_mc.config.data import JsonlSource, ReasoningGymSource
from grpo_mc.data.dataset import PromptDataset

ROOT = Path(__file__).resolve().parents[3]
HELDOUT = ROOT / "configs" / "data" / "heldout_sums.jsonl"


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(path: str, **options) -> JsonlSource:
    return JsonlSource(kind="jsonl", path=path, **{"chat": False, **options})


def sums(seed: int, size: int, **options) -> ReasoningGymSource:
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    return ReasoningGymSource(kind="reasoning_gym", task="chain_sum", options=terms, size=size, seed=seed, **options)


def test_prompt_record(make_tokenizer, tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "ab", "answer": 3, "level": 1}, {"prompt": "c", "data_source": "d"})
    first, second = PromptDataset(source(path), make_tokenizer(adds_bos=True))
    assert (first.prompt_id, first.text, first.messages, first.ground_truth) == ("p:0", "ab", None, "3")
    assert first.token_ids.dtype == np.int64 and first.token_ids[0] == 1 and len(first.token_ids) == 3
    assert first.fields == {"answer": 3, "level": 1} and first.data_source == "p"
    assert (second.prompt_id, second.data_source, second.ground_truth) == ("p:1", "d", None)


def test_chat_prompt_text_is_what_its_ids_encode(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "ab"}]})
    (prompt,) = PromptDataset(source(path, chat=None), tokenizer)
    assert prompt.text == "[user]ab</s>[assistant]" == tokenizer.decode(prompt.token_ids)
    assert prompt.messages == ({"role": "user", "content": "ab"},)


def test_long_prompts_are_left_out_and_counted(make_tokenizer, tmp_path, caplog):
    path = write(tmp_path / "p.jsonl", {"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "a"})
    with caplog.at_level(logging.INFO):
        dataset = PromptDataset(source(path), make_tokenizer(), max_prompt_tokens=3)
    assert [prompt.prompt_id for prompt in dataset] == ["p:0", "p:2"]
    assert (dataset.num_read, dataset.num_too_long, dataset.num_excluded, len(dataset)) == (3, 1, 0, 2)
    assert "3 records read, 0 left out as excluded problems, 1 as longer than 3 tokens, 2 kept" in caplog.text


def test_excluded_by_prompt_and_by_problem(make_tokenizer, tmp_path):
    """The same problem under another template, spacing or schema stays out."""
    exclude = write(
        tmp_path / "held.jsonl",
        {"prompt": "shots\n3 + 4 =", "expression": "3 + 4"},
        {"prompt": [{"role": "user", "content": "What is 5?"}]},
    )
    path = write(
        tmp_path / "p.jsonl",
        {"expression": "3+4"},
        {"expression": "4 + 3"},
        {"expression": "0", "prompt": "shots\n3 + 4 ="},
        {"expression": "1", "question": "what is  5?"},
    )
    dataset = PromptDataset(source(path, template="{expression}"), make_tokenizer(), exclude=[exclude])
    assert [prompt.text for prompt in dataset] == ["4 + 3"] and dataset.num_excluded == 3


def test_excluded_by_the_text_that_the_template_makes(make_tokenizer, tmp_path):
    exclude = write(tmp_path / "held.jsonl", {"prompt": "Q: 7 ="})
    path = write(tmp_path / "p.jsonl", {"x": "7"}, {"x": "8"})
    dataset = PromptDataset(source(path, template="Q: {x} ="), make_tokenizer(), exclude=[exclude])
    assert [prompt.text for prompt in dataset] == ["Q: 8 ="]


def test_nothing_left_and_useless_exclusions_are_refused(make_tokenizer, tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "abcd"})
    with pytest.raises(ValueError, match="no prompt is left: 1 records read, 0 left out .* 1 as longer than 3 tokens"):
        PromptDataset(source(path), make_tokenizer(), max_prompt_tokens=3)
    with pytest.raises(ValueError, match="line 1: field 'prompt' is missing; nothing to exclude by"):
        PromptDataset(source(path), make_tokenizer(), exclude=[write(tmp_path / "e.jsonl", {"answer": "x"})])
    with pytest.raises(ValueError, match="no problem to exclude"):
        PromptDataset(source(path), make_tokenizer(), exclude=[write(tmp_path / "e.jsonl")])
    with pytest.raises(ValueError, match="there is no such file"):
        PromptDataset(source(path), make_tokenizer(), exclude=[str(tmp_path / "missing.jsonl")])


def test_prompt_without_tokens_is_refused(make_tokenizer, tmp_path):
    path = write(tmp_path / "p.jsonl", {"x": ""})
    with pytest.raises(ValueError, match="p.jsonl line 1: the prompt '' has no tokens"):
        PromptDataset(source(path, template="{x}"), make_tokenizer())
    assert len(PromptDataset(source(path, template="{x}"), make_tokenizer(adds_bos=True))) == 1


def test_system_prompt_that_is_not_used_is_said_once(make_tokenizer, tmp_path, caplog):
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    path = write(tmp_path / "p.jsonl", {"prompt": chat}, {"prompt": chat}, {"prompt": "b"})
    PromptDataset(source(path, chat=None, system_prompt="s"), make_tokenizer())
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{path}: 2 of 3 prompts bring their own system message, which stays; system_prompt is not used for them"
    ]


def load_tool():
    spec = importlib.util.spec_from_file_location("make_heldout", ROOT / "tools" / "make_heldout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_held_out_file_is_what_its_tool_makes():
    made = "".join(json.dumps(problem) + "\n" for problem in load_tool().make_problems())
    assert HELDOUT.read_text() == made


def test_held_out_file_has_400_distinct_problems_in_the_stated_mix():
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    assert len({row["expression"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows) == 400
    kinds = []
    for row in rows:
        left, operator, right = row["expression"].split()
        assert int(row["answer"]) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert row["prompt"] == f"2 + 5 = 7\n16 - 3 = 13\n{row['expression']} ="
        assert len(left) == len(right)
        kinds.append((len(left), operator))
    assert [kinds.count(kind) for kind in ((1, "+"), (1, "-"), (2, "+"), (2, "-"))] == [50, 50, 150, 150]
    assert [kinds[:100].count((1, operator)) for operator in "+-"] == [13, 13]
    assert "2 + 5" not in {row["expression"] for row in rows}


def test_training_never_meets_a_held_out_problem(smollm):
    """Two-term sums repeat: without exclusion a quarter of them would be in the held-out set."""
    template = "2 + 5 = 7\n16 - 3 = 13\n{expression} ="
    held_out = {prompt.text for prompt in PromptDataset(source(str(HELDOUT)), smollm)}
    plain = PromptDataset(sums(7, 400, template=template), smollm)
    assert sum(prompt.text in held_out for prompt in plain) > 50
    other_template = "Work out {expression} now:"
    for used in (template, other_template):
        dataset = PromptDataset(sums(7, 400, template=used), smollm, exclude=[str(HELDOUT)])
        assert not held_out & {f"2 + 5 = 7\n16 - 3 = 13\n{prompt.fields['expression']} =" for prompt in dataset}
        assert dataset.num_excluded > 50 and len(dataset) + dataset.num_excluded == 400
