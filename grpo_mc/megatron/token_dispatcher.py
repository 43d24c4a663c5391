"""Our dispatch and combine as a Megatron-Core token dispatcher, for every MoE layer of a model.

Against Megatron-Core's all-to-all dispatcher a token travels once a rank and not once an expert, its weights travel
with it and not in a message of their own, the way back carries one row a rank, and the rows can travel as FP8. The
router stays Megatron-Core's, with everything that it offers (softmax or sigmoid, groups, the auxiliary-loss-free bias).

    model = GPTModel(...)                        # any model, any layer spec
    use_dedupe_dispatcher(model, payload="fp8")

Expert tensor parallelism is part of the transport: a token goes to each rank that holds a part of its expert, and the
parts' sums come back as rows of their own, so no gather and no scatter over the tensor-parallel ranks is needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from grpo_mc.megatron.moe_dispatch import DispatchHandle, ReceivedTokens, expand, reduce_rows, return_rows, send_tokens

_REFUSED = {
    "moe_shared_expert_overlap": "shared experts are not overlapped with it",
    "moe_pad_expert_input_to_capacity": "its rows have no fixed number",
    "moe_permute_fusion": "it has operators of its own",
}
"""Options of TransformerConfig that only Megatron-Core's dispatchers know."""


class DedupeTokenDispatcher(MoETokenDispatcher):
    """A token travels once to each rank that holds one of its experts; see moe_dispatch.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: As Megatron-Core gives its dispatchers; of the
            process groups ep, expt_tp and tp_ep are used.
        payload: As in moe_dispatch.dispatch.

    Raises:
        ValueError: config asks for something that only Megatron-Core's dispatchers do; it names the option.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        payload: str | None = None,
    ) -> None:
        for option, reason in _REFUSED.items():
            if getattr(config, option):
                raise ValueError(
                    f"dedupe dispatcher: {option} is set, but {reason}; unset it or use Megatron-Core's dispatcher"
                )
        super().__init__(config=config, pg_collection=pg_collection)
        assert local_expert_indices[0] == self.ep_group.rank() * num_local_experts
        self.num_local_experts = num_local_experts
        self.payload = payload
        # Expert tensor parallelism is the fast axis of tp_ep, as dispatch wants it.
        self.align = get_align_size_for_quantization(config) if config.moe_router_padding_for_quantization else 1
        self._hidden_shape: torch.Size
        self._expert_ids: Tensor
        self._received: ReceivedTokens
        self._handle: DispatchHandle

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [..., H], routing_map [T, E] bool, probs [T, E] -> ([T, H], [T, K]); experts in rising order."""
        self._hidden_shape = tokens.shape
        num_experts = routing_map.shape[1]
        experts = torch.arange(num_experts, device=routing_map.device)
        marked = torch.where(routing_map, experts, num_experts)  # what is not chosen sorts last
        chosen = marked.topk(self.config.moe_router_topk, dim=1, largest=False, sorted=True).values
        is_none = chosen == num_experts
        weights = probs.gather(1, chosen.masked_fill(is_none, 0)).masked_fill(is_none, 0.0)
        self._expert_ids = chosen.masked_fill(is_none, -1)
        return tokens.reshape(-1, tokens.shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H], [T, K] -> [N, H], [N, K]: the tokens that this rank's experts see, once each."""
        num_experts = self.num_local_experts * self.ep_size
        weights = probs.to(torch.float64 if hidden_states.dtype == torch.float64 else torch.float32)
        self._received = send_tokens(
            hidden_states, self._expert_ids, weights, self.tp_ep_group, num_experts,
            payload=self.payload, etp=self.tp_size,
        )  # fmt: skip
        return self._received.x, self._received.probs.to(probs.dtype)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H], [N, K] -> (rows [R, H], rows of each local expert on the host, row_probs [R])."""
        received = dataclasses.replace(self._received, x=hidden_states, probs=probs)
        rows, row_probs, offsets, self._handle = expand(received, self.num_local_experts, align=self.align)
        return rows, offsets.diff().cpu(), row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """[R, H] -> [N, H]; the experts have applied the weights."""
        return reduce_rows(hidden_states, self._handle, weighted=False)

    def token_combine(self, hidden_states: Tensor, **unused: Any) -> Tensor:
        """[N, H] -> [T, H], summed over the ranks."""
        return return_rows(hidden_states, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> the shape of the layer's input."""
        return hidden_states.view(self._hidden_shape)


def use_dedupe_dispatcher(model: torch.nn.Module, *, payload: str | None = None) -> int:
    """Gives every MoE layer of a model (or of one pipeline stage of it) our dispatcher; call it once after building.

    Args:
        model: Any module with Megatron-Core's MoELayer inside; its process groups are kept.
        payload: As in moe_dispatch.dispatch.

    Returns:
        How many layers.

    Raises:
        ValueError: the model's config asks for something that only Megatron-Core's dispatchers do.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        theirs = layer.token_dispatcher
        assert theirs is not None
        groups = ProcessGroupCollection(ep=theirs.ep_group, expt_tp=theirs.tp_group, tp_ep=theirs.tp_ep_group)
        layer.token_dispatcher = DedupeTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, groups, payload=payload
        )
    return len(layers)
