"""The experts of a mixture-of-experts layer in FP8: all of them in one grouped product, in place of SequentialMLP.

Tiles, precision and what is saved are those of fp8_linear; the tiles along the tokens start again at each expert's
first row, so an expert may have any number of them, also none. Weights are held as SequentialMLP holds them, expert by
expert, and so are checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mc.megatron.fp8_linear import TOKEN_TILE, WEIGHT_TILE, finished_gradient, gradient_target, trained
from grpo_mc.ops import fp8_grouped_gemm, fp8_grouped_wgrad, quantize_fp8


class _GroupedProduct(torch.autograd.Function):
    """Rows offsets[e] to offsets[e + 1] of x [M, K] times weights[e] [N, K] transposed -> [M, N]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, offsets: Tensor, adds_to_main_grad: bool, *weights: Tensor
    ) -> Tensor:
        out = fp8_grouped_gemm(*quantize_fp8(x), *_quantize_weights(weights), offsets, out_dtype=x.dtype)
        saved = quantize_fp8(x, tile=TOKEN_TILE, offsets=offsets) if any(ctx.needs_input_grad[3:]) else ()
        ctx.save_for_backward(offsets, *saved, *weights)
        ctx.num_saved = len(saved)
        ctx.main_grads = [getattr(weight, "main_grad", None) if adds_to_main_grad else None for weight in weights]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        offsets, *rest = ctx.saved_tensors
        saved, weights = rest[: ctx.num_saved], rest[ctx.num_saved :]
        grad_x = None
        if ctx.needs_input_grad[0]:
            codes, scale = (part.transpose(1, 2) for part in _quantize_weights(weights))
            grad_x = fp8_grouped_gemm(*quantize_fp8(grad), codes, scale, offsets, out_dtype=grad.dtype)
        if not saved:
            return grad_x, None, None, *(None for _ in weights)
        totals = [gradient_target(*pair) for pair in zip(weights, ctx.main_grads, strict=True)]
        codes, scale = quantize_fp8(grad, tile=TOKEN_TILE, offsets=offsets)
        fp8_grouped_wgrad(codes, scale, saved[0], saved[1], offsets, accumulate_into=totals)
        finished = (finished_gradient(*each) for each in zip(weights, totals, ctx.main_grads, strict=True))
        return grad_x, None, None, *finished


def _quantize_weights(weights: Any) -> tuple[Tensor, Tensor]:
    """[E, N, K] codes and their scales."""
    codes, scales = zip(*(quantize_fp8(weight, tile=WEIGHT_TILE) for weight in weights), strict=True)
    return torch.stack(codes), torch.stack(scales)


class _Through(torch.nn.Module):
    """Stands where an MLP has a linear layer, and hands its input on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class TileScaledExperts(SequentialMLP):
    """Megatron-Core's SequentialMLP with both linear layers of all experts as grouped FP8 products.

    Raises:
        ValueError: Biases, or probabilities that multiply the input, which grouped products do not have.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        for name in ("add_bias_linear", "moe_apply_probs_on_input"):
            if getattr(config, name):
                raise ValueError(
                    f"TileScaledExperts: {name} is True, which experts in one grouped product do not have; "
                    "set it to False, or use SequentialMLP"
                )
        super().__init__(num_local_experts, config, submodules, pg_collection)
        # What Megatron-Core does between an expert's two products: activation, gate, probabilities.
        through = MLPSubmodules(linear_fc1=_Through, linear_fc2=_Through)
        self.between = MLP(
            self.config, through, is_expert=True, ffn_hidden_size=config.moe_ffn_hidden_size,
            tp_group=pg_collection.expt_tp,
        )  # fmt: skip

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [M, H] in the order of the experts, how many each has [E], their probabilities [M] -> ([M, H], None)."""
        counts = torch.as_tensor(tokens_per_expert, dtype=torch.int64, device=permuted_local_hidden_states.device)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        hidden = self._multiply("linear_fc1", permuted_local_hidden_states, offsets)
        hidden, _ = self.between(hidden, permuted_probs)
        return self._multiply("linear_fc2", hidden, offsets), None

    def _multiply(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        layers = [getattr(expert, name) for expert in self.local_experts]
        weights = [trained(layer.weight) for layer in layers]
        out: Tensor = _GroupedProduct.apply(x, offsets, layers[0].gradient_accumulation_fusion, *weights)
        return out
