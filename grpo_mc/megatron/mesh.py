"""The mesh: which rank holds what, and the process groups between the ranks.

A thin, explicit view of Megatron-Core's parallel state. The rest of the package takes a `Mesh` as an argument and never
asks Megatron-Core's globals. One process is a mesh too: the same groups, each of size one.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_mc.megatron import cpu_runtime
from grpo_mc.megatron.host_collectives import close_stages


@dataclass(frozen=True)
class Mesh:
    """Sizes, this rank's positions, and process groups.

    `model_group` spans tp, pp and cp: the ranks that together hold one copy of the model and work on the same rollouts.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    dp: int
    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int
    dp_rank: int
    device: torch.device
    tp_group: Any
    pp_group: Any
    dp_group: Any
    ep_group: Any
    model_group: Any
    model_leader: int
    """Global rank of the model group's first rank."""
    last_stage_leader: int
    """Global rank of the first rank of this model group's last pipeline stage."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp_rank == self.pp - 1

    @property
    def is_model_leader(self) -> bool:
        """Whether this rank speaks for its model group (scores its rollouts, say)."""
        return self.rank == self.model_leader

    def describe(self) -> str:
        """One line: the degrees and the device."""
        return (
            f"processes {self.world_size} = tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp}"
            f" (ep {self.ep}, etp {self.etp}) on {self.device.type}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def init_distributed(timeout_s: float) -> torch.device:
    """Start the default process group: NCCL where there is CUDA, gloo elsewhere.

    Without torchrun's environment variables the process is its own world of one.

    Args:
        timeout_s: Bound of every collective, in seconds.

    Returns:
        This rank's device.
    """
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return device


def build_mesh(
    *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1, dp: int | None = None,
    timeout_s: float = 600.0, seed: int = 0,
) -> Mesh:  # fmt: skip
    """Start torch.distributed and Megatron-Core's groups for the degrees given.

    Args:
        tp, pp, ep, cp: Degrees.
        etp: Tensor-parallel degree of the experts; None = tp for dense models' groups, 1 with ep > 1.
        dp: Data-parallel degree; None = world size / (tp * pp * cp).
        timeout_s: Bound of every collective, in seconds.
        seed: Seeds the initial weights of a randomly initialised model.

    Raises:
        ValueError: The world size is no multiple of tp * pp * cp, or dp does not match.
    """
    cpu_runtime.install()
    from megatron.core import parallel_state, tensor_parallel

    device = init_distributed(timeout_s)
    world = dist.get_world_size()
    if world % (tp * pp * cp):
        raise ValueError(
            f"parallel: {world} processes do not divide into tp {tp} x pp {pp} x cp {cp};"
            f" start a multiple of {tp * pp * cp} processes or lower a degree"
        )
    actual_dp = world // (tp * pp * cp)
    if dp is not None and dp != actual_dp:
        raise ValueError(
            f"parallel.dp is {dp} but {world} processes with tp {tp}, pp {pp}, cp {cp} give dp {actual_dp};"
            f" start {dp * tp * pp * cp} processes or leave parallel.dp out"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp if etp is not None else (tp if ep == 1 else 1),
            create_gloo_process_groups=True,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)
    model_group = parallel_state.get_model_parallel_group()
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    pp_ranks, tp_ranks = dist.get_process_group_ranks(pp_group), dist.get_process_group_ranks(tp_group)
    model_ranks = dist.get_process_group_ranks(model_group)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    last_stage_rank = pp_ranks[-1]
    # tp is the fastest axis, so a stage's tp ranks are consecutive.
    last_stage_leader = last_stage_rank - (dist.get_rank() - tp_ranks[0])
    return Mesh(
        tp=tp, pp=pp, ep=ep, cp=cp, dp=actual_dp, rank=dist.get_rank(), world_size=world, device=device,
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        tp_rank=tp_rank, pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(), tp_group=tp_group, pp_group=pp_group,
        dp_group=parallel_state.get_data_parallel_group(), ep_group=parallel_state.get_expert_model_parallel_group(),
        model_group=model_group, model_leader=min(model_ranks), last_stage_leader=last_stage_leader,
    )  # fmt: skip


def destroy_mesh() -> None:
    """End Megatron-Core's groups and the default process group, if they run."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    close_stages()
    if dist.is_initialized():
        dist.destroy_process_group()
