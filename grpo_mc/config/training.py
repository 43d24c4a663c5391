"""Sections `optimizer`, `parallel` and `pipeline`: the optimizer, the layout over processes, the way the run works."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from grpo_mc.config.base import InputPath, Section


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, and its schedule."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate after warm-up."""
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all parameters; 0 = off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: constant, or falling to min_lr at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training batches over which the learning rate rises to lr, starting at lr / warmup_steps."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step of the linear and cosine schedules."""
    kind: Literal["adamw", "fused_adamw"] = "adamw"
    """"adamw" is torch's; "fused_adamw" clips, decays, updates and copies to bf16 in one pass, with states as below."""
    states: Literal["fp32", "int8", "int4"] = "fp32"
    """How fused_adamw keeps the two moments: 8, 2.1 or 1.1 bytes a parameter."""
    offload: bool = False
    """Keep fused_adamw's moments, and main weights under bf16, in the GPU's host; they are copied there and back."""

    @model_validator(mode="after")
    def _states_need_the_fused_step(self) -> OptimizerConfig:
        if self.states != "fp32" and self.kind != "fused_adamw":
            raise ValueError(f"states is '{self.states}' but kind is '{self.kind}'; set kind: fused_adamw")
        if self.offload and self.kind != "fused_adamw":
            raise ValueError(f"offload is true but kind is '{self.kind}'; set kind: fused_adamw")
        return self

    @model_validator(mode="after")
    def _ranges(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}; both must be at least 0 and below 1")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr is {self.min_lr} but lr is {self.lr}; lower min_lr or raise lr")
        return self


class ParallelConfig(Section):
    """The layout over processes. The global batch does not change with it."""

    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel size."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel size."""
    etp: int | None = Field(default=None, ge=1)
    """Tensor-parallel size inside an expert; null = tp, or 1 where experts are spread (ep > 1)."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel size; only 1 in this version."""
    dp: int | None = Field(default=None, ge=1)
    """Data-parallel size; null = world size / (tp * pp * cp). When given it must be that."""
    moe_dispatcher: Literal["dedupe", "dedupe_fp8", "megatron"] = "dedupe"
    """How tokens travel to their experts: "dedupe" sends a token once a rank, "dedupe_fp8" that as FP8 with a scale for
    each 128 numbers (half the bytes of bf16, and the rounding of FP8), "megatron" is Megatron-Core's all-to-all."""
    sequence_parallel: bool | None = None
    """Split the activations between tensor-parallel regions over tp; null = when the model has experts and tp > 1."""
    max_tokens_per_micro_batch: int = Field(default=1024, ge=1)
    """Most tokens in a micro-batch on one rank; one longer sequence still makes a micro-batch."""
    grad_compression: Literal["none", "int8", "int4"] = "none"
    """Bits of a gradient entry on its way between data-parallel ranks, with error feedback (about 2 more bytes of
    memory a parameter); for slow networks. With tp > 1 it needs sequence_parallel."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait in one collective, in seconds; then the run fails."""

    @model_validator(mode="after")
    def _context_parallel_is_one(self) -> ParallelConfig:
        if self.cp > 1:
            raise ValueError(f"cp is {self.cp}, but context parallelism is not in this version; set cp: 1")
        return self


class PipelineConfig(Section):
    """How the parts of a run work together."""

    placement: Literal["colocated"] = "colocated"
    """Sampling and training take turns in the same processes."""
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    """"rollout_only" samples and judges without training; "train_only" trains on the rollouts of `replay`."""
    replay: InputPath | None = None
    """The `rollouts` folder or file of a run, for train_only."""

    @model_validator(mode="after")
    def _replay_goes_with_train_only(self) -> PipelineConfig:
        if (self.mode == "train_only") != (self.replay is not None):
            raise ValueError(
                f"mode is '{self.mode}' and replay is {self.replay!r}; train_only needs replay and the others refuse it"
            )
        return self
