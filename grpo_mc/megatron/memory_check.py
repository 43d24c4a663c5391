"""Refuses a model that cannot fit, before it is built: the system ends a process that asks for more memory than there
is without a word, often minutes later.

Only what stays for the whole run is counted (weights, and for training gradients and optimizer state), against all the
memory there is, swap included. So what is refused could not have run; what is not refused may still run out.
"""

from __future__ import annotations

import os

import torch

from grpo_mc.config import Config
from grpo_mc.data.host_memory import total_memory
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.memory_estimate import MemoryEstimate, estimate_memory, run_layout


def check_memory(config: Config, architecture: ModelArchitecture, *, trains: bool) -> None:
    """Compares what stays for the whole run with the memory of this machine or, with CUDA, of this process's device.

    Args:
        config: Resolved, with the layout filled in.
        architecture: The model.
        trains: False counts the weights alone.

    Raises:
        ValueError: It cannot fit; names what is needed, what there is and what to change.
    """
    estimate = estimate_memory(architecture, run_layout(config))
    per_process = _lasting_bytes(estimate, trains=trains)
    total: int | None
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0"))
        total, processes = torch.cuda.get_device_properties(device).total_memory, 1
        place = f"CUDA device {device}"
    else:
        total, processes, place = total_memory(), _processes_of_a_stage(config), "this machine"
    if total is None or per_process * processes <= total:
        return
    kept = "weights, gradients and optimizer state" if trains else "weights"
    raise ValueError(
        f"memory: the {kept} need {per_process * processes / 1e9:,.1f} GB and {place} has "
        f"{total / 1e9:,.1f} GB (processes here: {processes}; model {config.model.path}, "
        f"model.dtype {config.model.dtype}); choose a smaller model, or split it over more "
        "machines or devices with parallel.tp and parallel.pp (--dry-run estimates it)"
    )


def _lasting_bytes(estimate: MemoryEstimate, *, trains: bool) -> int:
    if not trains:
        return estimate.parameters
    return estimate.parameters + estimate.gradients + estimate.optimizer + estimate.reference


def _processes_of_a_stage(config: Config) -> int:
    """Processes on this machine that are sure to need as much as the fullest: the stages of a pipeline differ."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // config.parallel.pp)
