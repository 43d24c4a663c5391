"""Which groups share a micro-batch on which data-parallel rank: by lengths alone, so that every rank plans the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grpo_mc.data.records import Group


@dataclass(frozen=True)
class GroupLengths:
    """What the plan has to know of a group."""

    prompt: int
    """Tokens in the prompt, at least 1."""
    responses: tuple[int, ...]
    """Tokens in each response that is to be trained on; 0 is legal."""
    samples: tuple[int, ...]
    """Their positions in `group.rollouts`."""

    def length(self, sample: int) -> int:
        """Tokens in the response at that position in `group.rollouts`."""
        return self.responses[self.samples.index(sample)]

    def fed_tokens(self, samples: Sequence[int] | None = None) -> int:
        """Tokens that the prompt and these responses (None = all) feed to the model."""
        lengths = self.responses if samples is None else [self.length(sample) for sample in samples]
        return self.prompt + sum(map(fed_length, lengths))


@dataclass(frozen=True)
class GroupPart:
    """Some responses of one group, on one rank or inside one micro-batch; nearly always all of them."""

    group: int
    """Position of the group in the list that was planned."""
    samples: tuple[int, ...]
    """Positions in `group.rollouts`."""


MicroBatch = tuple[GroupPart, ...]
"""What one forward pass sees on one rank; () is a filler, which keeps the ranks in step and adds nothing."""


def fed_length(response_length: int) -> int:
    """Tokens of a response that are fed to the model: all but the last, which predicts nothing scored."""
    return max(response_length - 1, 0)


def measure(group: Group, samples: Sequence[int] | None = None) -> GroupLengths:
    """The lengths of a group, of all its rollouts or of those at the positions `samples`."""
    chosen = tuple(range(len(group.rollouts))) if samples is None else tuple(samples)
    lengths = tuple(group.rollouts[sample].response_length for sample in chosen)
    return GroupLengths(len(group.prompt.token_ids), lengths, chosen)


def plan_micro_batches(
    groups: Sequence[GroupLengths],
    max_tokens: int,
    num_ranks: int,
    *,
    owners: Sequence[int] | None = None,
    split_groups: bool = True,
) -> list[list[MicroBatch]]:
    """Deals groups to ranks and, on each rank, to micro-batches of at most `max_tokens` fed tokens.

    The plan depends on the arguments only. Every rank gets the same number of micro-batches, by fillers at the end,
    because each micro-batch is a round of collectives.

    Args:
        groups: lengths of all groups of the training batch, over all ranks.
        max_tokens: budget of fed tokens of a micro-batch. A single response that exceeds it with its prompt gets a
            micro-batch of its own.
        num_ranks: data-parallel ranks.
        owners: the rank that has to take each group, or None to balance the ranks by fed tokens.
        split_groups: whether a group may be split by its responses (each part feeds the prompt again): over ranks where
            that evens them out and `owners` leaves the choice, over micro-batches where it exceeds the budget. If not
            it stays whole, in a micro-batch of its own if it must.

    Returns:
        One list of micro-batches per rank, all of the same length; at least one each.

    Raises:
        ValueError: no rank, no budget, an empty prompt, or owners that do not fit.
    """
    if num_ranks < 1 or max_tokens < 1:
        raise ValueError(f"plan_micro_batches: num_ranks={num_ranks}, max_tokens={max_tokens}; both must be at least 1")
    for position, group in enumerate(groups):
        if group.prompt < 1:
            raise ValueError(
                f"plan_micro_batches: group {position} has an empty prompt; nothing predicts the first token of its "
                "responses, so give every prompt at least one token"
            )
    if owners is None:
        shares = _balance(groups, num_ranks)
        if split_groups:
            _even_out(shares, groups)
    else:
        shares = _by_owner(groups, owners, num_ranks)
    limit = max_tokens if split_groups else None
    plans = []
    for share in shares:
        parts = [GroupPart(at, share[at]) for at in sorted(share)]
        plans.append(_fill([piece for part in parts for piece in _split(part, groups[part.group], limit)], max_tokens))
    rounds = max(1, *(len(plan) for plan in plans))
    return [plan + [()] * (rounds - len(plan)) for plan in plans]


_Share: TypeAlias = dict[int, tuple[int, ...]]
"""What one rank takes: positions of samples, by position of their group."""


def _balance(groups: Sequence[GroupLengths], num_ranks: int) -> list[_Share]:
    """Longest group first, to the rank with the fewest tokens so far; ties go to the lower position and rank."""
    loads, shares = [0] * num_ranks, [_Share() for _ in range(num_ranks)]
    for position in sorted(range(len(groups)), key=lambda at: (-groups[at].fed_tokens(), at)):
        rank = loads.index(min(loads))
        loads[rank] += groups[position].fed_tokens()
        shares[rank][position] = groups[position].samples
    return shares


def _by_owner(groups: Sequence[GroupLengths], owners: Sequence[int], num_ranks: int) -> list[_Share]:
    if len(owners) != len(groups) or any(not 0 <= owner < num_ranks for owner in owners):
        raise ValueError(
            f"plan_micro_batches: owners={list(owners)} for {len(groups)} groups on {num_ranks} ranks; "
            f"give one rank in 0 to {num_ranks - 1} per group"
        )
    return [{at: groups[at].samples for at, owner in enumerate(owners) if owner == rank} for rank in range(num_ranks)]


def _even_out(shares: list[_Share], groups: Sequence[GroupLengths]) -> None:
    """Moves responses from the fullest rank to the emptiest, as long as the fullest gets a tenth less to do.

    Whole groups cannot be dealt evenly when few of a batch are trained on. A rank that did not have the group feeds
    its prompt again.
    """
    loads = [sum(groups[at].fed_tokens(samples) for at, samples in share.items()) for share in shares]
    for _ in range(4 * len(shares)):
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        best, cut = 0.9 * loads[full], None
        for at, samples in sorted(shares[full].items()):
            prompt, moved = 0 if at in shares[empty] else groups[at].prompt, 0
            for kept in range(len(samples) - 1, 0, -1):
                moved += fed_length(groups[at].length(samples[kept]))
                fullest = max(loads[full] - moved, loads[empty] + prompt + moved)
                if fullest < best:
                    best, cut = fullest, (at, kept, moved, prompt + moved)
        if cut is None:
            return
        at, kept, moved, added = cut
        loads[full], loads[empty] = loads[full] - moved, loads[empty] + added
        samples = shares[full][at]
        shares[full][at] = samples[:kept]
        shares[empty][at] = tuple(sorted((*shares[empty].get(at, ()), *samples[kept:])))


def _split(part: GroupPart, group: GroupLengths, max_tokens: int | None) -> list[tuple[int, GroupPart]]:
    """(fed tokens, piece) for each piece of a part: one, unless it exceeds the budget."""
    if max_tokens is None or group.fed_tokens(part.samples) <= max_tokens:
        return [(group.fed_tokens(part.samples), part)]
    pieces, size, samples = [], group.prompt, list[int]()
    for sample in part.samples:
        length = group.length(sample)
        if samples and size + fed_length(length) > max_tokens:
            pieces.append((size, GroupPart(part.group, tuple(samples))))
            size, samples = group.prompt, []
        size += fed_length(length)
        samples.append(sample)
    return [*pieces, (size, GroupPart(part.group, tuple(samples)))]


def _fill(parts: list[tuple[int, GroupPart]], max_tokens: int) -> list[MicroBatch]:
    """Parts into few micro-batches: first fit, longest first. Inside a micro-batch parts keep the order of groups."""
    bins: list[tuple[int, list[int]]] = []
    for at in sorted(range(len(parts)), key=lambda index: (-parts[index][0], index)):
        size = parts[at][0]
        for index, (load, members) in enumerate(bins):
            if load + size <= max_tokens:
                bins[index] = (load + size, [*members, at])
                break
        else:
            bins.append((size, [at]))
    return [tuple(parts[at][1] for at in sorted(members)) for _, members in bins]
