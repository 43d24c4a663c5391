"""Drawing tokens: the right frequencies, exact restrictions, log-probs of the tempered distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mc.rollout.random_numbers import uniforms
from grpo_mc.rollout.sampling import SamplingParams, invert_cdf, restrict, sample


def _uniform(count: int, seed: int = 0) -> Tensor:
    zeros = np.zeros(count, np.int64)
    return torch.from_numpy(uniforms(seed, zeros, zeros, np.arange(count)))


def _draws(logits: Tensor, count: int, **options: Any) -> tuple[Tensor, Tensor]:
    return sample(logits.expand(count, -1), _uniform(count), SamplingParams(**options))


def _assert_frequencies(tokens: Tensor, probs: Tensor) -> None:
    """Chi-square over entries expected at least 5 times, within 4 standard deviations of its mean."""
    expected = probs.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    kept = expected >= 5
    freedom = max(1, int(kept.sum()) - 1)
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), f"{chi_square} for {freedom} degrees of freedom"


@pytest.mark.parametrize("vocab_size", [2, 3, 100, 1025])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(vocab_size: int, temperature: float) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    tokens, _ = _draws(logits, 4000, temperature=temperature)
    _assert_frequencies(tokens, (logits.double() / temperature).softmax(-1))


@pytest.mark.parametrize("vocab_size", [1, 2, 1023, 1024, 1025, 2048, 2500])
def test_evenly_spaced_uniforms_give_even_counts(vocab_size: int) -> None:
    """With uniforms (i + 1/2) / N every count is N * p to within one draw, and tokens rise with the uniform."""
    weights = torch.rand(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) ** 4
    weights[vocab_size // 3 : vocab_size // 2] = 0.0
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    tokens = invert_cdf(weights[None], uniform, torch.zeros(2000, dtype=torch.int64))
    assert (tokens.diff() >= 0).all()
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert (counts - 2000 * weights.double() / weights.double().sum()).abs().max() < 1.01
    assert counts[weights == 0].sum() == 0


@pytest.mark.parametrize(("temperature", "expected"), [
    (1.0, (-0.126928, -2.126928)), (0.5, (-0.018150, -4.018150)), (2.0, (-0.313262, -1.313262)),
])  # fmt: skip
def test_logprobs_are_tempered(temperature: float, expected: tuple[float, float]) -> None:
    """H05: what is reported is the log-prob under the distribution that was sampled from."""
    tokens, logprobs = _draws(torch.tensor([2.0, 0.0]), 2000, temperature=temperature)
    assert set(tokens.tolist()) == {0, 1}
    for token in (0, 1):
        found = logprobs[tokens == token]
        assert (found - expected[token]).abs().max() < 2e-6


def test_restrictions_do_not_enter_the_logprob() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    tokens, logprobs = _draws(logits, 500, top_k=2)
    assert set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens], atol=1e-6)


PROBS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [
    (0, 1.0, [0, 1, 2, 3, 4]), (5, 1.0, [0, 1, 2, 3, 4]), (99, 1.0, [0, 1, 2, 3, 4]), (1, 1.0, [1]),
    (3, 1.0, [1, 3, 4]),
    (0, 1e-9, [1]), (0, 0.39, [1]), (0, 0.41, [1, 3]), (0, 0.69, [1, 3]), (0, 0.71, [1, 3, 4]), (0, 0.94, [0, 1, 3, 4]),
    (0, 0.96, [0, 1, 2, 3, 4]),
    (3, 0.9, [1, 3, 4]),   # 0.4 and 0.3 make 0.7 < 0.9 * 0.85
    (3, 0.8, [1, 3]),      # 0.8 * 0.85 = 0.68 < 0.7: top-p acts on what top-k left
    (2, 0.5, [1]),         # 0.5 * 0.7 = 0.35 < 0.4
])  # fmt: skip
def test_restrict_by_hand(top_k: int, top_p: float, kept: list[int]) -> None:
    left = restrict(PROBS.clone(), top_k, top_p)
    assert left[0].nonzero()[:, 0].tolist() == kept
    assert torch.equal(left[0, kept], PROBS[0, kept])


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [
    (2, 1.0, [1, 2]), (3, 1.0, [1, 2, 3]), (4, 1.0, [0, 1, 2, 3]), (0, 0.25, [1]), (0, 0.5, [1, 2]),
    (0, 0.8, [1, 2, 3]),
])  # fmt: skip
def test_ties_go_to_the_lower_token(top_k: int, top_p: float, kept: list[int]) -> None:
    probs = torch.tensor([[0.0625, 0.28125, 0.28125, 0.28125, 0.0625, 0.03125]])
    assert restrict(probs, top_k, top_p)[0].nonzero()[:, 0].tolist() == kept


def _restrict_slowly(row: list[float], top_k: int, top_p: float) -> list[int]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = order[:top_k] if top_k else order
    total, mass, kept = sum(row[token] for token in order), 0.0, []
    for token in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept.append(token)
        mass += row[token]
    return sorted(kept)


@pytest.mark.parametrize("top_k", [0, 1, 7, 600])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_restrict_against_the_plain_form(top_k: int, top_p: float, spread: float) -> None:
    """Flat rows (many ties) and peaked ones, over a vocabulary larger than any shortcut's first look."""
    generator = torch.Generator().manual_seed(3)
    probs = (torch.randn(4, 3000, generator=generator).round(decimals=1) * spread).softmax(-1)
    left = restrict(probs.clone(), top_k, top_p)
    for row in range(len(probs)):
        expected = _restrict_slowly(probs[row].tolist(), top_k, top_p)
        found = left[row].nonzero()[:, 0].tolist()
        # A sum that falls on the edge within rounding may keep one token more or less.
        assert abs(len(found) - len(expected)) <= (top_p < 1.0) and set(found[:1]) == set(expected[:1])
        assert set(found) <= set(expected) or set(expected) <= set(found)
        assert torch.equal(left[row, found], probs[row, found])


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.7}])
def test_restricted_frequencies(options: dict[str, Any]) -> None:
    logits = PROBS[0].log()
    left = restrict(PROBS.clone(), options.get("top_k", 0), options.get("top_p", 1.0))[0]
    tokens, _ = _draws(logits, 10_000, **options)
    _assert_frequencies(tokens, left / left.sum())


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, -1.0, -2.0, -3.0]])
    tokens, logprobs = sample(logits, _uniform(2), SamplingParams(temperature=0.0, top_p=0.1))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]], atol=1e-6)


