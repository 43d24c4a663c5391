"""Weights in and out of a sharded model: Hugging Face tensors -> this rank's parameters, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.hf_checkpoint import Checkpoint
from grpo_mc.megatron.hf_mapping import TensorSource, hf_tensors, megatron_parameter
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import PolicyModel

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def global_name(name: str, layer_offset: int) -> str:
    """A parameter's name with the layer's number in the whole model instead of in its pipeline stage."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + layer_offset}.", name)


def _layer_offset(model: PolicyModel, mesh: Mesh) -> int:
    return model.config.num_layers // mesh.pp * mesh.pp_rank


def _expert_offset(model: PolicyModel, mesh: Mesh) -> int:
    return (model.config.num_moe_experts or 0) // mesh.ep * mesh.ep_rank


def _is_expert(name: str) -> bool:
    return ".experts." in name


class _FiniteSource:
    """A TensorSource that refuses tensors with NaN or infinity."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = self.source.tensor(name, rows)
        # The sum is one cheap pass; finite numbers can overflow it, so only it being finite settles the matter.
        if torch.isfinite(tensor.sum(dtype=torch.float32)):
            return tensor
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            file = f"{self.source.path(name)}: " if isinstance(self.source, Checkpoint) else ""
            raise ValueError(
                f"load weights: {file}tensor '{name}' has {bad} numbers that are NaN or infinite among the"
                f" {tensor.numel()} read; copy or download the weights again, or set model.path to others"
            )
        return tensor


@torch.no_grad()
def load_weights(model: PolicyModel, source: TensorSource, mesh: Mesh) -> None:
    """Fills this rank's parameters, one at a time, from Hugging Face tensors.

    Args:
        source: Gives tensors, or rows of them, by Hugging Face name; read through on every rank.

    Raises:
        ValueError: A tensor is missing, has another shape than the architecture says, or holds NaN or infinity.
    """
    source = _FiniteSource(source)
    for name, parameter in model.named_parameters():
        expert = _is_expert(name)
        tensor = megatron_parameter(
            global_name(name, _layer_offset(model, mesh)),
            source,
            model.architecture,
            tp_rank=mesh.etp_rank if expert else mesh.tp_rank,
            tp_size=mesh.etp if expert else mesh.tp,
            expert_offset=_expert_offset(model, mesh),
            padded_vocab=model.vocab_size,
        )
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"load weights: {name} is {list(parameter.shape)} on this rank but the checkpoint gives"
                f" {list(tensor.shape)}; the checkpoint's config.json does not describe its weights"
            )
        parameter.copy_(tensor)


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    size = dist.get_world_size(group)
    if size == 1:
        return [tensor]
    shards = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(size)]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return shards


def export_weights(model: PolicyModel, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """The whole model as Hugging Face tensors, on rank 0; the other ranks take part and get nothing.

    All ranks iterate together to the end. One tensor (one expert set, with expert parallelism) is in memory at a time.
    """
    return export_tensors(model, mesh, lambda parameter: parameter.detach())


@torch.no_grad()
def export_tensors(
    model: PolicyModel, mesh: Mesh, value_of: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """As export_weights, of any tensor that a parameter has: its gradient, its optimizer state.

    Args:
        value_of: Gives this rank's tensor for a parameter, of the parameter's shape.
    """
    from megatron.core import parallel_state

    pp_ranks = dist.get_process_group_ranks(mesh.pp_group)
    parameters = dict(model.named_parameters())
    for stage in range(mesh.pp):
        is_ours = mesh.pp_rank == stage
        for name in _from_stage(list(parameters) if is_ours else [], stage, pp_ranks, mesh):
            tensors: dict[str, Tensor] = {}
            if is_ours:
                group = parallel_state.get_expert_tensor_parallel_group() if _is_expert(name) else mesh.tp_group
                tensors = hf_tensors(
                    global_name(name, _layer_offset(model, mesh)),
                    _gather(value_of(parameters[name]), group),
                    model.architecture,
                    expert_offset=_expert_offset(model, mesh),
                )
            yield from _to_rank_zero(tensors, stage, mesh, is_expert=_is_expert(name))


def _from_stage(names: list[str], stage: int, pp_ranks: list[int], mesh: Mesh) -> list[str]:
    if mesh.pp == 1:
        return names
    box = [names]
    dist.broadcast_object_list(box, pp_ranks[stage], group=mesh.pp_group)
    return box[0]


def _to_rank_zero(
    tensors: dict[str, Tensor], stage: int, mesh: Mesh, *, is_expert: bool
) -> Iterator[tuple[str, Tensor]]:
    """Sends a parameter's tensors to rank 0, from its pipeline group, and for experts from its expert group too."""
    if is_expert and mesh.ep > 1 and mesh.pp_rank == stage:
        tensors = _join_experts(tensors, mesh)
    if mesh.pp > 1 and stage != 0:
        pp_ranks = dist.get_process_group_ranks(mesh.pp_group)
        if mesh.pp_rank == stage:
            _send(tensors, pp_ranks[0], mesh)
        elif mesh.pp_rank == 0:
            tensors = _receive(pp_ranks[stage], mesh)
    if mesh.rank == 0:
        yield from tensors.items()


# Only names and shapes travel as objects: a pickled view would carry the whole buffer that it is a view of.


def _join_experts(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of all expert-parallel ranks, which hold as many each, of the same shapes."""
    names: list[list[str]] = [[]] * mesh.ep
    dist.all_gather_object(names, list(tensors), group=mesh.ep_group)
    gathered = [_gather(tensor, mesh.ep_group) for tensor in tensors.values()]
    return {name: gathered[at][rank] for rank, owned in enumerate(names) for at, name in enumerate(owned)}


def _send(tensors: dict[str, Tensor], rank: int, mesh: Mesh) -> None:
    headers = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    dist.send_object_list([headers], rank, group=mesh.pp_group)
    for tensor in tensors.values():
        dist.send(tensor.contiguous(), rank, group=mesh.pp_group)


def _receive(rank: int, mesh: Mesh) -> dict[str, Tensor]:
    box: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    dist.recv_object_list(box, rank, group=mesh.pp_group)
    tensors = {name: torch.empty(shape, dtype=dtype, device=mesh.device) for name, shape, dtype in box[0]}
    for tensor in tensors.values():
        dist.recv(tensor, rank, group=mesh.pp_group)
    return tensors
