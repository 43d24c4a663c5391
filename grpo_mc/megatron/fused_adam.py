"""adam_step as the optimizer inside Megatron-Core's distributed optimizer, with states of 32, 8 or 4 bits.

Megatron-Core keeps the parameter groups, the shards of the flat buffers and the gradients, and calls `step`. One
operator call a shard then does what takes several passes otherwise: the clipping, the decay, the update, and the
bfloat16 copy straight into the model's parameter buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from grpo_mc.ops import AdamState, adam_state, adam_step

STATE_BITS = {"fp32": 32, "int8": 8, "int4": 4}
"""By optimizer.states of the configuration."""

_BLOCK = 128


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    The groups hold lr, betas, eps, weight_decay, and `step`: how often they were stepped. A step is a pure function of
    parameters, gradients, states and that count, random rounding included, so that a resumed run goes on bit for bit.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, bits: int = 32, seed: int = 0, copies: dict[Tensor, Tensor] | None = None
    ) -> None:
        """
        Args:
            groups: torch's parameter groups; parameters are float32 and contiguous.
            bits: Of a moment: 32, 8 or 4.
            seed: Of random rounding. Where several ranks step copies of a parameter it must be the same on them.
            copies: bfloat16 tensors that follow their parameter.
        """
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # not by way of torch, which refuses views: the shards of a flat buffer
        self.bits, self.seed = bits, seed
        self.clip_coef = 1.0
        """What the next step's gradients are multiplied with; set before each step."""
        self.copies: dict[Tensor, Tensor] = copies if copies is not None else {}

    def ensure_state(self, parameter: Tensor) -> AdamState:
        """The state of a parameter; zeros before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            fresh = adam_state(parameter, bits=self.bits)
            state.update({name: tensor for name, tensor in fresh._asdict().items() if tensor is not None})
        return AdamState(**state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; gradients stay as they are."""
        assert closure is None, "FusedAdam evaluates no closures"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, parameter, offset in self._in_order():
            if parameter.grad is None:
                continue
            adam_step(
                parameter.detach(), parameter.grad, self.ensure_state(parameter),
                lr=group["lr"], step=group["step"], betas=group["betas"], eps=group["eps"],
                weight_decay=group["weight_decay"], clip_coef=self.clip_coef, out_bf16=self.copies.get(parameter),
                seed=self.seed, offset=offset,
            )  # fmt: skip

    def _in_order(self) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
        """(group, parameter, index of its first random number): every parameter has numbers of its own."""
        offset = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, offset
                offset += -(-parameter.numel() // _BLOCK) * _BLOCK


def use_fused_adam(outer: DistributedOptimizer, *, bits: int, seed: int) -> None:
    """Puts a FusedAdam in the place of torch's optimizer, over the same groups; before the first step.

    The distributed optimizer's copy of main weights into the model's buffer is switched off: the step writes there, and
    what has no main weights of its own lies there already.
    """
    if outer.optimizer is None:  # a rank without parameters of this kind
        return
    copies = {}
    pairs = (
        (outer.shard_fp32_from_float16_groups, outer.model_float16_groups),
        (outer.shard_fp32_groups, outer.model_fp32_groups),
    )
    for main_groups, model_groups in pairs:
        for main_group, model_group in zip(main_groups, model_groups, strict=True):
            for main, model in zip(main_group, model_group, strict=True):
                there = _in_buffer(outer, model)
                if main.data_ptr() != there.data_ptr():
                    assert there.dtype == torch.bfloat16 and there.numel() == main.numel(), (there.dtype, main.dtype)
                    copies[main] = there
    outer.optimizer = FusedAdam(outer.optimizer.param_groups, bits=bits, seed=seed, copies=copies)
    outer._copy_main_params_to_model_params = lambda: None


def _in_buffer(outer: DistributedOptimizer, model: Tensor) -> Tensor:
    """This rank's part of a parameter, in the buffer that is gathered after a step."""
    where = outer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    buffer, _, bucket = outer.model_param_gbuf_map[model]
    whole: Tensor = outer.buffers[buffer].buckets[bucket].param_data
    return whole.view(-1)[where.start : where.end]
