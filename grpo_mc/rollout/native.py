"""The native engine: batched decoding with a key-value cache through the training model itself.

Groups wait in a queue. A group joins when the batch has room for its rows and the cache for its blocks; its prompt is
prefilled once, its G first tokens are drawn from the one row of logits, and from then on each response is a row of the
decoding batch until it ends. Finished rows leave at once. Since training and sampling share one model there are no
weights to copy, and rollout log-probs differ from the trainer's by rounding only.

Every rank of a model group runs the same steps: logits are gathered, tokens are drawn on the last pipeline stage and
broadcast, and the random numbers are keyed (see random_numbers). With expert parallelism the ranks of an expert group
work on different rows and meet in every MoE layer, so a rank without work goes on with padding until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.data.packing import IntArray
from grpo_mc.data.tokenizer import Tokenizer
from grpo_mc.megatron.forward import gather_vocabulary, pipeline_forward
from grpo_mc.megatron.inference_linear import FEW_ROWS, inference_linears
from grpo_mc.megatron.layout import AttentionLayout
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.rollout.batch import Batch
from grpo_mc.rollout.engine import Request, Response
from grpo_mc.rollout.kv_cache import KVCache
from grpo_mc.rollout.layouts import RopeTable
from grpo_mc.rollout.random_numbers import uniforms
from grpo_mc.rollout.row_tiles import FixedRowTiles
from grpo_mc.rollout.sampling import SamplingParams, sample

__all__ = ["NativeEngine", "Request", "Response"]


class NativeEngine:
    """Samples from a PolicyModel on its mesh; a RolloutEngine."""

    def __init__(
        self, model: PolicyModel, mesh: Mesh, tokenizer: Tokenizer, *, seed: int, max_batch_rows: int = 256,
        kv_block_size: int = 16, max_prefill_tokens: int = 4096, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            seed: The run's seed, the key of all random numbers.
            max_batch_rows: Responses decoded together at most.
            kv_block_size: Tokens per cache block.
            max_prefill_tokens: Prompt tokens of one prefill at most; one longer prompt is prefilled alone.
            batch_invariant: The tokens and log-probs of a response are the same bit for bit whatever else is in the
                batch (see row_tiles).

        Raises:
            ValueError: A size below 1, or batch_invariant with tp above 2.
        """
        for name, value in (
            ("max_batch_rows", max_batch_rows),
            ("kv_block_size", kv_block_size),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"NativeEngine: {name} is {value}; it must be at least 1")
        if batch_invariant and mesh.tp > 2:
            raise ValueError(
                f"rollout.batch_invariant with parallel.tp {mesh.tp}: a sum over more than 2 ranks is taken in an order"
                " that depends on a row's place in the batch; lower parallel.tp or switch batch_invariant off"
            )
        self.model, self.mesh, self.tokenizer, self.seed = model, mesh, tokenizer, seed
        self.max_batch_rows, self.kv_block_size = max_batch_rows, kv_block_size
        self.max_prefill_tokens, self.batch_invariant = max_prefill_tokens, batch_invariant
        self.rope = RopeTable()
        self._layers = model.config.num_layers // mesh.pp

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], params: SamplingParams, on_ended: Callable[[int], None] | None = None
    ) -> list[Response]:
        """Samples every request to its end.

        Args:
            requests: Prompts; a request with more samples than max_batch_rows is prefilled more than once.
            on_ended: Called with the number of responses that have ended, each time it has grown (a progress display).

        Returns:
            All responses, in the order of the requests and their samples.

        Raises:
            ValueError: An empty prompt, one with a token that the model does not have, or one that leaves too few of
                the model's positions for max_new_tokens.
        """
        self._check(requests, params)
        batch = Batch(self, requests, params)
        with self._sampling_mode():
            while self._any_rank_has_work(batch):
                before = batch.num_ended
                batch.step()
                if on_ended is not None and batch.num_ended > before:
                    on_ended(batch.num_ended)
        return batch.responses()

    @contextmanager
    def _sampling_mode(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            few_rows = None if self.batch_invariant else FEW_ROWS
            tiles = FixedRowTiles() if self.batch_invariant else nullcontext()
            with inference_linears(self.model, few_rows=few_rows), tiles:
                yield
        finally:
            self.model.train(was_training)

    def _check(self, requests: list[Request], params: SamplingParams) -> None:
        positions, vocab_size = self.model.architecture.max_positions, self.model.architecture.vocab_size
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise ValueError(f"generate: the prompt of group {request.group_id} is empty; give it a token")
            if length + params.max_new_tokens > positions:
                raise ValueError(
                    f"generate: the prompt of group {request.group_id} has {length} tokens and max_new_tokens is"
                    f" {params.max_new_tokens}, but the model has {positions} positions; shorten one of them"
                )
            for bad in (int(request.prompt_ids.min()), int(request.prompt_ids.max())):
                if not 0 <= bad < vocab_size:
                    raise ValueError(
                        f"generate: the prompt of group {request.group_id} holds token {bad}, but the model has tokens"
                        f" 0 to {vocab_size - 1}; use the tokenizer that it was trained with"
                    )

    def _any_rank_has_work(self, batch: Batch) -> bool:
        if self.mesh.ep == 1:
            return batch.has_work
        flag = torch.tensor([int(batch.has_work)], device=self.mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.mesh.ep_group)
        return bool(flag.item())

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache for this stage's layers and this rank's heads."""
        config = self.model.config
        return KVCache(
            num_layers=self._layers,
            num_blocks=num_blocks,
            block_size=self.kv_block_size,
            num_kv_heads=config.num_query_groups // self.mesh.tp,
            head_dim=config.kv_channels,
            dtype=config.params_dtype,
            device=self.mesh.device,
        )

    @property
    def layer_offset(self) -> int:
        """Layers on earlier pipeline stages."""
        return self._layers * self.mesh.pp_rank

    def draw(
        self, tokens: Tensor, layout: AttentionLayout, scored: IntArray, keys: IntArray, params: SamplingParams
    ) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """Runs the model and draws from its scored rows.

        Args:
            tokens: [T] int64 fed.
            scored: [B] int64, which of the layout's scored rows each draw is from.
            keys: [B, 3] int64: group id, sample index, position of each draw.

        Returns:
            tokens [B] and log-probs [B], the same on every rank of the model group.
        """
        logits = pipeline_forward(self.model, self.mesh, tokens.to(self.mesh.device), layout)
        drawn = torch.zeros(2, len(keys), dtype=torch.float64, device=self.mesh.device)
        if logits is not None and len(keys):
            logits = gather_vocabulary(logits, self.mesh, self.model.architecture.vocab_size)
            uniform = torch.from_numpy(uniforms(self.seed, keys[:, 0], keys[:, 1], keys[:, 2]))
            rows = torch.from_numpy(scored)
            drawn[0], drawn[1] = sample(logits, uniform.to(logits.device), params, rows.to(logits.device))
        if self.mesh.pp > 1 and len(keys):
            dist.broadcast(drawn, dist.get_process_group_ranks(self.mesh.pp_group)[-1], group=self.mesh.pp_group)
        chosen, logprobs = drawn.cpu().numpy()
        return chosen.astype(np.int64), logprobs

    def ends_with_stop(self, token_ids: IntArray | list[int], stop: tuple[str, ...]) -> bool:
        """Whether the newest token completes one of the stop strings.

        Every token holds at least one byte, so a stop string of n bytes that ends with the newest token lies in the
        last n tokens; only they and a few before are decoded (a character may be split, a leading space dropped).
        """
        tail = self.tokenizer.decode(token_ids[-max(len(s.encode()) for s in stop) - 8 :])
        return any(s in tail for s in stop)
