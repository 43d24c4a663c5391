"""Which weights are split over the tensor-parallel ranks, where Megatron-Core's initialization does not say it.

Megatron-Core marks a weight as split while it fills it with random numbers. A model that is built without that (its
weights are loaded) has no marks, and the optimizer then takes every weight for a copy of the first rank's: the norm of
the gradient, and with it the clipping, would miss what the other ranks hold.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

_SPLIT_DIMS = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


def mark_split_weights(model: nn.Module) -> None:
    """Marks the weights as Megatron-Core's initialization would; to be called before the optimizer is built."""
    for module in model.modules():
        dim = next((dim for kind, dim in _SPLIT_DIMS.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)
