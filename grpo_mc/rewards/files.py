"""Judging a file of responses, without a run: what `grpo-mc rewards score` does.

Each line of the file is a JSON object. Read from it:
    response         required: the text to judge
    prompt           text or a list of chat messages
    ground_truth     the reference answer; else answer, else verl's reward_model.ground_truth
    data_source      the domain or task
All columns but response and prompt are handed to the reward functions, as in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Verdict
from grpo_mc.rewards.pool import RewardPool

if TYPE_CHECKING:
    from grpo_mc.config.rewards import RewardsConfig

_CHUNK = 256
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ScoredLine:
    """One line's verdicts."""

    line: int
    """Counted from 1."""
    response: str
    reward: float | None
    """The weighted sum of the scores; None when no function gave one."""
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain object for one line of JSON output."""
        verdicts = [
            {"name": v.name, "status": str(v.status), "score": v.score, "reason": v.reason, "seconds": v.seconds}
            for v in self.verdicts
        ]
        return {"line": self.line, "reward": self.reward, "verdicts": verdicts}


def score_file(path: str | Path, rewards: RewardsConfig) -> Iterator[ScoredLine]:
    """The verdicts on every line of a JSONL file, in order. Lines are read and judged in chunks.

    Raises:
        ValueError: no file, a line that is not a record (file, line and field are named), or a reward function that
            cannot be built.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"rewards score: there is no file {str(path)!r}; correct the path")
    with RewardPool(rewards) as pool, path.open(encoding="utf-8") as lines:
        chunk: list[tuple[int, Group]] = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                chunk.append((number, _group(line, path, number)))
            if len(chunk) == _CHUNK:
                yield from _judged(pool, chunk)
                chunk = []
        yield from _judged(pool, chunk)


def _judged(pool: RewardPool, chunk: list[tuple[int, Group]]) -> Iterator[ScoredLine]:
    pool.score([group for _, group in chunk])
    for number, group in chunk:
        rollout = group.rollouts[0]
        yield ScoredLine(number, rollout.text, rollout.reward, tuple(rollout.verdicts))


def _group(line: str, path: Path, number: int) -> Group:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}; each line is one object") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is a JSON {type(record).__name__}, but an object is needed")
    response = record.get("response")
    if not isinstance(response, str):
        raise ValueError(f"{where}: field 'response' is {response!r}, but a text is needed")
    prompt = _prompt(record, where, number)
    rollout = Rollout(number, 0, prompt, [], response, FinishReason.FINISHED, ())
    return Group(number, prompt, [rollout])


def _prompt(record: dict[str, Any], where: str, number: int) -> Prompt:
    raw = record.get("prompt", "")
    messages = None
    if isinstance(raw, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in raw):
        messages = tuple(raw)
        text = "\n".join(m["content"] for m in raw)
    elif isinstance(raw, str):
        text = raw
    else:
        raise ValueError(f"{where}: field 'prompt' is neither a text nor a list of messages with a text 'content'")
    fields = {k: v for k, v in record.items() if k not in ("response", "prompt")}
    truth = _ground_truth(record)
    return Prompt(
        prompt_id=f"{where}:{number}",
        token_ids=_NO_TOKENS,
        text=text,
        messages=messages,
        ground_truth=None if truth is None else str(truth),
        data_source=str(record.get("data_source", "")),
        fields=fields,
    )


def _ground_truth(record: dict[str, Any]) -> Any:
    for name in ("ground_truth", "answer"):
        if record.get(name) is not None:
            return record[name]
    model = record.get("reward_model")
    return model.get("ground_truth") if isinstance(model, dict) else None
