"""The native engine: batched decoding with a key-value cache through the training model itself.

Groups wait in a queue. A group joins when the batch has room for its rows and the cache for its blocks; its prompt is
prefilled once, its G first tokens are drawn from the one set of logits, and from then on each response is a row of the
decoding batch until it ends. Finished rows leave at once. Since training and sampling share one model there are no
weights to copy, and rollout log-probs differ from the trainer's by rounding only.

Every rank of a model group runs the same steps: logits are gathered, tokens are drawn on the last pipeline stage and
broadcast, and the random numbers are keyed (see random_numbers). With expert parallelism the ranks of an expert group
work on different rows and meet in every MoE layer, so a rank without work goes on with padding until all are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.data.records import FinishReason
from grpo_mc.data.tokenizer import Tokenizer
from grpo_mc.megatron.forward import gather_vocabulary, pipeline_forward
from grpo_mc.megatron.layout import AttentionLayout, make_block
from grpo_mc.megatron.mesh import Mesh
from grpo_mc.megatron.model import PolicyModel
from grpo_mc.rollout.kv_cache import KVCache, Sequence
from grpo_mc.rollout.layouts import DecodeLayout, PrefillLayout
from grpo_mc.rollout.random_numbers import uniforms
from grpo_mc.rollout.sampling import SamplingParams, sample


@dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it."""

    group_id: int
    prompt_ids: np.ndarray
    """[P] int64, at least one token."""
    samples: tuple[int, ...]
    """Sample indices; they key the random numbers."""


@dataclass
class Response:
    """One sampled response."""

    group_id: int
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORTED
    """ABORTED until it ends."""


@dataclass
class _Row:
    response: Response
    sequence: Sequence
    prompt_length: int


