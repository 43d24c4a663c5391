"""The state of one `generate` call of the native engine: what waits, what runs, and the cache.

Running rows are columns of arrays, so that a decoding step costs a fixed number of array operations and no Python
object per row. What is sampled goes into one table over all responses and becomes `Response` objects at the end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_mc.data.packing import IntArray
from grpo_mc.data.records import FinishReason
from grpo_mc.megatron.layout import AttentionLayout, make_block
from grpo_mc.rollout.engine import Request, Response
from grpo_mc.rollout.kv_cache import Sequence
from grpo_mc.rollout.layouts import DecodeLayout, PrefillLayout
from grpo_mc.rollout.prefill import plan_prefill
from grpo_mc.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from grpo_mc.rollout.native import NativeEngine


@dataclass(frozen=True)
class Part:
    """Responses that one prefill starts: a request, or as much of it as the batch has rows for."""

    request: Request
    responses: IntArray
    """[G] int64, their places in the list of all responses."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)


@dataclass
class Rows:
    """The B rows of the decoding batch."""

    responses: IntArray
    """[B] int64, places in the list of all responses."""
    prompt_lengths: IntArray
    """[B] int64."""
    counts: IntArray
    """[B] int64, tokens sampled."""
    tokens: IntArray
    """[B] int64, the newest token; its key and value are not in the cache yet."""
    tables: npt.NDArray[np.int32]
    """[B, M] int32, cache blocks; scratch block 0 past a row's end."""
    sequences: list[Sequence]

    def __len__(self) -> int:
        return len(self.responses)

    def kept(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """The rows where mask [B] is true."""
        return Rows(
            self.responses[mask],
            self.prompt_lengths[mask],
            self.counts[mask],
            self.tokens[mask],
            self.tables[mask],
            [sequence for sequence, keep in zip(self.sequences, mask, strict=True) if keep],
        )

    def joined(self, other: Rows) -> Rows:
        """These rows, then the others."""
        join = np.concatenate
        return Rows(
            join([self.responses, other.responses]),
            join([self.prompt_lengths, other.prompt_lengths]),
            join([self.counts, other.counts]),
            join([self.tokens, other.tokens]),
            join([self.tables, other.tables]),
            self.sequences + other.sequences,
        )


class Batch:
    """All requests of one call; `step` until it has no more work."""

    def __init__(self, engine: NativeEngine, requests: list[Request], params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.waiting: deque[Part] = deque()
        total = 0
        for request in requests:
            for first in range(0, len(request.samples), engine.max_batch_rows):
                size = min(engine.max_batch_rows, len(request.samples) - first)
                self.waiting.append(Part(request, np.arange(total + first, total + first + size)))
            total += len(request.samples)
        self.keys = np.array([(r.group_id, sample) for r in requests for sample in r.samples], np.int64).reshape(-1, 2)
        """[N, 2] group id and sample index of every response."""
        self.counts = np.zeros(total, np.int64)
        self.tokens = np.zeros((total, params.max_new_tokens), np.int64)
        self.logprobs = np.zeros((total, params.max_new_tokens), np.float32)
        self.reasons = [FinishReason.ABORTED] * total
        self.num_ended = 0
        self.cache = engine.new_cache(self._cache_blocks())
        longest = max((part.prompt_length for part in self.waiting), default=0) + params.max_new_tokens
        self.width = max(1, self.cache.blocks_for(longest))
        """Blocks of a row at most (M)."""
        engine.rope.num_positions = max(engine.rope.num_positions, longest)
        nothing = np.zeros(0, np.int64)
        self.rows = Rows(nothing, nothing, nothing, nothing, np.zeros((0, self.width), np.int32), [])
        self.tables = torch.zeros(0, self.width, dtype=torch.int32)
        self.tables_are_old = True

    def _cache_blocks(self) -> int:
        """Enough for as many of the largest groups as the batch has rows for, and never more than all groups."""
        size, limit = self.engine.kv_block_size, self.params.max_new_tokens
        needs = []
        for part in self.waiting:
            shared, count = part.prompt_length // size, len(part.responses)
            needs.append((shared + count * (-(-(part.prompt_length + limit) // size) - shared), count))
        total, rows = 0, 0
        for blocks, count in sorted(needs, reverse=True):
            if rows and rows + count > self.engine.max_batch_rows:
                break
            total, rows = total + blocks, rows + count
        return total

    @property
    def has_work(self) -> bool:
        """Whether any response is not finished."""
        return bool(self.waiting) or len(self.rows) > 0

    def step(self) -> None:
        """A prefill if a group can join, else one token for every row, else padding."""
        joining = self._admit()
        if joining:
            self._prefill(joining)
        else:
            self._decode()

    def responses(self) -> list[Response]:
        """All responses, in the order of the requests and their samples."""
        return [
            Response(group_id, sample, self.tokens[at, :count].tolist(), self.logprobs[at, :count].tolist(), reason)
            for at, ((group_id, sample), count, reason) in enumerate(
                zip(self.keys.tolist(), self.counts.tolist(), self.reasons, strict=True)
            )
        ]

    def _admit(self) -> list[tuple[Part, list[Sequence]]]:
        joining: list[tuple[Part, list[Sequence]]] = []
        rows, tokens, limit = len(self.rows), 0, self.params.max_new_tokens
        while self.waiting:
            part, count = self.waiting[0], len(self.waiting[0].responses)
            if rows + count > self.engine.max_batch_rows:
                break
            if joining and tokens + part.prompt_length > self.engine.max_prefill_tokens:
                break
            if self.cache.blocks_of_group(part.prompt_length, count, limit) > self.cache.num_free:
                break
            self.waiting.popleft()
            joining.append((part, self.cache.admit(part.prompt_length, count, limit)))
            rows, tokens = rows + count, tokens + part.prompt_length
        return joining

    def _prefill(self, joining: list[tuple[Part, list[Sequence]]]) -> None:
        device = self.engine.mesh.device
        plan = plan_prefill(
            [part.request.prompt_ids for part, _ in joining], [sequences[0].table for _, sequences in joining],
            self.cache, share=not self.engine.batch_invariant, device=device,
        )  # fmt: skip
        fed = len(plan.tokens)
        pad = self._padding(fed)
        layout = PrefillLayout(
            positions=self._pad(plan.positions),
            scored_rows=plan.last_rows,
            blocks=(*plan.blocks, make_block(fed, pad, [], [], device)) if pad else plan.blocks,
            cache=self.cache,
            slots=self._pad(plan.slots),
            layer_offset=self.engine.layer_offset,
            rope=self.engine.rope,
        )
        rows = self._new_rows(joining)
        sizes = [len(part.responses) for part, _ in joining]
        self._draw(self._pad(plan.tokens), layout, rows, np.repeat(np.arange(len(sizes)), sizes))
        for source, targets in plan.copies:
            self.cache.copy_tokens(source, targets)
        for part, sequences in joining:
            if part.prompt_length % self.cache.block_size:
                self.cache.copy_block(sequences[0].own[0], [sequence.own[0] for sequence in sequences[1:]])
        self.rows = self.rows.joined(self._without_ended(rows))
        self.tables_are_old = True

    def _new_rows(self, joining: list[tuple[Part, list[Sequence]]]) -> Rows:
        sequences = [sequence for _, of_part in joining for sequence in of_part]
        tables = np.zeros((len(sequences), self.width), np.int32)
        for table, sequence in zip(tables, sequences, strict=True):
            table[: len(sequence.table)] = sequence.table
        responses = np.concatenate([part.responses for part, _ in joining])
        lengths = np.repeat([part.prompt_length for part, _ in joining], [len(part.responses) for part, _ in joining])
        return Rows(responses, lengths, np.zeros_like(responses), np.zeros_like(responses), tables, sequences)

    def _decode(self) -> None:
        rows, size = self.rows, self.cache.block_size
        if self.tables_are_old:
            self.tables = self._pad(torch.from_numpy(rows.tables))
            self.tables_are_old = False
        positions = rows.prompt_lengths + rows.counts - 1
        slots = rows.tables[np.arange(len(rows)), positions // size].astype(np.int64) * size + positions % size
        layout = DecodeLayout(
            positions=self._pad(torch.from_numpy(positions)),
            scored_rows=torch.arange(len(rows), device=self.engine.mesh.device),
            cache=self.cache,
            slots=self._pad(torch.from_numpy(slots)),
            block_tables=self.tables,
            lengths=self._pad(torch.from_numpy((positions + 1).astype(np.int32)), 1),
            layer_offset=self.engine.layer_offset,
            rope=self.engine.rope,
        )
        self._draw(self._pad(torch.from_numpy(rows.tokens)), layout, rows, np.arange(len(rows)))
        self.rows = self._without_ended(rows)

    def _draw(self, tokens: Tensor, layout: AttentionLayout, rows: Rows, scored: IntArray) -> None:
        """Feeds tokens [T] and samples the next token of each row, from the logits of scored row `scored` [B]."""
        keys = np.column_stack([self.keys[rows.responses], rows.counts])
        drawn, logprobs = self.engine.draw(tokens, layout, scored, keys, self.params)
        self.tokens[rows.responses, rows.counts] = drawn
        self.logprobs[rows.responses, rows.counts] = logprobs
        rows.tokens, rows.counts = drawn, rows.counts + 1

    def _without_ended(self, rows: Rows) -> Rows:
        """The rows that go on; the others give their blocks back."""
        finished = self._finished(rows)
        ended = finished | (rows.counts >= self.params.max_new_tokens)
        if not ended.any():
            return rows
        for at in ended.nonzero()[0].tolist():
            response = int(rows.responses[at])
            self.reasons[response] = FinishReason.FINISHED if finished[at] else FinishReason.TRUNCATED
            self.counts[response] = rows.counts[at]
            self.cache.release(rows.sequences[at])
        self.num_ended += int(ended.sum())
        self.tables_are_old = True
        return rows.kept(~ended)

    def _finished(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """[B] whether the newest token ends the response: an end-of-sequence token, or the end of a stop string."""
        finished = np.zeros(len(rows), np.bool_)
        if not self.params.ignore_eos:
            finished = np.isin(rows.tokens, self.engine.tokenizer.eos_ids)
        if self.params.stop:
            for at in (~finished).nonzero()[0].tolist():
                sampled = self.tokens[rows.responses[at], : rows.counts[at]]
                finished[at] = self.engine.ends_with_stop(sampled, self.params.stop)
        return finished

    def _padding(self, count: int) -> int:
        """Rows to add: at least one row in all, and a multiple of tp under sequence parallelism."""
        multiple = self.engine.mesh.tp if self.engine.model.config.sequence_parallel else 1
        return max(1, -(-count // multiple)) * multiple - count

    def _pad(self, rows: Tensor, value: int = 0) -> Tensor:
        pad = self._padding(len(rows))
        if pad:
            rows = torch.cat([rows, torch.full((pad, *rows.shape[1:]), value, dtype=rows.dtype)])
        return rows.to(self.engine.mesh.device)
