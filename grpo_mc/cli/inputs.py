"""What several commands read from their arguments: a config file with overrides, reward functions, response files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mc.config import RewardsConfig
    from grpo_mc.data.records import Group


def split_config_and_overrides(arguments: Sequence[str], *, needs_config: bool) -> tuple[Path | None, list[str]]:
    """Splits "CONFIG section.key=value ..." in any order.

    An argument is an override when it holds "=" and no file of that name exists.

    Raises:
        ValueError: no config file where one is needed, or two.
    """
    files = [a for a in arguments if "=" not in a or Path(a).exists()]
    overrides = [a for a in arguments if a not in files]
    if len(files) > 1:
        raise ValueError(
            f"got {len(files)} config files ({', '.join(files)}); give one, and changes as section.key=value"
        )
    if not files and needs_config:
        raise ValueError("no config file given; give one, e.g. configs/quickstart.yaml")
    return (Path(files[0]) if files else None), overrides


def parse_rewards(specifications: Sequence[str]) -> RewardsConfig:
    """Reward functions, each a type ("math") or a YAML mapping ("{type: numeric, tolerance: 0.01}"), as a section.

    Raises:
        ConfigError: an unknown type or option, or a value of the wrong type.
    """
    from grpo_mc.config import load_config_text

    functions = [text if text.lstrip().startswith("{") else f"{{type: {text}}}" for text in specifications]
    # The smallest configuration around them, so that they are read and checked exactly as in a file.
    text = "model: {path: none}\nrun: {dir: none, steps: 0}\n"
    return load_config_text(text, [f"rewards.functions=[{', '.join(functions)}]"], name="--reward").rewards


def read_responses(path: Path) -> list[Group]:
    """Groups from a JSONL file of responses: consecutive lines with the same prompt are one group.

    A line holds `response` (text) and may hold `prompt` (text), `ground_truth`, `data_source` and other columns, which
    reward functions see.

    Raises:
        ValueError: a line is no object or lacks `response`; names file and line.
        FileNotFoundError: no such file.
    """
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); write one object a line") from error
            if not isinstance(record, dict) or not isinstance(record.get("response"), str):
                raise ValueError(
                    f"{path}, line {number}: needs an object with a text `response`, e.g. "
                    '{"prompt": "1 + 1 =", "response": " 2", "ground_truth": "2"}'
                )
            records.append(record)
    if not records:
        raise ValueError(f"{path}: holds no response; write one object a line with at least `response`")
    return group_responses(records, source=path.name)


def group_responses(records: Sequence[dict[str, Any]], *, source: str) -> list[Group]:
    """Groups of rollouts without tokens, good for scoring only."""
    import numpy as np

    from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout

    known = {"prompt", "response", "ground_truth", "data_source"}
    groups: list[Group] = []
    for record in records:
        truth = record.get("ground_truth")
        text = str(record.get("prompt", ""))
        is_new = not groups or groups[-1].prompt.text != text or groups[-1].prompt.ground_truth != _as_text(truth)
        if is_new:
            prompt = Prompt(
                prompt_id=f"{source}:{len(groups)}",
                token_ids=np.zeros(0, np.int64),
                text=text,
                ground_truth=_as_text(truth),
                data_source=str(record.get("data_source", "")),
                fields={key: value for key, value in record.items() if key not in known},
            )
            groups.append(Group(group_id=len(groups), prompt=prompt, rollouts=[]))
        group = groups[-1]
        group.rollouts.append(
            Rollout(
                group_id=group.group_id,
                sample_index=len(group.rollouts),
                prompt=group.prompt,
                segments=[],
                text=record["response"],
                finish_reason=FinishReason.FINISHED,
                policy_versions=(),
            )
        )
    return groups


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