def test_excluded_tokens_are_never_drawn() -> None:
    """-inf logits: probability 0, wherever the uniform falls, also when they end a block or fill a whole one."""
    logits = torch.full((3000,), -math.inf)
    logits[[5, 1500, 2047]] = torch.tensor([0.0, 1.0, 2.0])
    ends = torch.tensor([1e-300, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(4, -1), ends, SamplingParams())
    assert tokens[0] == tokens[1] == 5 and tokens[3] == 2047
    tokens, logprobs = _draws(logits, 3000)
    assert set(tokens.tolist()) == {5, 1500, 2047} and torch.isfinite(logprobs).all()
    _assert_frequencies(tokens, logits.softmax(-1))


def test_the_largest_uniform_stays_inside_the_vocabulary() -> None:
    """A target that rounds up to the whole sum must not fall on the padding behind the last token."""
    weights = torch.zeros(2, 1030)
    weights[0, :3] = torch.tensor([0.1, 0.2, 0.3])
    weights[1, 1029] = 1e-30
    for value in (1.0, 1 - 2.0**-53, 1 - 2.0**-40):
        uniform = torch.full((2,), value, dtype=torch.float64)
        assert invert_cdf(weights, uniform, torch.arange(2)).tolist() == [2, 1029]


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_extreme_logits(scale: float) -> None:
    tokens, logprobs = _draws(torch.tensor([-1.0, 1.0, 0.5]) * scale, 50)
    assert set(tokens.tolist()) == {1} and set(logprobs.tolist()) == {0.0}


def test_bfloat16_logits_are_computed_in_float32() -> None:
    """H09: the log-prob of a bf16 row is that of its values in float32."""
    logits = (torch.randn(8, 5000, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    tokens, logprobs = sample(logits, _uniform(8), SamplingParams(temperature=0.7))
    exact = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - exact).abs().max() < 2e-6
    wide, _ = sample(logits.float(), _uniform(8), SamplingParams(temperature=0.7))
    assert torch.equal(tokens, wide)


def test_vocabulary_of_one() -> None:
    tokens, logprobs = _draws(torch.tensor([-7.5]), 5, top_k=1, top_p=0.5)
    assert tokens.tolist() == [0] * 5 and logprobs.tolist() == [0.0] * 5


def test_several_draws_from_one_row() -> None:
    logits, uniform = torch.randn(3, 2000, generator=torch.Generator().manual_seed(4)) * 2, _uniform(7)
    rows = torch.tensor([2, 0, 0, 1, 2, 2, 0])
    for options in ({}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9, "temperature": 0.5}):
        params = SamplingParams(**options)
        shared, spread = sample(logits, uniform, params, rows), sample(logits[rows], uniform, params)
        assert torch.equal(shared[0], spread[0]) and torch.equal(shared[1], spread[1])


def test_no_rows() -> None:
    tokens, logprobs = sample(torch.zeros(0, 9), _uniform(0), SamplingParams())
    assert tokens.shape == logprobs.shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(ValueError, match="NaN or .inf"):
        sample(logits, _uniform(3), SamplingParams(temperature=temperature))


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    logits = torch.randn(6, 4000, generator=torch.Generator().manual_seed(2)) * 3
    uniform = _uniform(6)
    together = sample(logits, uniform, SamplingParams(temperature=1.3))
    for row in range(6):
        alone = sample(logits[row : row + 1], uniform[row : row + 1], SamplingParams(temperature=1.3))
        assert alone[0] == together[0][row] and alone[1] == together[1][row]


@pytest.mark.parametrize(("options", "named"), [
    ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"stop": ("a", "")}, "stop"),
])  # fmt: skip
def test_impossible_parameters_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**options)
