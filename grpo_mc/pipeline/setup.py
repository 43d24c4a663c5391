"""Builds what a run needs from its configuration: mesh, tokenizer, model."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from grpo_mc.config import Config, ModelConfig, ParallelConfig, check_parallel
from grpo_mc.data.tokenizer import Tokenizer, check_fits, load_tokenizer
from grpo_mc.megatron.hf_checkpoint import locate_folder, open_checkpoint
from grpo_mc.megatron.hf_config import ModelArchitecture, model_shape, read_architecture
from grpo_mc.megatron.memory_check import check_memory
from grpo_mc.megatron.mesh import Mesh, build_mesh
from grpo_mc.megatron.model import PolicyConfig, PolicyModel, build_model, policy_config
from grpo_mc.megatron.split_weights import mark_split_weights
from grpo_mc.megatron.weights import load_weights
from grpo_mc.rollout.native import NativeEngine


@dataclass
class Runtime:
    """This rank's part of the run."""

    config: Config
    """Resolved, with the layout filled in."""
    mesh: Mesh
    architecture: ModelArchitecture
    tokenizer: Tokenizer
    model: PolicyModel

    def build_engine(self) -> NativeEngine:
        """The engine that samples from `model`."""
        return NativeEngine(
            self.model, self.mesh, self.tokenizer, seed=self.config.run.seed,
            max_batch_rows=self.config.rollout.max_batch_rows, kv_block_size=self.config.rollout.kv_block_size,
            batch_invariant=self.config.rollout.batch_invariant,
        )  # fmt: skip


def build_runtime(config: Config, *, trains: bool = False) -> Runtime:
    """Everything but data and rewards; checks layout and memory against the model before any process group exists.

    Args:
        config: Resolved.
        trains: Whether gradients and optimizer state will be needed too.

    Raises:
        ValueError: Weights, tokenizer or layout that do not fit, or a model that does not fit into memory.
    """
    architecture = read_architecture(locate_folder(config.model.path, config.model.cache_dir))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = check_parallel(config.parallel, model_shape(architecture), world_size)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.cache_dir)
    check_fits(tokenizer, architecture.vocab_size)
    check_memory(config.model_copy(update={"parallel": parallel}), architecture, trains=trains)
    mesh = build_mesh(
        tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp if architecture.num_experts else None,
        cp=parallel.cp, dp=parallel.dp, timeout_s=parallel.timeout_s, seed=config.run.seed,
    )  # fmt: skip
    config = config.model_copy(update={"parallel": parallel})
    model = load_model(config.model, architecture, mesh, parallel)
    return Runtime(config, mesh, architecture, tokenizer, model)


def _settings(
    config: ModelConfig, architecture: ModelArchitecture, mesh: Mesh, parallel: ParallelConfig
) -> PolicyConfig:
    return policy_config(
        architecture, mesh, dtype=config.dtype, fp8=config.fp8, recompute=config.recompute, logprobs=config.logprobs,
        sequence_parallel=parallel.sequence_parallel, moe_dispatcher=parallel.moe_dispatcher,
    )  # fmt: skip


def load_model(
    config: ModelConfig, architecture: ModelArchitecture, mesh: Mesh, parallel: ParallelConfig
) -> PolicyModel:
    """This rank's stage of the model with its starting weights."""
    settings = _settings(config, architecture, mesh, parallel)
    settings.perform_initialization = config.init == "random"
    settings.init_method_std = architecture.initializer_range
    model = build_model(architecture, mesh, settings)
    mark_split_weights(model)
    if config.init == "pretrained":
        load_weights(model, open_checkpoint(config.path, config.cache_dir), mesh)
    return model


def build_reference(config: Config, runtime: Runtime) -> PolicyModel:
    """A second, frozen copy of the policy's current weights."""
    parallel = runtime.config.parallel
    assert parallel.sequence_parallel is not None
    settings = _settings(config.model, runtime.architecture, runtime.mesh, parallel)
    settings.perform_initialization = False
    reference = build_model(runtime.architecture, runtime.mesh, settings)
    with torch.no_grad():
        for ours, theirs in zip(reference.parameters(), runtime.model.parameters(), strict=True):
            ours.copy_(theirs)
    return reference.requires_grad_(False)
