"""Section `rewards`: the functions that judge a response, and the pool of processes that runs them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_mc.config.base import FunctionPath, Section

Extract = Literal["full", "first_line", "first_integer", "last_number", "boxed", "answer_tag"]
"""Which part of the response is the answer: the whole text, its first line, the first integer on the first line, the
last number in it, what the last \\boxed{} holds, what the last <answer></answer> holds."""


class RewardBase(Section):
    """What all reward functions share."""

    name: str = ""
    """The name in metrics (reward/<name>/mean); empty = its type."""
    weight: float = 1.0
    """Factor of this score in the reward, the weighted sum over the functions that gave a score."""


class ExactReward(RewardBase):
    """1 when the answer is the ground truth, character by character, else 0."""

    type: Literal["exact"]
    """The kind of reward."""
    extract: Extract = "full"
    """Which part of the response is the answer."""
    strip: bool = True
    """Ignore white space around the answer and the ground truth."""
    ignore_case: bool = False
    """Compare without regard to case."""


class NumericReward(RewardBase):
    """1 when the answer equals the ground truth as a number, else 0."""

    type: Literal["numeric"]
    """The kind of reward."""
    extract: Extract = "last_number"
    """Which part of the response is the answer."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest absolute difference that still counts as equal."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Largest difference that still counts as equal, as a part of the ground truth."""


class MathReward(RewardBase):
    """1 when the answer is mathematically equal to the ground truth (math-verify), else 0."""

    type: Literal["math"]
    """The kind of reward."""
    extract: Extract = "boxed"
    """Which part of the response is the answer."""


class MultipleChoiceReward(RewardBase):
    """1 when the letter chosen is the ground truth's, else 0."""

    type: Literal["multiple_choice"]
    """The kind of reward."""
    extract: Extract = "full"
    """Which part of the response is searched for the letter."""
    choices: str = Field(default="ABCDEFGHIJ", min_length=2)
    """The letters that are choices."""


class RegexReward(RewardBase):
    """1 when the pattern matches, else 0."""

    type: Literal["regex"]
    """The kind of reward."""
    extract: Extract = "full"
    """Which part of the response is matched."""
    pattern: str = Field(min_length=1)
    """A Python regular expression; "." matches line ends too."""
    full_match: bool = False
    """Match the whole text, not any part of it."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}; correct the pattern") from error
        return pattern


class FormatReward(RewardBase):
    """1 when the response is the tags' blocks in order, each once, with nothing but white space between, else 0."""

    type: Literal["format"]
    """The kind of reward."""
    tags: list[str] = Field(default_factory=lambda: ["think", "answer"], min_length=1)
    """Names of the tags, in order: "think" stands for <think>...</think>."""


class ReasoningGymReward(RewardBase):
    """The score of the reasoning-gym task's own verifier, 0 to 1."""

    type: Literal["reasoning_gym"]
    """The kind of reward."""
    extract: Extract = "full"
    """Which part of the response is handed to the verifier, which wants the bare answer."""
    partial_credit: bool = True
    """Keep scores between 0 and 1, which some verifiers give for wrong answers; false = only 1 stays, the rest is 0."""


class FunctionReward(RewardBase):
    """A function of yours."""

    type: Literal["function"]
    """The kind of reward."""
    path: FunctionPath
    """"package.module:name" or "file.py:name"."""
    signature: Literal["trl", "verl"] = "trl"
    """"trl": fn(prompts, completions, **columns) -> list of float or None; "verl": fn(data_source, solution_str,
    ground_truth, extra_info) -> float or dict with "score"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments for the function."""

    @field_validator("path")
    @classmethod
    def _path_names_a_function(cls, path: str) -> str:
        module, separator, name = path.rpartition(":")
        if not (separator and module and name.isidentifier()):
            raise ValueError('needs "package.module:name" or "file.py:name", the name of a function last')
        return path


RewardFunction = Annotated[
    ExactReward
    | NumericReward
    | MathReward
    | MultipleChoiceReward
    | RegexReward
    | FormatReward
    | ReasoningGymReward
    | FunctionReward,
    Field(discriminator="type"),
]


class RewardsConfig(Section):
    """How responses are judged."""

    functions: list[RewardFunction] = Field(default_factory=list)
    """The reward functions; the reward is the weighted sum of their scores."""
    workers: int = Field(default=1, ge=1)
    """Processes that judge."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time one function may take for one response, in seconds; then the verdict is "timed out"."""
    max_pending: int | None = Field(default=None, ge=1)
    """Most responses that wait for a process; null = 64 for each process."""

    @model_validator(mode="after")
    def _names_differ(self) -> RewardsConfig:
        names = [function.name or function.type for function in self.functions]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} functions are called '{name}'; give each another `name`")
        return self
