"""Packing against layouts worked by hand, and plans against their promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc.data.micro_batches import GroupLengths, GroupPart, measure, plan_micro_batches
from grpo_mc.data.packing import pack
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment


def make_group(group_id: int, prompt: list[int], responses: list[list[int]], tool: bool = False) -> Group:
    record = Prompt(f"test:{group_id}", np.array(prompt, np.int64), "")
    rollouts = []
    for index, ids in enumerate(responses):
        segments = [Segment("model", np.array(ids, np.int64), np.zeros(len(ids), np.float32))]
        if tool:
            segments.append(Segment("tool", np.array([90, 91], np.int64)))
        rollouts.append(Rollout(group_id, index, record, segments, "", FinishReason.FINISHED, (0,)))
    return Group(group_id, record, rollouts)


def whole(*groups: Group) -> tuple[GroupPart, ...]:
    return tuple(GroupPart(at, tuple(range(len(group.rollouts)))) for at, group in enumerate(groups))


def lengths(prompt: int, *responses: int) -> GroupLengths:
    return GroupLengths(prompt, responses, tuple(range(len(responses))))


def test_layout_by_hand():
    groups = [make_group(7, [1, 2, 3], [[10, 11, 12], [20], []]), make_group(9, [4], [[30, 31]])]
    batch = pack(groups, whole(*groups), pad_multiple=4, pad_id=99)
    # prompt 1 2 3, first response fed without 12, second (one token) and third (empty) feed nothing; prompt 4, then 30
    assert batch.tokens.tolist() == [1, 2, 3, 10, 11, 4, 30, 99]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.targets.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.scored_rows.tolist() == [2, 3, 4, 2, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 4, 6]
    assert batch.rollout_order == ((0, 0), (0, 1), (0, 2), (1, 0))
    assert batch.group_positions.tolist() == [0, 0, 0, 1]
    first, second, padding = batch.blocks
    assert (first.start, first.prompt_length) == (0, 3)
    assert first.response_starts == (3, 5, 5) and first.response_lengths == (2, 0, 0)
    assert (second.start, second.prompt_length, second.response_starts, second.response_lengths) == (5, 1, (6,), (1,))
    assert (padding.start, padding.prompt_length, padding.response_starts) == (7, 1, ())
    assert batch.num_pad_tokens == 1 and batch.num_tokens == 8 and batch.num_scored == 6
    assert batch.response_mask.all()
    for column in (batch.tokens, batch.positions, batch.scored_rows, batch.targets, batch.cu_seqlens):
        assert column.dtype == np.int64


def test_what_all_prompts_begin_with_stands_once_by_hand():
    """Prompts 1 2 3 and 1 2 5 6: rows 1 2 | 3 10 | 5 6 20 21, and both groups see the first two."""
    groups = [make_group(0, [1, 2, 3], [[10, 11], [12]]), make_group(1, [1, 2, 5, 6], [[20, 21, 22]])]
    batch = pack(groups, whole(*groups))
    assert batch.tokens.tolist() == [1, 2, 3, 10, 5, 6, 20, 21]
    assert batch.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    assert [(b.start, b.prompt_length, b.beginning_length) for b in batch.blocks] == [(0, 2, 0), (2, 1, 2), (4, 2, 2)]
    assert batch.scored_rows.tolist() == [2, 3, 2, 5, 6, 7]
    assert batch.targets.tolist() == [10, 11, 12, 20, 21, 22]


def test_equal_prompts_keep_their_last_token():
    """It predicts each group's first tokens, in a row of its own."""
    groups = [make_group(at, [7, 7, 7], [[10], [11]]) for at in range(2)]
    batch = pack(groups, whole(*groups))
    assert batch.tokens.tolist() == [7, 7, 7, 7] and batch.scored_rows.tolist() == [2, 2, 3, 3]


def test_a_beginning_that_saves_little_is_not_laid_out():
    """One common token saves 1 of 24."""
    groups = [make_group(at, [1, *range(10 * at + 2, 10 * at + 13)], [[3]]) for at in range(2)]
    batch = pack(groups, whole(*groups))
    assert len(batch.tokens) == 24 and [block.beginning_length for block in batch.blocks] == [0, 0]


def test_values_spread_over_tokens_and_come_back():
    groups = [make_group(0, [1, 2], [[5, 6], [], [7]])]
    batch = pack(groups, whole(*groups))
    assert batch.per_token([0.5, -1.0, 2.0]).tolist() == [0.5, 0.5, 2.0]
    assert [part.tolist() for part in batch.per_rollout(np.array([1, 2, 3]))] == [[1, 2], [], [3]]
    with pytest.raises(ValueError, match="2 values for 3 responses"):
        batch.per_token([1.0, 2.0])
    with pytest.raises(ValueError, match="1 values for 3 scored tokens"):
        batch.per_rollout(np.array([1]))


