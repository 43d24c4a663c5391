"""The reward types: which there are, what each does, and how one is built from its options.

A type is a module of this package with a docstring that explains it and a function `build(options) -> Scorer`, where
options has the fields of its model in grpo_mc.config.rewards. Modules are imported only when a type is used, because
some bring in libraries that take seconds to load.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from grpo_mc.rewards.sample import Scorer

REWARD_TYPES = MappingProxyType(
    {
        "exact": "the answer is the ground truth, character by character",
        "numeric": "the answer equals the ground truth as a number, within a tolerance",
        "math": "the answer is mathematically equal to the ground truth (math-verify)",
        "multiple_choice": "the letter chosen is the ground truth's",
        "regex": "a regular expression matches",
        "format": "the response is the tags' blocks in order",
        "reasoning_gym": "the score of the reasoning-gym task's own verifier",
        "function": "a function of yours, in TRL's or verl's signature",
    }
)
"""Name -> what it rewards, in one line."""


@dataclass(frozen=True)
class NamedScorer:
    """A reward function ready to use."""

    name: str
    score: Scorer


def build_functions(functions: list[Any]) -> list[NamedScorer]:
    """The scorers for a list of RewardFunction options, in order.

    Raises:
        ValueError: an unknown type, or options that the type refuses.
    """
    return [NamedScorer(f.name or f.type, _module(f.type).build(f)) for f in functions]


def describe_function(options: Any) -> str:
    """What messages call a function: "reward function 'file.py:name'", or "reward 'name' (type numeric)"."""
    if options.type == "function":
        return f"reward function {options.path!r}"
    return f"reward {options.name or options.type!r} (type {options.type})"


def explain(reward_type: str) -> str:
    """What a reward type does and which options it has, for a person.

    Raises:
        ValueError: there is no such type.
    """
    return f"{reward_type}\n\n{inspect.getdoc(_module(reward_type)) or REWARD_TYPES[reward_type]}\n"


def _module(reward_type: str) -> ModuleType:
    if reward_type not in REWARD_TYPES:
        raise ValueError(f"reward type is {reward_type!r}, but must be one of {', '.join(REWARD_TYPES)}")
    return importlib.import_module(f"grpo_mc.rewards.{reward_type}")
