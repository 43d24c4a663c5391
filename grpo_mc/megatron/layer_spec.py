"""Our Megatron-Core layer spec: the norm, the core attention, and which of Megatron-Core's modules go around them.

ModuleSpec is Megatron-Core's own extension point. The linear layers, the MLP, the MoE layer and the transformer layer
are Megatron-Core's; the norm (which allows sequence parallelism, where the stock one refuses) and the core attention
(which asks the micro-batch's layout, see layout.py) are ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from grpo_mc.megatron.fp8_experts import TileScaledExperts
from grpo_mc.megatron.fp8_linear import TileScaledColumnParallelLinear, TileScaledRowParallelLinear
from grpo_mc.megatron.layout import AttentionLayout, rope_inverse_frequencies, rotate
from grpo_mc.ops import rms_norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dim: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    Its weight is marked for Megatron-Core's sequence-parallel gradient all-reduce.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        decodes = torch.is_inference_mode_enabled() and x.device.type == "cpu"
        if decodes and x.dtype == self.weight.dtype == torch.float32:
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayoutAttention(torch.nn.Module):
    """Core attention that leaves the structure of the batch to its layout (`packed_seq_params`)."""

    inverse_frequencies: Tensor
    """[D / 2] float32."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__()
        head_dim = config.kv_channels
        assert head_dim is not None
        self.layer_number = layer_number
        self.scale = softmax_scale if softmax_scale is not None else head_dim**-0.5
        theta, scaling = config.rope_theta, config.rope_scaling  # type: ignore[attr-defined]
        frequencies = rope_inverse_frequencies(head_dim, theta, scaling)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: AttentionLayout,
        **unused: Any,
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]."""
        cos, sin = packed_seq_params.cos_sin(self.inverse_frequencies, query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = packed_seq_params.attend(self.layer_number, query, key, value, self.scale)
        return out.reshape(out.shape[0], -1)


def _mlp_spec(num_experts: int | None, tile_scaled: bool, linear: MLPSubmodules) -> ModuleSpec:
    if not num_experts:
        return ModuleSpec(module=MLP, submodules=linear)
    experts = ModuleSpec(module=TileScaledExperts if tile_scaled else SequentialMLP, submodules=linear)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))


def layer_spec(*, num_experts: int | None, qk_norm: bool, tile_scaled: bool = False) -> ModuleSpec:
    """The spec of one transformer layer.

    Args:
        num_experts: Experts of the MoE layer; None or 0 = a dense MLP.
        qk_norm: Whether queries and keys pass through an RMSNorm per head (Qwen3).
        tile_scaled: Whether the linear layers and experts multiply in FP8 (fp8_linear).
    """
    column = TileScaledColumnParallelLinear if tile_scaled else ColumnParallelLinear
    row = TileScaledRowParallelLinear if tile_scaled else RowParallelLinear
    norm = RMSNorm if qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=LayoutAttention,
        linear_proj=row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp_spec(num_experts, tile_scaled, MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    *, num_layers: int, num_experts: int | None, qk_norm: bool, tile_scaled: bool = False
) -> TransformerBlockSubmodules:
    """The spec of a pipeline stage: `num_layers` layers and the final norm."""
    layer = layer_spec(num_experts=num_experts, qk_norm=qk_norm, tile_scaled=tile_scaled)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