def test_end_of_sequence_token_stays_scored_where_it_equals_padding():
    """H07: masks come from lengths; 2 is the end-of-sequence and the padding token, and stands in the prompt too."""
    groups = [make_group(0, [2, 4], [[5, 6, 2], [2]])]
    batch = pack(groups, whole(*groups), pad_multiple=8, pad_id=2)
    assert batch.targets.tolist() == [5, 6, 2, 2]
    assert batch.response_mask.tolist() == [True] * 4
    assert batch.blocks[0].prompt_length == 2
    assert batch.tokens.tolist() == [2, 4, 5, 6, 2, 2, 2, 2] and batch.num_pad_tokens == 4


def test_tool_tokens_are_fed_but_not_of_the_model():
    groups = [make_group(0, [1], [[5]], tool=True)]
    batch = pack(groups, whole(*groups))
    assert batch.tokens.tolist() == [1, 5, 90]
    assert batch.targets.tolist() == [5, 90, 91]
    assert batch.response_mask.tolist() == [True, False, False]


def test_only_empty_responses_score_nothing():
    """H08: nothing to train on is legal; the model still has tokens to run on."""
    groups = [make_group(0, [1, 2], [[], []])]
    batch = pack(groups, whole(*groups))
    assert batch.num_scored == 0 and batch.cu_seqlens.tolist() == [0, 0, 0]
    assert batch.tokens.tolist() == [1, 2]
    assert batch.per_token([1.0, 1.0]).tolist() == []


def test_filler_runs_the_model_and_scores_nothing():
    """H20: a filler micro-batch has tokens, so that it takes part in every collective."""
    batch = pack([], (), pad_multiple=3)
    assert batch.tokens.tolist() == [0, 0, 0] and batch.num_scored == 0
    assert batch.cu_seqlens.tolist() == [0] and batch.rollout_order == ()
    assert batch.per_rollout(np.zeros(0)) == []
    assert pack([], ()).num_tokens == 1


def test_ranks_run_the_same_number_of_micro_batches():
    """H20: budget 100; rank 0 holds five sequences of 95 fed tokens, rank 1 five of 20: both run 5."""
    groups = [lengths(90, 6)] * 5 + [lengths(15, 6)] * 5
    plan = plan_micro_batches(groups, 100, 2, owners=[0] * 5 + [1] * 5)
    assert [len(rank) for rank in plan] == [5, 5]
    assert plan[1][0] == tuple(GroupPart(at, (0,)) for at in range(5, 10))
    assert plan[1][1:] == [()] * 4


def test_balanced_ranks_by_hand():
    """95 x 5 and 20 x 5 on two ranks: longest first to the lighter rank gives 3 * 95 and 2 * 95 + 5 * 20."""
    groups = [lengths(90, 6)] * 5 + [lengths(15, 6)] * 5
    plan = plan_micro_batches(groups, 100, 2)
    assert loads(plan, groups) == [285, 290]
    assert len(plan[0]) == len(plan[1]) == 3


def loads(plan, groups):
    """Fed tokens of every rank."""
    return [sum(groups[part.group].fed_tokens(part.samples) for batch in rank for part in batch) for rank in plan]


def test_a_group_is_split_over_ranks_that_would_have_nothing_to_do():
    """24 prompt tokens and 8 x 4: 56 on one rank, or 24 + 16 = 40 on each of two."""
    group = lengths(24, *[5] * 8)
    assert plan_micro_batches([group], 100, 2) == [
        [(GroupPart(0, (0, 1, 2, 3)),)],
        [(GroupPart(0, (4, 5, 6, 7)),)],
    ]
    assert loads(plan_micro_batches([group], 100, 2, split_groups=False), [group]) == [56, 0]


def test_three_groups_on_two_ranks_by_hand():
    """112 and 56; moving 4 responses of one group, with its prompt, makes it 96 and 96."""
    groups = [lengths(24, *[5] * 8)] * 3
    plan = plan_micro_batches(groups, 200, 2)
    assert loads(plan, groups) == [96, 96]
    assert plan[0] == [(GroupPart(0, (0, 1, 2, 3)), GroupPart(2, tuple(range(8))))]
    assert plan[1] == [(GroupPart(0, (4, 5, 6, 7)), GroupPart(1, tuple(range(8))))]


def test_a_long_prompt_is_not_fed_twice_for_little():
    """400 + 32: each half would still have 416 to do."""
    assert loads(plan_micro_batches([lengths(400, *[5] * 8)], 1000, 2), [lengths(400, *[5] * 8)]) == [432, 0]


def test_owners_keep_their_groups_whole():
    group = lengths(24, *[5] * 8)
    assert loads(plan_micro_batches([group], 100, 2, owners=[1]), [group]) == [0, 56]


def test_group_beyond_the_budget_is_split_by_responses():
    group = lengths(10, 11, 11, 11, 1, 40)
    assert plan_micro_batches([group], 30, 1) == [
        [(GroupPart(0, (4,)),), (GroupPart(0, (0, 1)),), (GroupPart(0, (2, 3)),)]
    ]  # 49 tokens (one response may exceed the budget), 30, 20
    assert plan_micro_batches([group], 30, 1, split_groups=False) == [[(GroupPart(0, (0, 1, 2, 3, 4)),)]]