class NativeEngine:
    """Samples from a PolicyModel on its mesh."""

    def __init__(
        self, model: PolicyModel, mesh: Mesh, tokenizer: Tokenizer, *, seed: int, max_batch_rows: int = 256,
        kv_block_size: int = 16, max_prefill_tokens: int = 4096,
    ) -> None:  # fmt: skip
        """
        Args:
            seed: The run's seed, the key of all random numbers.
            max_batch_rows: Responses decoded together at most.
            kv_block_size: Tokens per cache block.
            max_prefill_tokens: Prompt tokens of one prefill at most; one longer prompt is prefilled alone.
        """
        for name, value in (
            ("max_batch_rows", max_batch_rows),
            ("kv_block_size", kv_block_size),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"NativeEngine: {name} is {value}; it must be at least 1")
        self.model, self.mesh, self.tokenizer, self.seed = model, mesh, tokenizer, seed
        self.max_batch_rows, self.kv_block_size = max_batch_rows, kv_block_size
        self.max_prefill_tokens = max_prefill_tokens
        self._layers = model.config.num_layers // mesh.pp
        self._eos = frozenset(tokenizer.eos_ids)

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> list[Response]:
        """Samples every request to its end.

        Args:
            requests: Prompts; a request with more samples than max_batch_rows is prefilled more than once.
            on_tokens: Called with the number of new tokens after each step (a progress display).

        Returns:
            All responses, in the order of the requests and their samples.

        Raises:
            ValueError: An empty prompt, one with a token that the model does not have, or one that leaves too few of
                the model's positions for max_new_tokens.
        """
        self._check(requests, params)
        batch = _Batch(self, requests, params)
        was_training = self.model.training
        self.model.eval()
        try:
            while self._any_rank_has_work(batch):
                new = batch.step()
                if on_tokens is not None and new:
                    on_tokens(new)
        finally:
            self.model.train(was_training)
        return batch.responses

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

    def _any_rank_has_work(self, batch: _Batch) -> bool:
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
        self, tokens: Tensor, layout: AttentionLayout, repeats: list[int], keys: np.ndarray, params: SamplingParams
    ) -> tuple[list[int], list[float]]:
        """Runs the model and draws from its last rows.

        Args:
            tokens: [T] int64 fed.
            repeats: Draws from each scored row.
            keys: [B, 3] int64: group id, sample index, position of each draw, in the order of the rows.

        Returns:
            B tokens and B log-probs, the same on every rank of the model group.
        """
        logits = pipeline_forward(self.model, self.mesh, tokens.to(self.mesh.device), layout)
        drawn = torch.zeros(2, len(keys), dtype=torch.float64, device=self.mesh.device)
        if logits is not None and len(keys):
            logits = gather_vocabulary(logits, self.mesh, self.model.architecture.vocab_size)
            if any(n != 1 for n in repeats):
                logits = logits.repeat_interleave(torch.tensor(repeats, device=logits.device), dim=0)
            uniform = torch.from_numpy(uniforms(self.seed, keys[:, 0], keys[:, 1], keys[:, 2])).to(logits.device)
            chosen, logprobs = sample(logits, uniform, params)
            drawn[0], drawn[1] = chosen, logprobs
        if self.mesh.pp > 1:
            dist.broadcast(drawn, self._last_stage_rank(), group=self.mesh.pp_group)
        return drawn[0].long().tolist(), drawn[1].tolist()

    def _last_stage_rank(self) -> int:
        return dist.get_process_group_ranks(self.mesh.pp_group)[-1]

    def ends_with_stop(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the newest token completes one of the stop strings.

        Every token holds at least one byte, so a stop string of n bytes that ends with the newest token lies in the
        last n tokens; only they and a few before are decoded (a character may be split, a leading space dropped).
        """
        tail = self.tokenizer.decode(token_ids[-max(len(s.encode()) for s in stop) - 8 :])
        return any(s in tail for s in stop)

    def has_ended(self, response: Response, params: SamplingParams) -> bool:
        """Whether a response is over; sets its finish reason."""
        if not params.ignore_eos and response.token_ids[-1] in self._eos:
            response.finish_reason = FinishReason.FINISHED
        elif params.stop and self.ends_with_stop(response.token_ids, params.stop):
            response.finish_reason = FinishReason.FINISHED
        elif len(response.token_ids) >= params.max_new_tokens:
            response.finish_reason = FinishReason.TRUNCATED
        else:
            return False
        return True


class _Batch:
    """The state of one `generate` call: what waits, what runs, and the cache."""

    def __init__(self, engine: NativeEngine, requests: list[Request], params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.responses: list[Response] = []
        self.waiting: deque[tuple[Request, list[Response]]] = deque()
        self.rows: list[_Row] = []
        for request in requests:
            for first in range(0, len(request.samples), engine.max_batch_rows):
                chunk = request.samples[first : first + engine.max_batch_rows]
                wanted = [Response(request.group_id, index) for index in chunk]
                self.waiting.append((request, wanted))
                self.responses += wanted
        self.cache = engine.new_cache(self._cache_blocks())
        self.block_tables = torch.zeros(0, 0, dtype=torch.int32)
        self.dirty = True

    def _cache_blocks(self) -> int:
        """Enough for as many of the largest groups as the batch has rows for, and never more than all groups."""
        size = self.engine.kv_block_size
        needs, rows = [], 0
        for request, wanted in self.waiting:
            shared = len(request.prompt_ids) // size
            own = -(-(len(request.prompt_ids) + self.params.max_new_tokens) // size) - shared
            needs.append((shared + len(wanted) * own, len(wanted)))
        total = 0
        for blocks, count in sorted(needs, reverse=True):
            if rows and rows + count > self.engine.max_batch_rows:
                break
            total, rows = total + blocks, rows + count
        return total

    @property
    def has_work(self) -> bool:
        """Whether any response is not finished."""
        return bool(self.waiting or self.rows)

    def step(self) -> int:
        """A prefill if a group can join, else one token for every row, else padding. Returns the new tokens."""
        joining = self._admit()
        if joining:
            return self._prefill(joining)
        return self._decode()

    def _admit(self) -> list[tuple[Request, list[Response], list[Sequence]]]:
        joining: list[tuple[Request, list[Response], list[Sequence]]] = []
        rows, tokens, limit = len(self.rows), 0, self.params.max_new_tokens
        while self.waiting:
            request, wanted = self.waiting[0]
            length = len(request.prompt_ids)
            if rows + len(wanted) > self.engine.max_batch_rows:
                break
            if joining and tokens + length > self.engine.max_prefill_tokens:
                break
            if self.cache.blocks_of_group(length, len(wanted), limit) > self.cache.num_free:
                break
            self.waiting.popleft()
            joining.append((request, wanted, self.cache.admit(length, len(wanted), limit)))
            rows, tokens = rows + len(wanted), tokens + length
        return joining

    def _prefill(self, joining: list[tuple[Request, list[Response], list[Sequence]]]) -> int:
        device, start = self.engine.mesh.device, 0
        blocks, slots, positions, last = [], [], [], []
        for request, _, sequences in joining:
            length = len(request.prompt_ids)
            blocks.append(make_block(start, length, [], [], device))
            slots.append(self.cache.slots(sequences[0].table, 0, length))
            positions.append(torch.arange(length))
            start += length
            last.append(start - 1)
        tokens = torch.from_numpy(np.concatenate([request.prompt_ids for request, _, _ in joining]))
        pad = self._padding(start)
        if pad:
            blocks.append(make_block(start, pad, [], [], device))
            slots.append(torch.zeros(pad, dtype=torch.int64))
            positions.append(torch.arange(pad))
            tokens = torch.cat([tokens, torch.zeros(pad, dtype=tokens.dtype)])
        layout = PrefillLayout(
            positions=torch.cat(positions).to(device),
            scored_rows=torch.tensor(last, device=device),
            blocks=tuple(blocks),
            cache=self.cache,
            slots=torch.cat(slots).to(device),
            layer_offset=self.engine.layer_offset,
        )
        repeats = [len(wanted) for _, wanted, _ in joining]
        rows = [
            _Row(response, sequence, len(request.prompt_ids))
            for request, wanted, sequences in joining
            for response, sequence in zip(wanted, sequences, strict=True)
        ]
        self._draw(tokens, layout, repeats, rows)
        for request, _, sequences in joining:
            if len(request.prompt_ids) % self.cache.block_size:
                self.cache.copy_block(sequences[0].own[0], [sequence.own[0] for sequence in sequences[1:]])
        self._join(rows)
        return len(rows)

    def _decode(self) -> int:
        rows, device = self.rows, self.engine.mesh.device
        if self.dirty:
            self._rebuild_tables()
        lengths = np.array([row.prompt_length + len(row.response.token_ids) for row in rows], np.int64)
        tokens = torch.tensor([row.response.token_ids[-1] for row in rows], dtype=torch.int64)
        positions = torch.from_numpy(lengths) - 1  # the newest token is not in the cache yet
        size, at = self.cache.block_size, torch.arange(len(rows))
        slots = self.block_tables[at, positions // size].long() * size + positions % size
        layout = DecodeLayout(
            positions=self._pad(positions),
            scored_rows=torch.arange(len(rows), device=device),
            cache=self.cache,
            slots=self._pad(slots),
            block_tables=self._pad(self.block_tables),
            lengths=self._pad(torch.from_numpy(lengths).int(), 1),
            layer_offset=self.engine.layer_offset,
        )
        self._draw(self._pad(tokens), layout, [1] * len(rows), rows)
        self.rows = []
        self._join(rows)
        return len(rows)

    def _draw(self, tokens: Tensor, layout: AttentionLayout, repeats: list[int], rows: list[_Row]) -> None:
        keys = [(row.response.group_id, row.response.sample_index, len(row.response.token_ids)) for row in rows]
        drawn, logprobs = self.engine.draw(
            tokens, layout, repeats, np.array(keys, np.int64).reshape(-1, 3), self.params
        )
        for row, token, logprob in zip(rows, drawn, logprobs, strict=True):
            row.response.token_ids.append(token)
            row.response.logprobs.append(logprob)

    def _join(self, rows: list[_Row]) -> None:
        """Adds the rows that go on; the others give their blocks back."""
        for row in rows:
            if self.engine.has_ended(row.response, self.params):
                self.cache.release(row.sequence)
                self.dirty = True
            else:
                self.rows.append(row)
        self.dirty |= len(self.rows) != len(self.block_tables)

    def _rebuild_tables(self) -> None:
        tables = [row.sequence.table for row in self.rows]
        width = max((len(table) for table in tables), default=1)
        padded = [table + (0,) * (width - len(table)) for table in tables]
        self.block_tables = torch.tensor(padded, dtype=torch.int32).reshape(len(tables), width)
        self.dirty = False

    def _padding(self, count: int) -> int:
        """Rows to add: at least one row in all, and a multiple of tp under sequence parallelism."""
        multiple = self.engine.mesh.tp if self.engine.model.config.sequence_parallel else 1
        return max(1, -(-count // multiple)) * multiple - count

    def _pad(self, rows: Tensor, value: int = 0) -> Tensor:
        pad = self._padding(len(rows))
        if pad:
            rows = torch.cat([rows, torch.full((pad, *rows.shape[1:]), value, dtype=rows.dtype)])
        return rows.to(self.engine.mesh.device)
