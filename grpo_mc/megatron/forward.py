"""One forward pass through all pipeline stages, without gradients and without a schedule."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.layout import AttentionLayout
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import PolicyModel


def pipeline_forward(model: PolicyModel, mesh: Mesh, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
    """Runs a packed batch through this rank's stage, receiving from the stage before and sending to the one after.

    All ranks of a model group call it together, with the same tokens and layout.

    Args:
        tokens: [T] int64.

    Returns:
        On the last stage logits [S, padded vocabulary / tp] of the layout's scored rows; None elsewhere.
    """
    ranks = dist.get_process_group_ranks(mesh.pp_group)
    if not mesh.is_first_stage:
        rows = len(tokens) // mesh.tp if model.config.sequence_parallel else len(tokens)
        hidden = torch.empty(rows, 1, model.config.hidden_size, dtype=model.config.params_dtype, device=mesh.device)
        dist.recv(hidden, ranks[mesh.pp_rank - 1], group=mesh.pp_group)
        model.set_input_tensor(hidden)
    out: Tensor = model(tokens[None], None, None, packed_seq_params=layout)
    if mesh.is_last_stage:
        return out
    dist.send(out.contiguous(), ranks[mesh.pp_rank + 1], group=mesh.pp_group)
    return None


def gather_vocabulary(logits: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
    """Logits of this tensor-parallel rank [S, V / tp] -> of the whole vocabulary [S, V], without its padding."""
    if mesh.tp > 1:
        shards = [torch.empty_like(logits) for _ in range(mesh.tp)]
        dist.all_gather(shards, logits.contiguous(), group=mesh.tp_group)
        logits = torch.cat(shards, dim=-1)
    return logits[:, :vocab_size]
