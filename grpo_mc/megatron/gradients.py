"""Gradients of a sharded model as whole tensors, under the names of the weights they belong to.

Under the distributed optimizer the gradient reduction is a reduce-scatter: afterwards each data-parallel rank's buffer
holds the sum in its own shard of every bucket and unfinished values elsewhere. `gather_shards` fills in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.megatron.weights import export_tensors


@torch.no_grad()
def gather_shards(ddp: DistributedDataParallel) -> None:
    """Makes every parameter's main_grad whole on every data-parallel rank; call it after the gradient reduction.

    The optimizer reads its own shard only, so a step afterwards is the same.
    """
    for bucket_group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group
        if group.size() == 1:
            continue
        for bucket in bucket_group.buckets:
            shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def export_gradients(model: PolicyModel, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """The gradients as Hugging Face tensors, float32, on rank 0; all ranks iterate together to the end.

    Those of a stacked or interleaved parameter come apart as its weights do. Call gather_shards first.
    """
    return export_tensors(model, mesh, _gradient)


@torch.no_grad()
def replica_difference(model: PolicyModel, mesh: Mesh) -> tuple[str, float]:
    """How far the tensor-parallel ranks' gradients of replicated parameters (norms, routers, biases) are apart.

    Returns:
        The parameter that differs most, and ||difference|| / ||gradient|| of it, on every rank of the tensor-parallel
        group; ("", 0.0) without replicas.
    """
    worst = ("", 0.0)
    if mesh.tp == 1:
        return worst
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) or not getattr(parameter, "allreduce", True):
            continue
        mine = _gradient(parameter).double()
        mean = mine.clone()
        dist.all_reduce(mean, group=mesh.tp_group)
        mean /= mesh.tp
        sizes = torch.stack([(mine - mean).norm(), mean.norm()])
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=mesh.tp_group)
        apart = float(sizes[0] / sizes[1]) if sizes[0] > 0 else 0.0
        if apart > worst[1]:
            worst = (name, apart)
    return worst


def _gradient(parameter: Tensor) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # set by Megatron-Core
    return gradient
