"""The policy model: Megatron-Core's GPTModel with our layer spec, for the architectures of hf_config.

`PolicyModel` differs from GPTModel in one place: the output layer sees only the rows that a layout names
(`scored_rows`), so that logits exist where a response token is scored and nowhere else. A layout may also ask for
those rows themselves (`returns_hidden`), for log-probs that are streamed over the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from grpo_mc.megatron.fp8_linear import check_device
from grpo_mc.megatron.hf_config import ModelArchitecture
from grpo_mc.megatron.layer_spec import block_spec
from grpo_mc.megatron.layout import AttentionLayout
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.token_dispatcher import use_dedupe_dispatcher

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron-Core's configuration and what our core attention needs beside it."""

    rope_theta: float = 10000.0
    """Base of the RoPE frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """See layout.rope_inverse_frequencies."""
    moe_dispatcher: str = "dedupe"
    """See ParallelConfig.moe_dispatcher."""
    logprobs: str = "logits"
    """See ModelConfig.logprobs."""
    tile_scaled: bool = False
    """Whether the layers' products run in FP8; see fp8_linear."""


class PolicyModel(GPTModel):
    """One pipeline stage of the policy. The last stage returns logits of the layout's scored rows."""

    architecture: ModelArchitecture

    def _postprocess(  # type: ignore[override]
        self, hidden_states: Tensor, *args: Any, packed_seq_params: AttentionLayout, **kwargs: Any
    ) -> Tensor:
        """hidden_states [T, 1, H] -> itself; on the last stage logits [S, padded vocabulary / tp], or rows [S, H]."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        rows = packed_seq_params.scored_rows
        if rows is not None:
            hidden_states = hidden_states[rows]
        if packed_seq_params.returns_hidden:
            return hidden_states[:, 0]
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=weight)
        return logits[:, 0]

    @property
    def output_weight(self) -> Tensor:
        """The output layer's weight [padded vocabulary / tp, H] on the last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    @property
    def vocab_shard(self) -> tuple[int, int]:
        """First vocabulary entry of this tensor-parallel rank, and how many of its columns are real (not padding)."""
        per_rank = self.vocab_size // self.config.tensor_model_parallel_size
        start = per_rank * self.pg_collection.tp.rank()
        return start, max(0, min(per_rank, self.architecture.vocab_size - start))


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The vocabulary size rounded up so that tp divides it."""
    return math.ceil(vocab_size / tp) * tp


def policy_config(
    architecture: ModelArchitecture, mesh: Mesh, *, dtype: str = "fp32", fp8: str = "none", recompute: str = "none",
    sequence_parallel: bool | None = None, moe_dispatcher: str = "dedupe", logprobs: str = "logits",
) -> PolicyConfig:  # fmt: skip
    """Megatron-Core's configuration of an architecture on a mesh.

    Args:
        dtype: "fp32" or "bf16": parameters and activations.
        fp8: "none", or "tile_scaled": the layers' linear products run in FP8 (fp8_linear).
        recompute: "none", or "full": each layer's activations are computed again in the backward pass.
        sequence_parallel: None = where Megatron-Core needs it (mixture of experts with tp > 1).
        moe_dispatcher: "dedupe", "dedupe_fp8" or "megatron"; see ParallelConfig.moe_dispatcher.
        logprobs: "logits" or "streamed"; see ModelConfig.logprobs.
    """
    moe: dict[str, Any] = {}
    if architecture.num_experts:
        moe = dict(
            num_moe_experts=architecture.num_experts, moe_router_topk=architecture.experts_per_token,
            moe_router_load_balancing_type="none", moe_router_dtype="fp32", moe_router_score_function="softmax",
            moe_router_pre_softmax=False, moe_ffn_hidden_size=architecture.ffn_hidden_size,
            expert_model_parallel_size=mesh.ep, expert_tensor_parallel_size=mesh.etp,
        )  # fmt: skip
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    params_dtype = DTYPES[dtype]
    return PolicyConfig(
        num_layers=architecture.num_layers, hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads, num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim, ffn_hidden_size=architecture.ffn_hidden_size,
        tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp, context_parallel_size=mesh.cp,
        sequence_parallel=(mesh.tp > 1 and bool(moe)) if sequence_parallel is None else sequence_parallel,
        use_cpu_initialization=mesh.device.type == "cpu", params_dtype=params_dtype, pipeline_dtype=params_dtype,
        bf16=dtype == "bf16", add_bias_linear=False, add_qkv_bias=architecture.qkv_bias, gated_linear_unit=True,
        activation_func=F.silu, normalization="RMSNorm", layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.qk_norm, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", calculate_per_token_loss=True,
        rope_theta=architecture.rope_theta, rope_scaling=architecture.rope_scaling,
        moe_dispatcher=moe_dispatcher, logprobs=logprobs, tile_scaled=fp8 == "tile_scaled",
        **moe, **(full if recompute == "full" else {}),
    )  # fmt: skip


def build_model(architecture: ModelArchitecture, mesh: Mesh, config: PolicyConfig) -> PolicyModel:
    """This rank's stage of the model, with Megatron-Core's random initial weights.

    Raises:
        ValueError: pp does not divide the layers, or the device has no FP8 products and they are asked for.
    """
    if architecture.num_layers % mesh.pp:
        raise ValueError(
            f"parallel.pp is {mesh.pp} but the model has {architecture.num_layers} layers; pp must divide the layers"
        )
    if config.tile_scaled:
        check_device(mesh.device, has_experts=bool(architecture.num_experts))
    spec = block_spec(
        num_layers=architecture.num_layers // mesh.pp,
        num_experts=architecture.num_experts,
        qk_norm=architecture.qk_norm,
        tile_scaled=config.tile_scaled,
    )
    model = PolicyModel(
        config,
        spec,  # type: ignore[arg-type]  # GPTModel hands it to TransformerBlock, which takes block submodules too
        vocab_size=padded_vocab_size(architecture.vocab_size, mesh.tp),
        max_sequence_length=architecture.max_positions,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        position_embedding_type="none",
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
    )
    model.architecture = architecture
    if config.moe_dispatcher != "megatron":
        use_dedupe_dispatcher(model, payload="fp8" if config.moe_dispatcher == "dedupe_fp8" else None)
    if model.post_process:
        # _postprocess gathers the sequence itself, to select rows of it.
        model.output_layer.sequence_parallel = False
    return model.to(mesh.device)
