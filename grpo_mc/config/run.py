"""Sections `checkpoint`, `evaluation`, `monitor` and `run`: what a run keeps, measures, shows and is called."""

from __future__ import annotations

from pydantic import Field, field_validator

from grpo_mc.config.base import Section
from grpo_mc.config.data import Source


class CheckpointConfig(Section):
    """What is saved."""

    every: int = Field(default=0, ge=0)
    """Save after every so many steps; 0 = only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the checkpoint that did best in evaluation."""
    export_hf: bool = True
    """Write the final model as Hugging Face safetensors into the run directory."""


class EvaluationConfig(Section):
    """How the model is measured on held-out prompts."""

    source: Source | None = None
    """The held-out prompts; null = no evaluation."""
    every: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0 = before and after the run only."""
    num_samples: int = Field(default=1, ge=1)
    """Responses for each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 = the likeliest token."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest response, in tokens; null = rollout.max_new_tokens."""
    pass_k: list[int] = Field(default_factory=lambda: [1])
    """The k of the pass@k that are reported; none above num_samples."""

    @field_validator("pass_k")
    @classmethod
    def _pass_k_is_positive(cls, pass_k: list[int]) -> list[int]:
        if not pass_k or min(pass_k) < 1:
            raise ValueError(f"{pass_k} needs at least one number, each 1 or more")
        return sorted(set(pass_k))


class MonitorConfig(Section):
    """What is shown and written while the run goes on."""

    progress: bool = True
    """Show the live progress display."""
    tensorboard: bool = False
    """Write TensorBoard files into the run directory (needs the tensorboard package)."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the wandb package); null = off."""
    samples_per_step: int = Field(default=2, ge=0)
    """Responses a step that are kept for the report."""


class RunConfig(Section):
    """The run itself."""

    dir: str = Field(min_length=1)
    """The run directory; a relative one is taken from the working directory."""
    name: str = ""
    """The name in reports; empty = the run directory's name."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything random in the run."""
    steps: int = Field(ge=0)
    """Training batches; 0 = only evaluate."""
    resume: bool = False
    """Continue the run in `dir`. Set by the command line's --resume, not in a file."""
