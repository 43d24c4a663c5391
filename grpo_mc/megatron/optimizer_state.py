"""Adam's state as a checkpoint needs it: present before the first step, and its step count as one number."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from grpo_mc.megatron.checkpoint_shards import MOMENTS, distributed_optimizers
from grpo_mc.megatron.fused_adam import STATE_BITS, FusedAdam

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel")


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Gives parameters that were never stepped the state that Adam would give them in their first step: zeros."""
    for outer in distributed_optimizers(optimizer):
        adam = outer.optimizer
        for group in adam.param_groups:
            for parameter in group["params"]:
                if isinstance(adam, FusedAdam):
                    adam.ensure_state(parameter)
                    continue
                state = adam.state[parameter]
                if state:
                    continue
                if isinstance(adam, torch.optim.Adam):
                    on_device = group["fused"] or group["capturable"]
                    device = parameter.device if on_device else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for name in MOMENTS:
                    state[name] = torch.zeros_like(parameter)


def host_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The step count and the learning rates of the parameter groups, as JSON values."""
    groups = [group for outer in distributed_optimizers(optimizer) for group in outer.optimizer.param_groups]
    return {
        "states": state_kind(optimizer),
        "step": _step_count(optimizer),
        "groups": [{name: group.get(name) for name in (*_GROUP_IDENTITY, "lr")} for group in groups],
    }


def state_kind(optimizer: MegatronOptimizer) -> str:
    """How the moments are kept: "fp32", "int8" or "int4"."""
    for outer in distributed_optimizers(optimizer):
        if isinstance(outer.optimizer, FusedAdam):
            return next(name for name, bits in STATE_BITS.items() if bits == outer.optimizer.bits)
    return "fp32"


def restore_host_state(optimizer: MegatronOptimizer, saved: dict[str, Any]) -> None:
    """Sets what host_state returned. Betas, epsilon and weight decay stay the configuration's."""
    lrs = {tuple(group[name] for name in _GROUP_IDENTITY): group["lr"] for group in saved["groups"]}
    for outer in distributed_optimizers(optimizer):
        adam = outer.optimizer
        for group in adam.param_groups:
            group["lr"] = lrs.get(tuple(group.get(name) for name in _GROUP_IDENTITY), group["lr"])
            if not isinstance(adam, torch.optim.Adam):  # FusedAdam, Transformer Engine's and Apex's count in the group
                group["step"] = saved["step"]
        for state in adam.state.values():
            if "step" in state:
                state["step"].fill_(saved["step"])


def _step_count(optimizer: MegatronOptimizer) -> int:
    counts = set()
    for outer in distributed_optimizers(optimizer):
        adam = outer.optimizer
        counts |= {int(state["step"]) for state in adam.state.values() if "step" in state}
        counts |= {int(group["step"]) for group in adam.param_groups if group["params"] and "step" in group}
    assert len(counts) <= 1, f"parameters have been stepped {sorted(counts)} times"
    return counts.pop() if counts else 0