def test_each_part_of_a_split_group_carries_the_prompt():
    groups = [make_group(0, [1, 2, 3], [[10, 11], [20, 21]])]
    plan = plan_micro_batches([measure(groups[0])], 4, 1)
    batches = [pack(groups, micro_batch) for micro_batch in plan[0]]
    assert [batch.tokens.tolist() for batch in batches] == [[1, 2, 3, 10], [1, 2, 3, 20]]
    assert [batch.rollout_order for batch in batches] == [((0, 0),), ((0, 1),)]


def test_left_out_rollouts_are_neither_planned_nor_packed():
    group = make_group(0, [1], [[10, 11], [20], [30, 31]])
    (micro_batch,) = plan_micro_batches([measure(group, [0, 2])], 100, 1)[0]
    batch = pack({0: group}, micro_batch)
    assert batch.rollout_order == ((0, 0), (0, 2)) and batch.targets.tolist() == [10, 11, 30, 31]


def test_no_groups_still_give_each_rank_one_round():
    assert plan_micro_batches([], 10, 3) == [[()], [()], [()]]


def test_user_mistakes_are_refused():
    with pytest.raises(ValueError, match="group 1 has an empty prompt"):
        plan_micro_batches([lengths(1, 1), lengths(0, 1)], 10, 1)
    with pytest.raises(ValueError, match="max_tokens=0"):
        plan_micro_batches([], 0, 1)
    with pytest.raises(ValueError, match="one rank in 0 to 1 per group"):
        plan_micro_batches([lengths(1, 1)], 10, 2, owners=[2])
    with pytest.raises(ValueError, match="prompt of group 5 is empty"):
        pack([make_group(5, [], [[1]])], (GroupPart(0, (0,)),))
    with pytest.raises(ValueError, match="pad_multiple=0"):
        pack([], (), pad_multiple=0)


group_lengths = st.builds(
    lambda prompt, responses: lengths(prompt, *responses),
    st.integers(1, 30),
    st.lists(st.integers(0, 25), min_size=1, max_size=8),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(group_lengths, max_size=12), st.integers(1, 80), st.integers(1, 4))
def test_plan_keeps_its_promises(groups, max_tokens, num_ranks):
    plan = plan_micro_batches(groups, max_tokens, num_ranks)
    assert plan == plan_micro_batches(list(groups), max_tokens, num_ranks)
    assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    seen = []
    for micro_batches in plan:
        for micro_batch in micro_batches:
            size = 0
            for part in micro_batch:
                assert part.samples
                seen += [(part.group, sample) for sample in part.samples]
                fed = [max(groups[part.group].responses[sample] - 1, 0) for sample in part.samples]
                size += groups[part.group].prompt + sum(fed)
            alone = len(micro_batch) == 1 and len(micro_batch[0].samples) == 1
            too_long_prompt = len(micro_batch) == 1 and sum(fed) == 0
            assert size <= max_tokens or alone or too_long_prompt
    assert sorted(seen) == [(at, sample) for at, group in enumerate(groups) for sample in range(len(group.responses))]


@settings(max_examples=200, deadline=None)
@given(st.lists(group_lengths, max_size=12), st.integers(1, 5))
def test_splitting_over_ranks_only_ever_shortens_the_longest(groups, num_ranks):
    plan = plan_micro_batches(groups, 10**6, num_ranks)
    whole = plan_micro_batches(groups, 10**6, num_ranks, split_groups=False)
    assert max(loads(plan, groups)) <= max(loads(whole, groups))
    for rank in plan:
        (micro_batch,) = rank
        assert len({part.group for part in micro_batch}) == len(micro_batch)  # a prompt once on a rank


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6),  # two tokens: many prompts begin alike
            st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4),
        ),
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_every_scored_row_sees_exactly_its_own_sequence(records, pad_multiple):
    """Walks the blocks as attention does and rebuilds each (prefix, target) pair of the separate sequences."""
    groups = [make_group(at, prompt, responses) for at, (prompt, responses) in enumerate(records)]
    batch = pack(groups, whole(*groups), pad_multiple=pad_multiple)
    assert batch.num_tokens % pad_multiple == 0
    context: dict[int, list[int]] = {}
    row = 0
    for block in batch.blocks:
        assert block.start == row
        beginning = batch.tokens[: block.beginning_length].tolist()
        prompt = beginning + batch.tokens[row : row + block.prompt_length].tolist()
        context |= {row + at: prompt[: len(beginning) + at + 1] for at in range(block.prompt_length)}
        row += block.prompt_length
        for start, length in zip(block.response_starts, block.response_lengths, strict=True):
            assert start == row
            context |= {start + at: prompt + batch.tokens[start : start + at + 1].tolist() for at in range(length)}
            row += length
    assert row == batch.num_tokens
    assert all(batch.positions[at] == len(prefix) - 1 for at, prefix in context.items())
    got = [(context[at], target) for at, target in zip(batch.scored_rows.tolist(), batch.targets.tolist(), strict=True)]
    want = [(prompt + ids[:at], ids[at]) for prompt, answers in records for ids in answers for at in range(len(ids))]
    assert got == want
