"""Judging a file of responses, without a run: what `grpo-mc rewards score` does.

Each line of the file is a JSON object. Read from it:
    response         required: the text to judge
    prompt           text or a list of chat messages; consecutive lines with one prompt and ground truth are a group
The ground truth, the domain and the columns that reward functions see are taken as in a run (grpo_mc.data.schemas).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout
from grpo_mc.data.schemas import other_fields, prompt_content, read_data_source, read_ground_truth
from grpo_mc.data.source_jsonl import read_jsonl, read_lines
from grpo_mc.data.sources import Record
from grpo_mc.rewards.pool import RewardPool

if TYPE_CHECKING:
    from grpo_mc.config.rewards import RewardsConfig

_NO_TOKENS = np.zeros(0, np.int64)


def read_responses(path: str | Path) -> list[Group]:
    """Groups of rollouts without tokens, good for scoring only. Every rollout's prompt has its own line's columns.

    Args:
        path: "-" = standard input.

    Raises:
        ValueError: no file, no response in it, or a line that is not a record; names file, line and field.
    """
    groups: list[Group] = []
    name = "standard input" if str(path) == "-" else str(path)
    for record in read_lines(sys.stdin.buffer, name) if str(path) == "-" else read_jsonl(name):
        response = record.fields.get("response")
        if not isinstance(response, str):
            example = '{"prompt": "1 + 1 =", "response": " 2", "ground_truth": "2"}'
            raise record.error("response", f"a text is needed, e.g. {example}")
        prompt = _prompt(record)
        if not groups or _problem(groups[-1].prompt) != _problem(prompt):
            groups.append(Group(len(groups), prompt, []))
        group = groups[-1]
        sample_index = len(group.rollouts)
        rollout = Rollout(group.group_id, sample_index, prompt, [], response, FinishReason.FINISHED, ())
        group.rollouts.append(rollout)
    if not groups:
        raise ValueError(f"{name}: holds no response; give one object a line with at least `response`")
    return groups


def score_responses(groups: Sequence[Group], rewards: RewardsConfig) -> None:
    """Fills the verdicts and rewards of every rollout, each judged with the columns of its own line.

    Raises:
        ValueError: a reward function that cannot be built.
    """
    # The pool hands a group's columns to its functions once for all rollouts, so each line goes as a group of its own.
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with RewardPool(rewards) as pool:
        pool.score([Group(line, rollout.prompt, [rollout]) for line, rollout in enumerate(rollouts)])


def _problem(prompt: Prompt) -> tuple[object, ...]:
    return prompt.text, prompt.messages, prompt.ground_truth


def _prompt(record: Record) -> Prompt:
    content = prompt_content(record, "prompt") if record.fields.get("prompt") else ""
    return Prompt(
        prompt_id=record.where,
        token_ids=_NO_TOKENS,
        text=content if isinstance(content, str) else "\n".join(message["content"] for message in content),
        messages=None if isinstance(content, str) else content,
        ground_truth=read_ground_truth(record),
        data_source=read_data_source(record, default=""),
        fields={name: value for name, value in other_fields(record).items() if name != "response"},
    )
