"""The plain token_logprobs, its shard twin and its backward, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_mc.ops.reference import token_logprob_stats, token_logprobs, token_logprobs_backward


def test_row_t_scores_token_t_plus_1() -> None:
    """H04: the last row is unused, token 0 has no score."""
    tokens = torch.tensor([0, 1, 2])
    logits = torch.tensor([[0.0, 2, 0], [0, 0, 3], [1, 0, 0]])
    got = token_logprobs(logits[:-1], tokens[1:])
    assert isinstance(got, Tensor)
    assert got.tolist() == pytest.approx([-0.239545, -0.094923], abs=1e-6)
    unshifted = token_logprobs(logits, tokens)
    assert isinstance(unshifted, Tensor)
    assert unshifted.tolist() == pytest.approx([-2.239545, -3.094923, -1.551445], abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [-0.126928, -2.126928]), (0.5, [-0.018150, -4.018150]), (2.0, [-0.313262, -1.313262])],
)
def test_temperature_divides_the_logits(temperature: float, expected: list[float]) -> None:
    """H05."""
    got = token_logprobs(torch.tensor([[2.0, 0], [2, 0]]), torch.tensor([0, 1]), temperature=temperature)
    assert isinstance(got, Tensor)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_missing_temperature_moves_the_ratio() -> None:
    """H05: sampling at 0.5 and scoring at 1 gives a ratio of 0.897, not 1."""
    logits, target = torch.tensor([[2.0, 0]]), torch.tensor([0])
    cold, plain = token_logprobs(logits, target, temperature=0.5), token_logprobs(logits, target)
    assert isinstance(cold, Tensor) and isinstance(plain, Tensor)
    assert float((plain - cold).exp()) == pytest.approx(0.8969, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    """H05."""
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature=temperature)


def test_bf16_logits_give_float32_logprobs() -> None:
    """H09: -ln 151936, which bf16 would round to -11.9375."""
    got = token_logprobs(torch.zeros(1, 151936, dtype=torch.bfloat16), torch.tensor([7]))
    assert isinstance(got, Tensor) and got.dtype == torch.float32
    assert float(got) == pytest.approx(-11.931215, abs=2e-6)


def test_bf16_logits_are_scored_as_exactly_as_their_float64_copy() -> None:
    """H09: also for an unlikely token, log-prob about -30."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 4096, generator=generator) * 4).bfloat16()
    logits[0, 5] = -20
    targets = torch.tensor([5, 1, 2, 3, 4, 5, 6, 7])
    got, want = token_logprobs(logits, targets), token_logprobs(logits.double(), targets)
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    assert float(want[0]) < -28
    assert float((got.double() - want).abs().max()) <= 1e-5


@pytest.mark.parametrize("padding", [0.0, 50.0, float("inf"), float("nan")])
def test_padded_vocabulary_never_counts(padding: float) -> None:
    """H19: -ln 5 and ln 5, never -ln 8, whatever the padding holds; its gradient is 0."""
    logits = torch.zeros(2, 8)
    logits[:, 5:] = padding
    logits.requires_grad_(True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 4]), vocab_size=5, with_entropy=True)
    assert logprobs.tolist() == pytest.approx([-1.609438] * 2, abs=1e-6)
    assert entropy.tolist() == pytest.approx([1.609438] * 2, abs=1e-6)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[:, 5:].abs().max() == 0 and bool(torch.isfinite(logits.grad).all())


def test_masked_logit_of_minus_infinity_keeps_entropy_and_gradient_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), with_entropy=True)
    assert float(entropy.detach()) == pytest.approx(math.log(2), abs=1e-6)
    (logprobs + entropy).sum().backward()
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([-0.5, 0.5, 0.0], abs=1e-6)


def merge(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """The merge of the module's docstring: (logprobs, entropy, lse)."""
    top = torch.stack([part[0] for part in parts]).max(0).values
    total, weighted, target = (torch.zeros_like(top) for _ in range(3))
    for maximum, sumexp, sum_p_logit, target_logit in parts:
        has_columns = maximum > -math.inf
        gap = torch.where(has_columns, maximum - top, torch.zeros_like(top))
        factor = torch.where(has_columns, gap.exp(), torch.zeros_like(top))
        total = total + factor * sumexp
        weighted = weighted + factor * (sum_p_logit + gap * sumexp)
        target = target + target_logit
    lse = top + total.log()
    return target - lse, total.log() - weighted / total, lse


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("padding", [0.0, 50.0])
def test_shards_of_a_padded_vocabulary_merge_to_the_whole(num_shards: int, padding: float) -> None:
    """H19: V = 5 padded to 8; with 4 shards the last one holds padding only."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    logits[:, 5:] = padding
    targets = torch.tensor([0, 1, 2, 3, 4, 4])
    want = token_logprobs(logits, targets, temperature=0.7, vocab_size=5, with_entropy=True)
    width = 8 // num_shards
    options = {"vocab_size": 5, "temperature": 0.7}
    shards = [(logits[:, s * width : (s + 1) * width], s * width) for s in range(num_shards)]
    parts = [token_logprob_stats(shard, targets, vocab_start=start, **options) for shard, start in shards]  # type: ignore[arg-type]
    logprobs, entropy, lse = merge(parts)
    torch.testing.assert_close(logprobs, want[0])
    torch.testing.assert_close(entropy, want[1])

    whole = logits.clone().requires_grad_(True)
    out = token_logprobs(whole, targets, temperature=0.7, vocab_size=5, with_entropy=True)
    grads = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2)]
    torch.autograd.backward([out[0], out[1]], grads)
    pieces = [
        token_logprobs_backward(
            shard.clone(),
            targets,
            lse,
            entropy,
            grads[0],
            grads[1],
            vocab_start=start,
            inplace=True,
            **options,  # type: ignore[arg-type]
        )
        for shard, start in shards
    ]
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat(pieces, 1), whole.grad)


def test_backward_in_place_writes_over_the_logits() -> None:
    logits, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    lse = torch.logsumexp(logits, -1)
    arguments = (targets, lse, None, torch.ones(3), None)
    options = {"temperature": 1.0, "vocab_start": 0, "vocab_size": 4}
    fresh = token_logprobs_backward(logits, *arguments, inplace=False, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(fresh, torch.nn.functional.one_hot(targets, 4) - logits.softmax(-1))
    inplace = token_logprobs_backward(logits, *arguments, inplace=True, **options)  # type: ignore[arg-type]
    assert inplace.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(logits, fresh)


def test_gradients_by_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 2])

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(x, targets, temperature=1.7, vocab_size=4, with_entropy=True)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(both, (logits,))


def test_no_tokens() -> None:
    got = token_logprobs(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert isinstance(got, Tensor) and got.shape == (0,)


@pytest.mark.parametrize(
    ("targets", "vocab_size", "message"),
    [([3], 3, r"\[3, 3\]"), ([-1], None, r"\[-1, -1\]"), ([0], 5, "vocab_size is 5"), ([0], 0, "vocab_size is 0")],
)
def test_wrong_targets_and_sizes_are_named(targets: list[int], vocab_size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(torch.zeros(1, 4), torch.tensor(targets), vocab_size=vocab_size)
