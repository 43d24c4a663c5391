"""One rank of one layout of `grpo-mc check parity`: losses and gradients of the problem, whole, on rank 0."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_mc.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from grpo_mc.data.packing import PackedBatch, pack
from grpo_mc.megatron.gradients import export_gradients, gather_shards, replica_difference
from grpo_mc.megatron.hf_checkpoint import open_checkpoint
from grpo_mc.megatron.hf_mapping import TensorSource
from grpo_mc.megatron.mesh import Mesh, build_mesh, destroy_mesh
from grpo_mc.megatron.micro_batch import make_micro_batch
from grpo_mc.megatron.model import build_model, policy_config
from grpo_mc.megatron.parity_layout import TINY_MIXTRAL, ParityLayout
from grpo_mc.megatron.parity_problem import OBJECTIVES, KeyedWeights, Problem
from grpo_mc.megatron.train_step import Policy
from grpo_mc.megatron.weights import load_weights

SCORES = "log-probs"
TEMPERATURE = 0.8
"""Of the policy; not 1, so that a layout that forgets it is seen."""


@dataclass
class Measurement:
    """What one layout gives."""

    losses: dict[str, float] = field(default_factory=dict)
    """By objective."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """By "objective: Hugging Face name"; float32, on rank 0 only. Also there: the norm that clipping goes by, as [1],
    under "objective: norm of all", and the log-probs of the scoring pass under SCORES."""
    replicas: tuple[str, float] = ("", 0.0)
    """The replicated parameter whose copies' gradients differ most over the tensor-parallel ranks, and by how much."""

    def write(self, path: Path) -> None:
        """Writes it as a safetensors file."""
        figures = json.dumps({"losses": self.losses, "replicas": self.replicas})
        save_file(self.gradients, path, metadata={"figures": figures})

    @classmethod
    def read(cls, path: Path) -> Measurement:
        """The inverse of write."""
        with safe_open(path, framework="pt") as file:
            figures = json.loads(file.metadata()["figures"])
            gradients = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return cls(figures["losses"], gradients, tuple(figures["replicas"]))


def measure_layout(
    layout: ParityLayout, model_path: str | None, rank: int, store: Path, reference: Path, timeout_s: float
) -> Measurement:
    """Runs this rank's part of a layout; all its ranks call it together.

    Args:
        model_path: As model.path in the configuration; None = the tiny Mixtral.
        store: A file that does not exist yet, through which the ranks find each other.
        reference: The file with the reference's measurement; not there yet when this is the reference.
        timeout_s: Bound of every collective.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=layout.processes,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel = layout.parallel
    mesh = build_mesh(
        tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp, dp=parallel.dp, timeout_s=timeout_s
    )
    policy, problem = _build(mesh, model_path, parallel)
    pad_multiple = mesh.tp if policy.model.config.sequence_parallel else 1
    plan = problem.plan(layout.micro_batches, mesh.dp)[mesh.dp_rank]
    packed = [pack(problem.groups, micro_batch, pad_multiple=pad_multiple) for micro_batch in plan]
    scores = _score(policy, problem, packed)
    problem.base_logprobs = problem.split(_read_scores(reference) if reference.exists() else scores)
    result = Measurement(gradients={SCORES: torch.from_numpy(scores)})
    for name, algorithm in OBJECTIVES.items():
        policy.algorithm = algorithm
        batches = [make_micro_batch(p, mesh.device, problem.loss_inputs(p, algorithm)) for p in packed]
        result.losses[name] = policy.backward(batches, problem.denominators(algorithm))["loss"]
        _collect_gradients(policy, name, result)
    found: list[tuple[str, float]] = [("", 0.0)] * layout.processes
    dist.all_gather_object(found, result.replicas)
    result.replicas = max(found, key=lambda replica: replica[1])
    destroy_mesh()
    return result


def _score(policy: Policy, problem: Problem, packed: list[PackedBatch]) -> np.ndarray:
    """The scoring pass: log-probs of the whole batch, joined, on every rank."""
    batches = [make_micro_batch(p, policy.mesh.device) for p in packed]
    rows: dict[tuple[int, int], np.ndarray] = {}
    for p, logprobs in zip(packed, policy.logprobs(batches), strict=True):
        rows |= dict(zip(p.rollout_order, p.per_rollout(logprobs), strict=True))
    parts = [rows] * policy.mesh.dp
    dist.all_gather_object(parts, rows, group=policy.mesh.dp_group)
    return problem.join({key: row for part in parts for key, row in part.items()})


def _read_scores(reference: Path) -> np.ndarray:
    with safe_open(reference, framework="numpy") as file:
        scores: np.ndarray = file.get_tensor(SCORES)
        return scores


def _collect_gradients(policy: Policy, objective: str, result: Measurement) -> None:
    model, mesh = policy.model, policy.mesh
    policy.optimizer.prepare_grads()
    norm = float(policy.optimizer.get_grad_norm())
    gather_shards(policy.ddp)
    result.replicas = max(result.replicas, replica_difference(model, mesh), key=lambda found: found[1])
    for name, gradient in export_gradients(model, mesh):
        result.gradients[f"{objective}: {name}"] = gradient.contiguous().clone()
    result.gradients[f"{objective}: norm of all"] = torch.tensor([norm])


def _build(mesh: Mesh, model_path: str | None, parallel: ParallelConfig) -> tuple[Policy, Problem]:
    architecture, source = TINY_MIXTRAL, KeyedWeights(TINY_MIXTRAL)
    weights: TensorSource = source
    if model_path is not None:
        weights = checkpoint = open_checkpoint(model_path)
        architecture = checkpoint.architecture
    config = policy_config(
        architecture, mesh, sequence_parallel=parallel.sequence_parallel, moe_dispatcher=parallel.moe_dispatcher
    )
    model = build_model(architecture, mesh, config)
    load_weights(model, weights, mesh)
    policy = Policy(model, mesh, algorithm=AlgorithmConfig(), optimizer=OptimizerConfig(), temperature=TEMPERATURE)
    return policy, Problem(architecture.vocab_size)
