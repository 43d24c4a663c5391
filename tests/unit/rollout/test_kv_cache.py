"""Accounting of the cache's blocks: nobody's block is anybody else's, and all come back."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_mc.rollout.kv_cache import KVCache, Sequence


def make_cache(num_blocks: int, block_size: int = 4, num_layers: int = 2) -> KVCache:
    return KVCache(
        num_layers=num_layers, num_blocks=num_blocks, block_size=block_size, num_kv_heads=2, head_dim=3,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "responses", "new", "blocks", "shared", "own"),
    [
        (8, 3, 4, 2 + 3 * 1, 2, 1),  # prompt ends at a block's edge: both blocks are shared
        (9, 3, 4, 2 + 3 * 2, 2, 2),  # one token past it: the partly filled block belongs to each response
        (3, 2, 1, 2 * 1, 0, 1),  # shorter than a block: nothing to share
        (1, 1, 1, 1, 0, 1),
        (4, 5, 1, 1 + 5 * 1, 1, 1),
    ],
)
def test_blocks_of_a_group(prompt: int, responses: int, new: int, blocks: int, shared: int, own: int) -> None:
    cache = make_cache(40)
    assert cache.blocks_of_group(prompt, responses, new) == blocks
    sequences = cache.admit(prompt, responses, new)
    assert cache.num_free == 40 - blocks
    assert [(len(s.shared), len(s.own)) for s in sequences] == [(shared, own)] * responses
    assert len({s.shared for s in sequences}) == 1
    assert len(sequences[0].table) * cache.block_size >= prompt + new


def test_shared_blocks_go_back_with_the_last_reader() -> None:
    cache = make_cache(10)
    first, second, third = cache.admit(4, 3, 4)
    cache.release(second)
    cache.release(first)
    assert cache.num_free == 10 - 2  # the shared block and the third response's own
    cache.release(third)
    assert cache.num_free == 10


def _check(cache: KVCache, alive: list[Sequence], num_blocks: int) -> None:
    own = [block for sequence in alive for block in sequence.own]
    shared = {block for sequence in alive for block in sequence.shared}
    assert len(own) == len(set(own)), "one block belongs to two responses"
    assert not shared & set(own), "a shared block is written by a response"
    assert 0 not in shared | set(own), "block 0 is scratch"
    assert cache.num_free == num_blocks - len(own) - len(shared)


@pytest.mark.parametrize("seed", range(5))
def test_fuzz_admit_and_release(seed: int) -> None:
    rng, num_blocks = random.Random(seed), 60
    cache, alive, groups = make_cache(num_blocks, block_size=rng.choice([1, 3, 4])), list[Sequence](), 0
    for _ in range(400):
        prompt, responses, new = rng.randint(1, 14), rng.randint(1, 5), rng.randint(1, 9)
        if rng.random() < 0.5 and cache.blocks_of_group(prompt, responses, new) <= cache.num_free:
            before = cache.num_free
            alive += cache.admit(prompt, responses, new)
            assert before - cache.num_free == cache.blocks_of_group(prompt, responses, new)
            groups += 1
        elif alive:
            cache.release(alive.pop(rng.randrange(len(alive))))
        _check(cache, alive, num_blocks)
    assert groups > 20
    for sequence in alive:
        cache.release(sequence)
    assert cache.num_free == num_blocks


def test_slots_follow_the_table() -> None:
    cache = make_cache(10)
    assert cache.slots((7, 2, 5), 0, 9).tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20]
    assert cache.slots((7, 2, 5), 3, 2).tolist() == [31, 8]
    assert cache.slots((7,), 0, 0).tolist() == []


def test_write_and_copy_block() -> None:
    cache = make_cache(6)
    key = torch.arange(12.0).reshape(2, 2, 3)
    cache.write(1, torch.tensor([9, 6]), key, -key)  # block 2, slot 1; block 1, slot 2
    assert torch.equal(cache.keys[1, 2, 1], key[0]) and torch.equal(cache.values[1, 1, 2], -key[1])
    assert cache.keys[0].abs().sum() == 0 and cache.keys[1].abs().sum() == key.abs().sum()
    cache.copy_block(2, [4, 5])
    for block in (4, 5):
        assert torch.equal(cache.keys[:, block], cache.keys[:, 2])
        assert torch.equal(cache.values[:, block], cache.values[:, 2])
    assert cache.keys[:, [3, 6]].abs().sum() == 0
    cache.copy_block(2, [])
