"""Section `data`: where prompts come from and how many are drawn for a training batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_mc.config.base import InputPath, Section


class SourceBase(Section):
    """What all prompt sources share."""

    template: str | None = None
    """Python format string over the record's fields that makes the raw prompt text, e.g. "{question}\\nAnswer:";
    null = the record's prompt as it is."""
    chat: bool | None = None
    """Apply the tokenizer's chat template; null = yes when the prompt is a list of messages or template is null."""
    system_prompt: str | None = None
    """A system message put before the prompt; needs the chat template."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many records; null = all."""


class ReasoningGymSource(SourceBase):
    """Problems from a reasoning-gym generator."""

    kind: Literal["reasoning_gym"]
    """The kind of source."""
    task: str = Field(min_length=1)
    """The generator's name, e.g. "chain_sum"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The generator's own options, e.g. {min_terms: 2, max_terms: 2}."""
    size: int = Field(default=1000, ge=1)
    """Number of problems."""
    seed: int = Field(default=0, ge=0)
    """Problem i is generated from seed + i, so sources that must not meet need seeds further apart than size."""


class JsonlSource(SourceBase):
    """Records from a JSON Lines file: `prompt` and further columns, or verl's columns."""

    kind: Literal["jsonl"]
    """The kind of source."""
    path: InputPath = Field(min_length=1)
    """The .jsonl file."""


class ParquetSource(SourceBase):
    """Records from a Parquet file: `prompt` and further columns, or verl's columns."""

    kind: Literal["parquet"]
    """The kind of source."""
    path: InputPath = Field(min_length=1)
    """The .parquet file."""


class HfSource(SourceBase):
    """Records from a Hugging Face dataset that was saved to disk."""

    kind: Literal["hf"]
    """The kind of source."""
    path: InputPath = Field(min_length=1)
    """The folder that `Dataset.save_to_disk` wrote."""


Source = Annotated[ReasoningGymSource | JsonlSource | ParquetSource | HfSource, Field(discriminator="kind")]


class DataConfig(Section):
    """Which prompts are trained on."""

    train: Source | None = None
    """The training prompts; may be null only where nothing is sampled for training."""
    exclude: list[InputPath] = Field(default_factory=list)
    """JSON Lines files with held-out problems: training never draws a problem whose prompt is in one of them."""
    shuffle: bool = True
    """Draw in an order shuffled by run.seed, another one each epoch; false = in the source's order."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are left out and counted, in tokens."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompt draws in a training batch, over all ranks; each becomes a group of rollout.group_size rollouts."""
