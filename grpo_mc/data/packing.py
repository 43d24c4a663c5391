"""Packing of groups into micro-batches in which each group's prompt stands once.

A group is laid out as its prompt followed by its responses, and every response sees the prompt and itself only:

    tokens     p0 p1 p2 | a0 a1 | b0 b1 b2        positions  0 1 2 | 3 4 | 3 4 5

The G responses then cost P + sum(R - 1) tokens instead of G * (P + R - 1), with the same loss and gradients. The
prompt's last token predicts the first token of every response, so its row is scored G times; the last token of a
response predicts nothing that is scored and is not fed at all. Where prompts begin alike (a system prompt, examples),
what all of them begin with stands once in front, and the rest of each prompt and its responses see it:

    tokens     p0 p1 | q2 | a0 a1 | b0 | r2 r3 | c0        positions  0 1 | 2 | 3 4 | 3 | 2 3 | 4

What is scored follows from lengths, never from token values: the padding token of many models is also their
end-of-sequence token.

Which groups share a micro-batch is decided in `micro_batches`; `pack` lays one micro-batch out. Numpy only: the trainer
makes tensors of the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from grpo_mc.data.micro_batches import GroupPart, MicroBatch, fed_length, measure
from grpo_mc.data.records import Group

IntArray = npt.NDArray[np.int64]
MIN_SAVED = 0.1
"""Part of a micro-batch's tokens that a shared beginning must save to be laid out: attention is less simple then."""


