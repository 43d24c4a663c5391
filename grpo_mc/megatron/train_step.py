"""The policy on its mesh: scoring passes and optimizer steps, through Megatron-Core's own schedule.

`Policy` owns the model, its DDP wrapper and its optimizer. What it is handed are micro-batches that already carry
global denominators: the loss of a batch is the plain sum over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mc.algorithms.denominators import Denominators
from grpo_mc.algorithms.loss import grpo_loss
from grpo_mc.algorithms.metrics import add_sums
from grpo_mc.config import AlgorithmConfig, OptimizerConfig
from grpo_mc.megatron import grad_compression
from grpo_mc.megatron.logprobs import streamed_logprobs, vocab_parallel_logprobs
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.micro_batch import MicroBatch
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.megatron.optimizer import build_optimizer, optimizer_step, wrap_ddp


def score(model: PolicyModel, out: Tensor, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [S] of a micro-batch's scored tokens from this rank's logits, or from hidden states."""
    shard: dict[str, Any] = dict(
        vocab_start=model.vocab_shard[0], vocab_size=model.architecture.vocab_size, temperature=temperature,
        group=model.pg_collection.tp,
    )  # fmt: skip
    if model.config.logprobs == "streamed":
        return streamed_logprobs(out, model.output_weight, micro_batch.targets, **shard)
    return vocab_parallel_logprobs(out, micro_batch.targets, **shard)


def _run_schedule(
    model: Any, policy: PolicyModel, micro_batches: Sequence[MicroBatch],
    on_output: Callable[[Tensor, MicroBatch], Any], *, forward_only: bool,
) -> list[Any]:  # fmt: skip
    """Megatron-Core's schedule over the micro-batches; `on_output` runs on the last stage. Returns what it collects."""

    def forward_step(batches: Iterator[MicroBatch], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        batch.layout.returns_hidden = policy.config.logprobs == "streamed"
        out = stage(batch.tokens[None], None, None, packed_seq_params=batch.layout)
        return out, partial(_collect, batch)

    def _collect(batch: MicroBatch, out: Tensor, non_loss_data: bool = False) -> Any:
        return on_output(out, batch)

    longest = max(len(batch.tokens) for batch in micro_batches)
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=longest,  # only a hint: variable_seq_lengths sends each micro-batch's own
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return collected


@torch.no_grad()
def compute_logprobs(
    model: PolicyModel, mesh: Mesh, micro_batches: Sequence[MicroBatch], temperature: float
) -> list[np.ndarray]:
    """Scores the micro-batches without gradients.

    Returns:
        One float32 array [S] per micro-batch, on every rank of the model group.
    """
    was_training = model.training
    model.eval()
    scored: list[Tensor] = _run_schedule(
        model, model, micro_batches, lambda out, batch: score(model, out, batch, temperature)[0], forward_only=True
    )
    model.train(was_training)
    if mesh.pp > 1:
        if not mesh.is_last_stage:
            scored = [torch.empty(batch.packed.num_scored, device=mesh.device) for batch in micro_batches]
        last = dist.get_process_group_ranks(mesh.pp_group)[-1]
        for logprobs in scored:
            dist.broadcast(logprobs, last, group=mesh.pp_group)
    return [logprobs.cpu().numpy() for logprobs in scored]


class Policy:
    """The model that is trained, with its gradients and optimizer."""

    def __init__(
        self, model: PolicyModel, mesh: Mesh, *, algorithm: AlgorithmConfig, optimizer: OptimizerConfig,
        temperature: float, compression: str = "none",
    ) -> None:  # fmt: skip
        """
        Args:
            model: This rank's stage, weights loaded.
            temperature: The one that rollouts are sampled with; logits are divided by it here too.
            compression: Of gradients between data-parallel ranks: parallel.grad_compression.
        """
        self.model, self.mesh, self.algorithm, self.temperature = model, mesh, algorithm, temperature
        self.clip_grad = optimizer.clip_grad
        self.ddp = wrap_ddp(model)
        self.compression: grad_compression.GradCompression | None = None
        if compression != "none":
            self.compression = grad_compression.install(self.ddp, grad_compression.compressed(compression))
        self.optimizer = build_optimizer(self.ddp, optimizer)
        model.config.finalize_model_grads_func = _finalize
        model.config.grad_scale_func = self.optimizer.scale_loss

    def close(self) -> None:
        """Lets go of the model, its gradients and its process groups; the policy is of no use afterwards.

        DDP's hooks hold DDP by way of autograd nodes, which the garbage collector cannot look into. Without this a
        process that trains several times keeps every model and the threads of every process group.
        """
        vars(self.ddp).clear()
        del self.model, self.ddp, self.optimizer, self.compression

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Log-probs of the scored tokens under the current weights; see compute_logprobs."""
        return compute_logprobs(self.model, self.mesh, micro_batches, self.temperature)

    def backward(self, micro_batches: Sequence[MicroBatch], denominators: Denominators) -> dict[str, float]:
        """Forward and backward over the micro-batches; gradients are then summed over ranks and ready in the buffers.

        Args:
            micro_batches: This data-parallel rank's, with loss inputs; as many as on every other rank.
            denominators: Global counts of this optimizer step.

        Returns:
            Sums over all micro-batches and ranks by name: "loss", and the metrics of grpo_loss.
        """
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        collected: list[dict[str, float]] = _run_schedule(
            self.ddp, self.model, micro_batches, partial(self._loss, denominators), forward_only=False
        )
        return self._sum_over_ranks(add_sums(collected))

    def step(self, lr: float) -> tuple[bool, float]:
        """Updates the weights; see optimizer_step. A step that does not leaves no trace in the compression either."""
        changed, norm = optimizer_step(self.optimizer, lr=lr, clip_grad=self.clip_grad)
        if not changed and self.compression is not None:
            self.compression.undo()
        return changed, norm

    def _loss(self, denominators: Denominators, out: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        assert batch.loss is not None
        logprobs, entropy = score(self.model, out, batch, self.temperature)
        result = grpo_loss(logprobs, entropy, batch.loss, self.algorithm, denominators)
        # With calculate_per_token_loss Megatron-Core neither divides by micro-batches nor averages over ranks.
        no_tokens = torch.zeros((), dtype=torch.int, device=out.device)
        return result.loss, no_tokens, {"loss": result.loss.detach().clone(), **result.metrics}

    def _sum_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Adds over data-parallel ranks; every pipeline stage learns what the last one knows."""
        names: list[str] = sorted(sums)
        if self.mesh.pp > 1:
            box = [names]
            last = dist.get_process_group_ranks(self.mesh.pp_group)[-1]
            dist.broadcast_object_list(box, last, group=self.mesh.pp_group)
            names = box[0]
        values = torch.tensor([sums.get(name, 0.0) for name in names], dtype=torch.float64, device=self.mesh.device)
        if self.mesh.pp > 1:
            dist.all_reduce(values, group=self.mesh.pp_group)  # zeros on the other stages
        if self.mesh.dp > 1:
            dist.all_reduce(values, group=self.mesh.dp_group)
        return dict(zip(names, values.tolist(), strict=True))


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron-Core's gradient reduction, without its division by a token count: the loss is already divided."""
    finalize_model_grads(model, None, **kwargs)
