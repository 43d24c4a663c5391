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

from grpo_mc.megatron.offload import ChunkedAdam, in_host_memory
from grpo_mc.ops import AdamState, adam_state, adam_step
from grpo_mc.ops.adam import BLOCK

STATE_BITS = {"fp32": 32, "int8": 8, "int4": 4}
"""By optimizer.states of the configuration."""


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    The groups hold lr, betas, eps, weight_decay, and `step`: how often they were stepped. A step is a pure function of
    parameters, gradients, states and that count, random rounding included, so that a resumed run goes on bit for bit.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, bits: int = 32, seed: int = 0,
        copies: dict[Tensor, Tensor] | None = None, chunked: ChunkedAdam | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            groups: torch's parameter groups; parameters are float32 and contiguous.
            bits: Of a moment: 32, 8 or 4.
            seed: Of random rounding. Where several ranks step copies of a parameter it must be the same on them.
            copies: bfloat16 tensors that follow their parameter.
            chunked: Keeps the states in host memory, and parameters that are sent there; None = all on the device.
        """
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # not by way of torch, which refuses views: the shards of a flat buffer
        self.bits, self.seed = bits, seed
        self.clip_coef = 1.0
        """What the next step's gradients are multiplied with; set before each step."""
        self.copies: dict[Tensor, Tensor] = copies if copies is not None else {}
        self.chunked = chunked

    def send_to_host(self, parameter: Tensor) -> None:
        """Keeps a parameter in host memory, as "param" of its state; what it was is left without memory of its own.

        Only for main weights that nothing but this optimizer and checkpoints read.
        """
        assert self.chunked is not None and parameter in self.copies
        self.state[parameter]["param"] = in_host_memory(parameter, self.chunked.device)
        # Megatron-Core still hangs gradients onto it: shape, dtype and device stay.
        parameter.data = torch.zeros((), device=parameter.device).expand(parameter.shape)

    def ensure_state(self, parameter: Tensor) -> AdamState:
        """The state of a parameter; zeros before its first step."""
        state: dict[str, Tensor] = self.state[parameter]
        if "exp_avg" not in state:
            fresh = adam_state(parameter, bits=self.bits)
            for name, tensor in fresh._asdict().items():
                if tensor is not None:
                    state[name] = tensor if self.chunked is None else in_host_memory(tensor, self.chunked.device)
        return AdamState(**{name: state[name] for name in AdamState._fields if name in state})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; gradients stay as they are."""
        assert closure is None, "FusedAdam evaluates no closures"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, parameter, offset in self._in_order():
            if parameter.grad is None:
                continue
            numbers = {name: group[name] for name in ("lr", "step", "betas", "eps", "weight_decay")}
            numbers |= {"clip_coef": self.clip_coef, "seed": self.seed, "offset": offset}
            state, out = self.ensure_state(parameter), self.copies.get(parameter)
            if self.chunked is None:
                adam_step(parameter.detach(), parameter.grad, state, out_bf16=out, **numbers)
            else:
                host = self.state[parameter].get("param")
                params = parameter.detach() if host is None else host
                self.chunked.step(params, parameter.grad, state, out, with_params=host is not None, **numbers)

    def _in_order(self) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
        """(group, parameter, index of its first random number): every parameter has numbers of its own."""
        offset = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, offset
                offset += -(-parameter.numel() // BLOCK) * BLOCK


def use_fused_adam(outer: DistributedOptimizer, *, bits: int, seed: int, chunked: ChunkedAdam | None = None) -> None:
    """Puts a FusedAdam in the place of torch's optimizer, over the same groups; before the first step.

    With `chunked` its states, and main weights where the model has others (bf16), lie in host memory.

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
    adam = FusedAdam(outer.optimizer.param_groups, bits=bits, seed=seed, copies=copies, chunked=chunked)
    for main in copies if chunked is not None else ():
        adam.send_to_host(main)
    outer.optimizer = adam
    outer._copy_main_params_to_model_params = lambda: None


def _in_buffer(outer: DistributedOptimizer, model: Tensor) -> Tensor:
    """This rank's part of a parameter, in the buffer that is gathered after a step."""
    where = outer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    buffer, _, bucket = outer.model_param_gbuf_map[model]
    whole: Tensor = outer.buffers[buffer].buckets[bucket].param_data
    return whole.view(-1)[where.start : where.end]
