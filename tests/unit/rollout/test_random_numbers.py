"""Philox against the published known answers, and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_mc.rollout import random_numbers
from grpo_mc.rollout.random_numbers import philox, uniforms

# kat_vectors of Random123 1.14: philox 4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _draw(seed: int, group: int, sample: int, position: int) -> float:
    return float(uniforms(seed, np.array([group]), np.array([sample]), np.array([position]))[0])


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox(tuple(np.array([word], np.uint64) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in words) == expected


def test_known_answers_side_by_side() -> None:
    """Rows do not mix: the third vector among others under its key gives the same words."""
    counter, key, expected = KNOWN[2]
    rows = tuple(np.array([7, word, 0], np.uint64) for word in counter)
    assert tuple(int(word[1]) for word in philox(rows, key)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_uniforms_exclude_both_ends(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """All bits set must not round up to 1, nor all bits clear give 0."""
    full = np.array([word], np.uint64)
    monkeypatch.setattr(random_numbers, "philox", lambda counter, key: (full, full, full, full))
    assert 0.0 < _draw(0, 0, 0, 0) < 1.0


def test_a_number_depends_on_its_own_key_only() -> None:
    rng = np.random.default_rng(0)
    groups, samples, positions = rng.integers(0, 2**40, 500), rng.integers(0, 64, 500), rng.integers(0, 4096, 500)
    together = uniforms(11, groups, samples, positions)
    shuffled = rng.permutation(500)
    assert np.array_equal(uniforms(11, groups[shuffled], samples[shuffled], positions[shuffled]), together[shuffled])
    alone = [_draw(11, *map(int, row)) for row in zip(groups, samples, positions, strict=True)]
    assert alone == together.tolist()


def test_every_part_of_the_key_counts() -> None:
    base = _draw(1, 2, 3, 4)
    changed = [_draw(2, 2, 3, 4), _draw(1, 3, 3, 4), _draw(1, 2, 4, 4), _draw(1, 2, 3, 5)]
    changed += [_draw(1 + 2**32, 2, 3, 4), _draw(1, 2 + 2**32, 3, 4)]
    assert len({base, *changed}) == 7
    assert _draw(1 + 2**64, 2, 3, 4) == base  # the seed counts modulo 2^64
    assert 0.0 < _draw(-1, 0, 0, 0) < 1.0


def test_moments_and_correlation() -> None:
    at = np.arange(40_000)
    draws = uniforms(5, at // 1000, at % 1000 // 100, at % 100)
    assert abs(draws.mean() - 0.5) < 0.006 and abs(draws.var() - 1 / 12) < 0.002
    counts = np.bincount((draws * 20).astype(int), minlength=20)
    assert ((counts - 2000) ** 2 / 2000).sum() < 45.3  # chi-square, 19 degrees of freedom, p = 0.0006
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_no_rows() -> None:
    nobody = np.zeros(0, np.int64)
    assert uniforms(0, nobody, nobody, nobody).shape == (0,)
