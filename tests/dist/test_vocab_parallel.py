"""Log-probs over a vocabulary that is split over ranks: equal to the whole one, padding never counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.compare import assert_close
from helpers.processes import run_distributed

pytestmark = pytest.mark.dist

H19_LOGITS = {"zero": 0.0, "fifty": 50.0, "minus fifty": -50.0, "inf": math.inf, "nan": math.nan}
"""What the padding columns hold."""
RANDOM = [  # (rows, real vocabulary, temperature, dtype, scale of the logits)
    (7, 11, 1.0, torch.float32, 3.0),
    (7, 11, 0.5, torch.float32, 30.0),
    (3, 1, 1.0, torch.float32, 1.0),  # the second rank holds padding alone
    (0, 11, 1.0, torch.float32, 1.0),
    (5, 3001, 2.0, torch.float32, 1000.0),
    (5, 515, 0.7, torch.bfloat16, 8.0),
    (6, 12, 1.3, torch.float64, 5.0),
]


def whole(case: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [S, V], targets [S], and random gradients of log-probs and entropies [2, S]; the same on every rank."""
    rows, vocab, _, dtype, scale = RANDOM[case]
    draw = torch.Generator().manual_seed(case)
    logits = (torch.randn(rows, vocab, generator=draw) * scale).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=draw), torch.randn(2, rows, generator=draw)


def on_shard(logits: Tensor, targets: Tensor, temperature: float, weights: Tensor, padding: float) -> list[Tensor]:
    """(logprobs, entropy, gradient of this rank's real columns) with the vocabulary padded to 8, 16, ... a rank."""
    import torch.distributed as dist

    from grpo_mc.megatron.logprobs import vocab_parallel_logprobs

    rank, ranks = dist.get_rank(), dist.get_world_size()
    vocab = logits.shape[1]
    width = -(-vocab // ranks)
    padded = torch.full((len(logits), width * ranks), padding, dtype=logits.dtype)
    padded[:, :vocab] = logits
    leaf = padded[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    # Backward writes over the logits it is given, as over the output layer's.
    logprobs, entropy = vocab_parallel_logprobs(
        leaf * 1.0, targets, vocab_start=rank * width, vocab_size=vocab, temperature=temperature, group=dist.group.WORLD
    )
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    assert leaf.grad is not None
    return [logprobs.detach(), entropy.detach(), leaf.grad]


def streamed_on_shard(
    logits: Tensor, targets: Tensor, temperature: float, weights: Tensor, padding: float
) -> list[Tensor]:
    """(logprobs, entropy, gradient of hidden, of this rank's real rows of weight): weight is the unit matrix."""
    import torch.distributed as dist

    from grpo_mc.megatron.logprobs import streamed_logprobs

    rank, ranks = dist.get_rank(), dist.get_world_size()
    vocab = logits.shape[1]
    width = -(-vocab // ranks)
    padded = torch.full((width * ranks, vocab), padding, dtype=logits.dtype)
    padded[:vocab] = torch.eye(vocab, dtype=logits.dtype)
    hidden, weight = logits.clone().requires_grad_(), padded[rank * width : (rank + 1) * width].requires_grad_()
    logprobs, entropy = streamed_logprobs(
        hidden, weight, targets, vocab_start=rank * width, vocab_size=vocab, temperature=temperature,
        group=dist.group.WORLD,
    )  # fmt: skip
    grads = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), [hidden, weight])
    return [logprobs.detach(), entropy.detach(), *grads]


def rank_main() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, padding in H19_LOGITS.items():
        found[name] = on_shard(torch.zeros(2, 5), torch.tensor([0, 4]), 1.0, torch.ones(2, 2), padding)
    for case, (_, _, temperature, _, _) in enumerate(RANDOM):
        found[case] = on_shard(*whole(case)[:2], temperature, whole(case)[2], 50.0)
        found["streamed", case] = streamed_on_shard(*whole(case)[:2], temperature, whole(case)[2], math.nan)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(rank_main, 2, timeout_s=90)


@pytest.mark.parametrize("padding", H19_LOGITS)
def test_padded_columns_do_not_count(padding: str, ranks: list[dict[Any, Any]]) -> None:
    """H19: V = 5 in two shards of 3; the log-prob is -ln 5, and padding gets no gradient."""
    for logprobs, entropy, gradient in (found[padding] for found in ranks):
        assert logprobs.tolist() == pytest.approx([-1.609438] * 2, abs=1e-6)
        assert entropy.tolist() == pytest.approx([1.609438] * 2, abs=1e-6)
        assert bool(torch.isfinite(gradient).all())
    both = torch.cat([found[padding][2] for found in ranks], 1)
    expected = torch.full((2, 5), -0.2)
    expected[0, 0] = expected[1, 4] = 0.8
    assert_close(both[:, :5], expected, 1e-6, padding)
    assert not both[:, 5:].any()


def expected_of(case: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, gradient of the logits [S, V]) in float64."""
    logits, targets, weights = whole(case)
    exact = logits.double().requires_grad_()
    logp = (exact / RANDOM[case][2]).log_softmax(-1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).nan_to_num().sum(-1)
    (gradient,) = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), exact)
    return logprobs.detach(), entropy.detach(), gradient


by_case = pytest.mark.parametrize(
    "case", range(len(RANDOM)), ids=[f"{c[0]}x{c[1]}-{str(c[3])[6:]}-{c[4]:g}" for c in RANDOM]
)


@by_case
def test_streamed_over_shards_gives_what_the_whole_vocabulary_gives(case: int, ranks: list[dict[Any, Any]]) -> None:
    """The padding rows of the weight are NaN, and count for nothing."""
    logprobs, entropy, gradient = expected_of(case)
    logits, tolerance = whole(case)[0], 5e-3 if RANDOM[case][3] == torch.bfloat16 else 1e-5
    for found in ranks:
        assert_close(found["streamed", case][0], logprobs, 1e-6, "log-probs")
        assert_close(found["streamed", case][1], entropy, 1e-5, "entropy")
        assert_close(found["streamed", case][2].float(), gradient.float(), tolerance, "gradient of hidden")
    rows = torch.cat([found["streamed", case][3] for found in ranks])
    assert_close(rows[: RANDOM[case][1]].float(), (gradient.T @ logits.double()).float(), tolerance, "of weight")
    assert not rows[RANDOM[case][1] :].any()


@by_case
def test_shards_give_what_the_whole_vocabulary_gives(case: int, ranks: list[dict[Any, Any]]) -> None:
    _, vocab, _, dtype, _ = RANDOM[case]
    logprobs, entropy, gradient = expected_of(case)
    for found in ranks:
        assert found[case][0].dtype == found[case][1].dtype == torch.float32
        assert_close(found[case][0], logprobs, 1e-6, "log-probs")
        assert_close(found[case][1], entropy, 1e-5, "entropy")
    assert torch.equal(ranks[0][case][0], ranks[1][case][0]), "the ranks must agree to the last bit"
    both = torch.cat([found[case][2] for found in ranks], 1)
    assert both.dtype == dtype
    assert_close(both[:, :vocab].float(), gradient.float(), 5e-3 if dtype == torch.bfloat16 else 1e-5, "gradient")
    assert not both[:, vocab:].any()
