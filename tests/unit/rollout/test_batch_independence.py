"""A response is the same whatever shares its batch, and its log-probs are the trainer's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_mc.rollout.sampling import SamplingParams
from helpers.engines import make_requests, tokens_of, trainer_logprobs

LENGTHS = [1, 4, 7, 8, 16, 21]
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def usual(make_engine: Callable[..., Any]) -> dict[tuple[int, int], list[int]]:
    """Tokens of six groups of three under the default options."""
    return tokens_of(make_engine().generate(make_requests(LENGTHS, 3), PARAMS))


@pytest.mark.parametrize("max_batch_rows", [1, 3, 256])
@pytest.mark.parametrize("kv_block_size", [1, 4, 16])
def test_batch_and_block_size_do_not_matter(
    max_batch_rows: int, kv_block_size: int, make_engine: Callable[..., Any], usual: Any
) -> None:
    engine = make_engine(max_batch_rows=max_batch_rows, kv_block_size=kv_block_size)
    assert tokens_of(engine.generate(make_requests(LENGTHS, 3), PARAMS)) == usual


def test_the_company_and_the_order_do_not_matter(make_engine: Callable[..., Any], usual: Any) -> None:
    requests = make_requests(LENGTHS, 3)
    for request in requests:
        alone = tokens_of(make_engine().generate([request], PARAMS))
        assert alone == {key: ids for key, ids in usual.items() if key[0] == request.group_id}
    others = make_requests([2, 9, 30], 4, first_id=100)
    mixed = [*requests, *others]
    random.Random(0).shuffle(mixed)
    found = tokens_of(make_engine(max_batch_rows=7).generate(mixed, PARAMS))
    assert {key: ids for key, ids in found.items() if key[0] < 100} == usual


def test_one_sample_alone_is_the_one_of_the_group(make_engine: Callable[..., Any], usual: Any) -> None:
    from dataclasses import replace

    requests = [replace(request, samples=(2,)) for request in make_requests(LENGTHS, 3)]
    found = tokens_of(make_engine().generate(requests, PARAMS))
    assert found == {key: ids for key, ids in usual.items() if key[1] == 2}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_equal_the_trainers(
    family: str, temperature: float, make_engine: Callable[..., Any], policy: Callable[..., Any], mesh: Any
) -> None:
    """H05: the on-policy ratio is 1 at every temperature."""
    requests = make_requests([1, 8, 13], 4)
    engine = make_engine(family, kv_block_size=4, max_batch_rows=8)
    responses = engine.generate(requests, SamplingParams(max_new_tokens=12, temperature=temperature))
    scored = trainer_logprobs(policy(family)[0], mesh, requests, responses, temperature)
    for response in responses:
        expected = scored[response.group_id, response.sample_index]
        assert np.abs(np.array(response.logprobs) - expected).max() < 1e-5


def test_logprobs_in_bfloat16_are_near_the_trainers(
    make_engine: Callable[..., Any], policy: Callable[..., Any], mesh: Any
) -> None:
    requests = make_requests([3, 16], 4)
    responses = make_engine(dtype="bf16").generate(requests, SamplingParams(max_new_tokens=12))
    scored = trainer_logprobs(policy(dtype="bf16")[0], mesh, requests, responses, 1.0)
    difference = np.concatenate([np.array(r.logprobs) - scored[r.group_id, r.sample_index] for r in responses])
    assert np.abs(difference).mean() < 0.02 and np.abs(difference).max() < 0.2


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_requests(seed: int, make_engine: Callable[..., Any]) -> None:
    """Random group sizes, lengths, batches and blocks against each group sampled alone."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 8))]
    requests = make_requests(lengths, rng.randint(1, 5))
    params = SamplingParams(max_new_tokens=rng.randint(1, 10), temperature=1.5, top_k=rng.choice([0, 50]))
    engine = make_engine(
        max_batch_rows=rng.randint(1, 9), kv_block_size=rng.randint(1, 9), max_prefill_tokens=rng.randint(1, 60)
    )
    expected = {}
    for request in requests:
        expected |= tokens_of(make_engine().generate([request], params))
    assert tokens_of(engine.generate(requests, params)) == expected
