"""Prompts that begin alike are computed once, and nobody can tell from the responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mc.rollout.engine import Request
from grpo_mc.rollout.kv_cache import KVCache
from grpo_mc.rollout.prefill import MIN_SHARED, common_beginnings, plan_prefill
from grpo_mc.rollout.sampling import SamplingParams
from helpers.engines import tokens_of, trainer_logprobs

PARAMS = SamplingParams(max_new_tokens=6)


def prompts_with(common: int, rests: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Prompts of `common` equal tokens, then as many of their own as `rests` says, the first of them different."""
    draw = np.random.default_rng([common, seed])
    head = draw.integers(0, 256, common)
    tails = [np.concatenate([[at], draw.integers(0, 256, rest)])[:rest] for at, rest in enumerate(rests)]
    return [np.concatenate([head, tail]).astype(np.int64) for tail in tails]


def test_hand_worked_clusters() -> None:
    alike = prompts_with(20, [5, 4, 7])  # lengths 25, 24, 27: all from 16 to 31
    other = prompts_with(20, [5], seed=1)
    assert common_beginnings([alike[0], other[0], alike[1], alike[2]]) == [(20, [0, 2, 3]), (25, [1])]


@pytest.mark.parametrize(
    ("rests", "common", "expected"),
    [
        ([3, 3], MIN_SHARED - 1, [(MIN_SHARED + 2, [0]), (MIN_SHARED + 2, [1])]),  # too little in common
        ([0, 4], 20, [(19, [0, 1])]),  # one is the beginning of the other: it keeps its last token
        ([1, 20], 20, [(21, [0]), (40, [1])]),  # lengths 21 and 40 are more than a power of two apart
        ([5], 20, [(25, [0])]),
    ],
)
def test_edges_of_clusters(rests: list[int], common: int, expected: list[tuple[int, list[int]]]) -> None:
    assert common_beginnings(prompts_with(common, rests)) == expected


def test_equal_prompts_keep_one_token_each() -> None:
    (prompt,) = prompts_with(20, [3])
    assert common_beginnings([prompt, prompt, prompt]) == [(22, [0, 1, 2])]


@pytest.mark.parametrize("seed", range(5))
def test_fuzz_every_token_of_every_prompt_has_its_place(seed: int) -> None:
    """Following rows and copies, each prompt's slots hold its own tokens in order."""
    draw = np.random.default_rng(seed)
    pools = [draw.integers(0, 3, 60) for _ in range(3)]  # few tokens, so that prompts agree for a while
    prompts = [
        np.concatenate([pools[draw.integers(3)][: draw.integers(1, 40)], draw.integers(0, 3, draw.integers(0, 30))])
        for _ in range(30)
    ]
    prompts = [ids if len(ids) else np.zeros(1, np.int64) for ids in prompts]
    cache = KVCache(
        num_layers=2, num_blocks=700, block_size=4, num_kv_heads=1, head_dim=1, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    tables = [cache.admit(len(ids), 1, 1)[0].table for ids in prompts]
    plan = plan_prefill(prompts, tables, cache, share=True, device=torch.device("cpu"))
    assert len(plan.tokens) < sum(map(len, prompts))
    value = (plan.tokens * 1000 + plan.positions).float()[:, None, None]
    for layer in range(2):
        cache.write(layer, plan.slots, value, value)
    for source, targets in plan.copies:
        cache.copy_tokens(source, targets)
    for ids, table, last in zip(prompts, tables, plan.last_rows.tolist(), strict=True):
        expected = ids * 1000 + np.arange(len(ids))
        for held in (cache.keys, cache.values):
            stored = held.flatten(1, 2)[:, cache.slots(table, 0, len(ids)), 0, 0]
            assert (stored.numpy() == expected).all()
        assert plan.tokens[last] == ids[-1] and plan.positions[last] == len(ids) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("kv_block_size", [4, 16])
def test_responses_are_those_of_prompts_alone(
    family: str, kv_block_size: int, make_engine: Callable[..., Any], policy: Callable[..., Any], mesh: Any
) -> None:
    prompts = [*prompts_with(21, [1, 5, 4, 8]), *prompts_with(9, [3]), *prompts_with(40, [6, 7])]
    requests = [Request(at, ids, (0, 1, 2)) for at, ids in enumerate(prompts)]
    engine = make_engine(family, kv_block_size=kv_block_size)
    fed = count_rows(engine)
    together = engine.generate(requests, PARAMS)
    assert fed[0] == 21 + (1 + 5 + 4 + 8) + 12 + 40 + (6 + 7)
    alone = {}
    for request in requests:
        alone |= tokens_of(make_engine(family).generate([request], PARAMS))
    assert tokens_of(together) == alone
    scored = trainer_logprobs(policy(family)[0], mesh, requests, together, 1.0)
    for response in together:
        expected = scored[response.group_id, response.sample_index]
        assert np.abs(np.array(response.logprobs) - expected).max() < 1e-5


def test_batch_invariant_sampling_shares_nothing(make_engine: Callable[..., Any]) -> None:
    """A prompt's bits would otherwise depend on who else begins like it."""
    requests = [Request(at, ids, (0,)) for at, ids in enumerate(prompts_with(21, [3, 4]))]
    engine = make_engine(batch_invariant=True)
    fed = count_rows(engine)
    engine.generate(requests, PARAMS)
    assert fed[0] == 21 * 2 + 3 + 4


def count_rows(engine: Any) -> list[int]:
    """The tokens that each forward pass of the engine is fed, filled while it runs."""
    fed: list[int] = []
    draw = engine.draw

    def counted(tokens: Any, *args: Any) -> Any:
        fed.append(len(tokens))
        return draw(tokens, *args)

    engine.draw = counted
    return fed