@dataclass(frozen=True)
class Block:
    """One group part (or the tail padding) in the packed token axis."""

    start: int
    """Row of the prompt's first token."""
    prompt_length: int
    """Rows of the prompt, without the beginning that it shares."""
    response_starts: tuple[int, ...]
    """First row of each response."""
    response_lengths: tuple[int, ...]
    """Rows of each response: its length less the last token, or 0."""
    beginning_length: int = 0
    """The prompt begins with rows 0 to beginning_length, a block of their own that all groups share."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: T fed tokens, N responses, S scored response tokens."""

    tokens: IntArray
    """[T] int64."""
    positions: IntArray
    """[T] int64, the position in its own sequence: each response continues at the prompt's length."""
    blocks: tuple[Block, ...]
    """In row order; they cover [0, T) without gaps."""
    scored_rows: IntArray
    """[S] int64: the row in [0, T) whose hidden state predicts scored token s."""
    targets: IntArray
    """[S] int64: the response tokens themselves."""
    cu_seqlens: IntArray
    """[N + 1] int64: response n is scored tokens cu_seqlens[n] to cu_seqlens[n + 1]; equal for an empty response."""
    rollout_order: tuple[tuple[int, int], ...]
    """N pairs (group position, sample position), in the order of cu_seqlens."""
    response_mask: npt.NDArray[np.bool_]
    """[S] bool: true on tokens that the model sampled, false on those of a tool."""
    num_pad_tokens: int
    """Tokens of the tail block that only fills up."""

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.tokens)

    @property
    def num_scored(self) -> int:
        """S."""
        return len(self.targets)

    @property
    def group_positions(self) -> IntArray:
        """[N] int64, the group position of every response."""
        return np.array([group for group, _ in self.rollout_order], np.int64)

    def per_token(self, values: Sequence[float] | npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Spreads one value per response, [N], over its scored tokens, [S]."""
        if len(values) != len(self.rollout_order):
            raise ValueError(f"per_token: {len(values)} values for {len(self.rollout_order)} responses; give one each")
        return np.repeat(np.asarray(values), np.diff(self.cu_seqlens))

    def per_rollout(self, values: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
        """Cuts one value per scored token, [S], into one array per response, N of [R]."""
        if len(values) != self.num_scored:
            raise ValueError(f"per_rollout: {len(values)} values for {self.num_scored} scored tokens; give one each")
        return np.split(values, self.cu_seqlens[1:-1]) if self.rollout_order else []


def pack(
    groups: Sequence[Group] | Mapping[int, Group],
    micro_batch: MicroBatch,
    *,
    pad_multiple: int = 1,
    pad_id: int = 0,
) -> PackedBatch:
    """Lays one micro-batch out.

    Args:
        groups: the planned groups by position; a mapping may hold only those that this rank has.
        micro_batch: one entry of a plan. A filler gives `pad_multiple` padding tokens and nothing scored, so that the
            model still runs forward and backward.
        pad_multiple: T is rounded up to a multiple of it (the sequence-parallel size, an alignment).
        pad_id: any legal token id; padding is a block of its own, which nothing else sees and nothing scores.

    Returns:
        PackedBatch with responses in the order of the plan.
    """
    if pad_multiple < 1:
        raise ValueError(f"pack: pad_multiple={pad_multiple}; it must be at least 1")
    layout, beginning = _Layout(), _shared_beginning(groups, micro_batch)
    if len(beginning):
        layout.add_block(beginning)
    for part in micro_batch:
        layout.add(part, groups[part.group], len(beginning))
    num_pad = -layout.size % pad_multiple if layout.size else pad_multiple
    if num_pad:
        layout.add_block(np.full(num_pad, pad_id, np.int64))
    return layout.finish(num_pad)


def _shared_beginning(groups: Sequence[Group] | Mapping[int, Group], micro_batch: MicroBatch) -> IntArray:
    """What all prompts of the micro-batch begin with; nothing where that would save less than MIN_SAVED."""
    prompts = [groups[part.group].prompt.token_ids for part in micro_batch]
    if len(prompts) < 2 or not all(map(len, prompts)):
        return np.zeros(0, np.int64)
    common = common_length(prompts)
    fed = sum(measure(groups[part.group], part.samples).fed_tokens() for part in micro_batch)
    return prompts[0][: common if common * (len(prompts) - 1) >= MIN_SAVED * fed else 0]


def common_length(prompts: Sequence[IntArray]) -> int:
    """Tokens that all prompts (none empty) begin with, but for the last token of the shortest."""
    shortest = min(len(ids) for ids in prompts) - 1
    heads = np.stack([ids[:shortest] for ids in prompts])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest


class _Layout:
    """The growing columns of one PackedBatch."""

    def __init__(self) -> None:
        self.size = 0
        self.tokens: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.blocks: list[Block] = []
        self.rows: list[IntArray] = []
        self.targets: list[IntArray] = []
        self.masks: list[npt.NDArray[np.bool_]] = []
        self.order: list[tuple[int, int]] = []

    def add(self, part: GroupPart, group: Group, beginning: int) -> None:
        """A group; its prompt without the first `beginning` tokens."""
        start, prompt = self.size, group.prompt.token_ids
        if len(prompt) < 1:
            raise ValueError(f"pack: the prompt of group {group.group_id} is empty; give it at least one token")
        own = len(prompt) - beginning
        self._feed(prompt[beginning:], beginning)
        starts, lengths = [], []
        for sample in part.samples:
            rollout = group.rollouts[sample]
            response, first = rollout.response_ids, self.size
            fed = fed_length(len(response))
            self._feed(response[:fed], len(prompt))
            starts.append(first)
            lengths.append(fed)
            if len(response):
                # the prompt's last token predicts the first token, then each response token the next
                self.rows.append(np.concatenate([[start + own - 1], np.arange(first, first + fed)]))
            self.targets.append(response)
            self.masks.append(rollout.response_mask)
            self.order.append((part.group, sample))
        self.blocks.append(Block(start, own, tuple(starts), tuple(lengths), beginning))

    def add_block(self, tokens: IntArray) -> None:
        """Tokens that nothing is scored from: the beginning of all prompts, or padding."""
        self.blocks.append(Block(self.size, len(tokens), (), ()))
        self._feed(tokens, 0)

    def _feed(self, tokens: IntArray, first_position: int) -> None:
        self.tokens.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        self.size += len(tokens)

    def finish(self, num_pad: int) -> PackedBatch:
        return PackedBatch(
            tokens=_join(self.tokens),
            positions=_join(self.positions),
            blocks=tuple(self.blocks),
            scored_rows=_join(self.rows),
            targets=_join(self.targets),
            cu_seqlens=np.cumsum([0, *(len(target) for target in self.targets)], dtype=np.int64),
            rollout_order=tuple(self.order),
            response_mask=np.concatenate([np.zeros(0, bool), *self.masks]),
            num_pad_tokens=num_pad,
        )


def _join(parts: list[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
