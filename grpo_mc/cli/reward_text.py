"""Rewards as text for the terminal: the verdicts on a rollout, the summary of many, the options of a type."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from grpo_mc.data.text import printable
from grpo_mc.monitor.formats import counted, format_number

if TYPE_CHECKING:
    from grpo_mc.data.records import Group, Rollout

COMMON_FIELDS = ("type", "name", "weight")


def verdict_lines(rollout: Rollout) -> list[str]:
    """One line a verdict, then the reward."""
    lines = [
        f"  {v.name:<16} {v.status:<11} {'-' if v.score is None else format_number(v.score):>7}  {v.reason}".rstrip()
        for v in rollout.verdicts
    ]
    lines = [printable(line) for line in lines]  # verdicts may come from a file
    reward = "unscored" if rollout.reward is None else format_number(rollout.reward)
    return [*lines, f"  reward {reward}"]


def summary_text(groups: Sequence[Group]) -> str:
    """How many responses were scored, the mean reward, and the mean of each function."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lines = [f"{counted(len(rollouts), 'response')} in {counted(len(groups), 'group')}, {len(rewards)} scored"]
    if rewards:
        lines.append(f"  reward           mean {format_number(statistics.fmean(rewards))}")
    for name in dict.fromkeys(v.name for r in rollouts for v in r.verdicts):
        verdicts = [v for r in rollouts for v in r.verdicts if v.name == name]
        scores = [v.score for v in verdicts if v.score is not None]
        others = dict.fromkeys(str(v.status) for v in verdicts if v.score is None)
        counts = ", ".join(f"{sum(str(v.status) == s for v in verdicts)} {s}" for s in others)
        mean = format_number(statistics.fmean(scores)) if scores else "-"
        lines.append(f"  {name:<16} mean {mean}{'; ' + counts if counts else ''}")
    same = sum(len(set(g.valid_rewards())) == 1 and len(g.valid_rewards()) > 1 for g in groups)
    lines.append(f"  groups of several responses without any spread, which teach nothing: {same}")
    return "\n".join(lines)


def option_lines(reward_type: str) -> list[str]:
    """The options of a type: name, values, default, what it does.

    Raises:
        ValueError: there is no such type.
    """
    from grpo_mc.cli.key_text import key_lines

    model = next((m for m in reward_models() if _type_of(m) == reward_type), None)
    if model is None:
        known = ", ".join(_type_of(m) for m in reward_models())
        raise ValueError(f"no reward type '{reward_type}'; types are {known}")
    fields = sorted(model.model_fields.items(), key=lambda item: item[0] in COMMON_FIELDS)
    return [line for name, field in fields if name != "type" for line in key_lines(name, field)]


def reward_models() -> list[Any]:
    """The configuration classes of all reward types, in their order."""
    from grpo_mc.config import RewardFunction

    union = get_args(RewardFunction)[0]
    return list(get_args(union))


def _type_of(model: Any) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0])
