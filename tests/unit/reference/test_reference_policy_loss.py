"""The plain policy_loss and its KL terms, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.ops.policy_loss import METRICS, PolicyLoss
from grpo_mc.ops.reference import policy_loss
from grpo_mc.ops.reference.kl import kl_estimate, kl_term
from grpo_mc.ops.reference.policy_loss import AGGREGATIONS, KINDS

CLIP: dict[str, Any] = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean"}


def loss_of(ratios: list[float], advantages: list[float], **options: Any) -> tuple[PolicyLoss, Tensor]:
    """Loss over tokens with these ratios, one denominator each, and the gradient of the log-probs."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_(True)
    ones = torch.ones(len(ratios), dtype=torch.bool)
    arguments = {**CLIP, "denominator": 1, **options}
    result = policy_loss(logprobs, torch.zeros_like(logprobs), torch.tensor(advantages).double(), ones, **arguments)
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad


def dual_clip_for(kind: str) -> float | None:
    return None if kind in ("cispo", "reinforce") else 3.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (0.5, 1.0, -0.5, True),
        (0.9, 1.0, -0.9, True),
        (1.1, 1.0, -1.1, True),
        (1.5, 1.0, -1.2, False),
        (0.5, -1.0, 0.8, False),
        (0.9, -1.0, 0.9, True),
        (1.1, -1.0, 1.1, True),
        (1.5, -1.0, 1.5, True),
    ],
)
def test_clip_direction_follows_the_sign_of_the_advantage(
    ratio: float, advantage: float, loss: float, has_gradient: bool
) -> None:
    """H11: the gradient is zero exactly where the clipped branch is the smaller one."""
    result, grad = loss_of([ratio], [advantage])
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-9)
    assert float(grad) == pytest.approx(-ratio * advantage if has_gradient else 0.0, abs=1e-9)
    assert float(result.metrics["clip_high_count"]) == (ratio == 1.5 and advantage > 0)
    assert float(result.metrics["clip_low_count"]) == (ratio == 0.5 and advantage < 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_tie_at_the_clip_edge_passes_the_full_gradient(advantage: float) -> None:
    """With both bounds 0 and a ratio of 1 the branches are equal."""
    _, grad = loss_of([1.0], [advantage], clip_low=0.0, clip_high=0.0)
    assert float(grad) == -advantage


def test_dual_clip_bounds_a_negative_advantage_only() -> None:
    """Ratio 5, c = 3: 3 instead of 5 for A = -1, with gradient 0; A = +1 is clipped at 1.2 as ever."""
    result, grad = loss_of([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0], dual_clip=3.0)
    assert float(result.loss.detach()) == pytest.approx(3.0 - 1.2 + 2.0)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert float(result.metrics["dual_clip_count"]) == 1


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    result, grad = loss_of([1.5, 0.5], [2.0, -1.0], kind="cispo")
    assert grad.tolist() == pytest.approx([-1.2 * 2.0, 0.8])
    assert float(result.loss.detach()) == pytest.approx(-1.2 * 2 * math.log(1.5) + 0.8 * math.log(0.5))


def test_reinforce_ignores_the_ratio() -> None:
    result, grad = loss_of([1.5, 0.5], [2.0, -1.0], kind="reinforce")
    assert grad.tolist() == [-2.0, 1.0]
    assert float(result.loss.detach()) == pytest.approx(-2 * math.log(1.5) + math.log(0.5))


def test_gspo_uses_the_geometric_mean_of_the_sequence() -> None:
    """Ratios 4 and 1 have the geometric mean 2; a second sequence of one token has its own."""
    options = {"clip_low": 0.9, "clip_high": 9.0, "cu_seqlens": torch.tensor([0, 2, 3])}
    for kind in ("gspo", "gspo_token"):
        result, grad = loss_of([4.0, 1.0, 0.5], [1.0, 1.0, 1.0], kind=kind, **options)
        assert float(result.loss.detach()) == pytest.approx(-(2 + 2 + 0.5))
        # gspo: both tokens carry both losses, each with the factor 1/2; gspo_token: each its own.
        assert grad.tolist() == pytest.approx([-2, -2, -0.5])
        assert float(result.metrics["ratio_sum"]) == pytest.approx(4.5)


def test_gspo_mean_counts_the_loss_mask_only() -> None:
    logprobs = torch.tensor([math.log(4), 7.0, 0.0])
    mask = torch.tensor([True, False, True])
    result = policy_loss(
        logprobs, torch.zeros(3), torch.ones(3), mask, **{**CLIP, "kind": "gspo", "clip_high": 9.0},
        cu_seqlens=torch.tensor([0, 3]), denominator=2,
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(-2.0)


AGGREGATION_VALUES = {
    # sequences of 1, 3 and 2 tokens with L = -A; groups {0, 1} and {2}; the last token is masked
    "token_mean": -(4 + 1 + 2 + 3 + 6) / 5,
    "sequence_mean_token_mean": -(4 + 2 + 6) / 3,
    "sequence_mean_token_sum": -(4 + 6 + 6) / 3,
    "sequence_mean_token_sum_norm": -(4 + 6 + 6) / (3 * 8),
    "group_mean": -(10 / 4 + 6) / 2,
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation(aggregation: str) -> None:
    denominator = {"token_mean": 5, "group_mean": 2}.get(aggregation, 3)
    zeros = torch.zeros(6)
    result = policy_loss(
        zeros, zeros, torch.tensor([4.0, 1, 2, 3, 6, 100]), torch.tensor([1, 1, 1, 1, 1, 0]),
        **{**CLIP, "aggregation": aggregation}, cu_seqlens=torch.tensor([0, 1, 4, 6]),
        sequence_groups=torch.tensor([7, 7, -2]), norm_length=8, denominator=denominator,
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(AGGREGATION_VALUES[aggregation])


def test_token_mean_is_the_same_over_any_micro_batches() -> None:
    """H12: micro-batches with token losses [4] and [0, 0, 0] give 1.0, not 2.0."""
    advantages, parts = torch.tensor([-4.0, 0, 0, 0]), (slice(0, 1), slice(1, 4))
    whole = torch.zeros(4, requires_grad=True)
    policy_loss(whole, torch.zeros(4), advantages, torch.ones(4), **CLIP, denominator=4).loss.backward()
    pieces = torch.zeros(4, requires_grad=True)
    total = 0.0
    for part in parts:
        size = part.stop - part.start
        result = policy_loss(
            pieces[part], torch.zeros(size), advantages[part], torch.ones(size), **CLIP, denominator=torch.tensor(4)
        )
        result.loss.backward()
        total += float(result.loss.detach())
    assert total == 1.0
    assert whole.grad is not None and pieces.grad is not None
    assert torch.equal(whole.grad, pieces.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_train_on_gives_zero_and_still_runs_backward(kind: str, aggregation: str) -> None:
    """H08: a masked row among others, a masked micro-batch, an empty response, no token at all."""
    poison = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for cu_seqlens, num_tokens in (([0, 2, 3], 3), ([0, 0, 3], 3), ([0], 0), ([0, 0], 0)):
        logprobs = poison[:num_tokens].clone().requires_grad_(True)
        entropy = poison[:num_tokens].clone().requires_grad_(True)
        values = poison[:num_tokens]
        result = policy_loss(
            logprobs, values, values, torch.zeros(num_tokens, dtype=torch.bool), kind=kind, clip_low=0.2,
            clip_high=0.2, dual_clip=dual_clip_for(kind), kl="k3", beta=0.1, ref_logprobs=values, entropy=entropy,
            entropy_coef=0.1, weights=values, cu_seqlens=torch.tensor(cu_seqlens), norm_length=4,
            aggregation=aggregation, sequence_groups=torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64), denominator=0,
        )  # fmt: skip
        result.loss.backward()
        assert float(result.loss.detach()) == 0.0
        assert logprobs.grad is not None and entropy.grad is not None
        assert torch.equal(logprobs.grad, torch.zeros(num_tokens)), logprobs.grad
        assert torch.equal(entropy.grad, torch.zeros(num_tokens))
        assert set(result.metrics) == set(METRICS)
        assert all(float(value) == 0 for value in result.metrics.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_row_among_others_changes_nothing_for_them(aggregation: str) -> None:
    """H08 (a): NaN in the masked row, loss and gradients of the others as if it were not there."""
    lp, old, adv = torch.tensor([0.1, -0.2, 0.3]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    nan = torch.full((2,), float("nan"))
    shared: dict[str, Any] = {**CLIP, "aggregation": aggregation, "norm_length": 4, "denominator": 2}
    alone = lp.clone().requires_grad_(True)
    want = policy_loss(
        alone, old, adv, torch.ones(3), cu_seqlens=torch.tensor([0, 2, 3]), sequence_groups=torch.tensor([0, 1]),
        **shared,
    ).loss  # fmt: skip
    want.backward()
    joined = torch.cat([nan, lp]).requires_grad_(True)
    got = policy_loss(
        joined, torch.cat([nan, old]), torch.cat([nan, adv]), torch.tensor([0, 0, 1, 1, 1]),
        cu_seqlens=torch.tensor([0, 2, 4, 5]), sequence_groups=torch.tensor([0, 0, 1]), **shared,
    ).loss  # fmt: skip
    got.backward()
    assert float(got.detach()) == float(want.detach())
    assert joined.grad is not None and alone.grad is not None
    assert torch.equal(joined.grad, torch.cat([torch.zeros(2), alone.grad]))


def test_nan_in_the_loss_stays_visible() -> None:
    nan = torch.tensor([float("nan")])
    assert math.isnan(policy_loss(nan, torch.zeros(1), torch.ones(1), torch.ones(1), **CLIP, denominator=1).loss)


@pytest.mark.parametrize("log_ratio", [25.0, 100.0, -25.0, -100.0, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_ratio_far_outside_keeps_loss_and_gradient_finite(log_ratio: float, kind: str) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    result = policy_loss(
        logprobs, torch.zeros(1), -torch.ones(1), torch.ones(1), kind=kind, clip_low=0.2, clip_high=0.2, kl="k3",
        kl_gradient="importance", beta=0.1, ref_logprobs=torch.zeros(1), cu_seqlens=torch.tensor([0, 1]),
        aggregation="token_mean", denominator=1,
    )  # fmt: skip
    result.loss.backward()
    assert math.isfinite(float(result.loss.detach()))
    assert logprobs.grad is not None and math.isfinite(float(logprobs.grad))


def test_weights_multiply_the_surrogate_and_nothing_else() -> None:
    """H16's neighbour: 0.01 on the surrogate; KL and entropy keep their size."""
    shared: dict[str, Any] = {**CLIP, "denominator": 1, "kl": "k1", "beta": 0.5, "entropy_coef": 0.25}
    result = policy_loss(
        torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0]), torch.ones(1),
        ref_logprobs=torch.tensor([-3.0]), entropy=torch.tensor([0.5]), weights=torch.tensor([0.01]), **shared,
    )  # fmt: skip
    assert float(result.loss) == pytest.approx(0.01 * -2.0 + 0.5 * 2.0 - 0.25 * 0.5)
    assert float(result.metrics["kl_sum"]) == pytest.approx(2.0)
    assert float(result.metrics["entropy_sum"]) == pytest.approx(0.5)
    assert float(result.metrics["policy_loss_sum"]) == pytest.approx(-0.02)


def test_k3_saturates_and_its_gradient_stays_finite() -> None:
    """H10: d in {0.5, -0.5, 20, 100}; a clamp after exp would make the last gradient NaN."""
    d = torch.tensor([0.5, -0.5, 20.0, 100.0])
    logprobs = torch.zeros(4, requires_grad=True)
    k3 = kl_estimate(logprobs, d, "k3")
    k3.sum().backward()
    assert k3[:2].tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
    assert float(k3[2].detach()) == float(k3[3].detach()) == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad[:2].tolist() == pytest.approx([1 - math.exp(0.5), 1 - math.exp(-0.5)], rel=1e-5)
    assert bool(torch.isfinite(logprobs.grad).all())
    assert math.isnan(kl_estimate(torch.tensor(float("nan")), torch.tensor(0.0), "k3"))


def test_k1_and_k2() -> None:
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert float(kl_estimate(logprobs, ref, "k1")) == 2.0
    assert float(kl_estimate(logprobs, ref, "k2")) == 2.0
    assert float(kl_estimate(logprobs, torch.tensor([-2.0]), "k2")) == 0.5


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k2_gradient_keeps_the_value_of_the_estimator(kind: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, ref = torch.zeros(2), torch.tensor([-1.5, -1.0])
    term = kl_term(logprobs, old, ref, kind, "k2")
    term.sum().backward()
    torch.testing.assert_close(term.detach(), kl_estimate(logprobs.detach(), ref, kind))
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.5, -1.0])


@pytest.mark.parametrize(("kind", "gradient"), [("k1", "k2"), ("k3", "k2"), ("k1", "importance"), ("k3", "importance")])
def test_gradient_forms_have_the_exact_expectation_on_policy(kind: str, gradient: str) -> None:
    """Sum over all tokens of p(token) * grad(term) = the gradient of KL(p || ref), by enumeration of 4 tokens.

    The weight p is constant: it is the sampling, not the objective.
    """
    z = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, -0.3, 0.9], dtype=torch.float64).log_softmax(0)
    logp = z.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    (want,) = torch.autograd.grad(exact, z, retain_graph=True)
    term = kl_term(logp, logp.detach(), ref, kind, gradient)
    (got,) = torch.autograd.grad((logp.exp().detach() * term).sum(), z)
    torch.testing.assert_close(got, want)


def test_k1_differentiated_directly_has_zero_expected_gradient() -> None:
    z = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    logp = z.log_softmax(0)
    term = kl_term(logp, logp.detach(), torch.zeros_like(logp), "k1", "direct")
    (got,) = torch.autograd.grad((logp.exp().detach() * term).sum(), z)
    assert float(got.abs().max()) < 1e-12


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("gradient", ["direct", "importance"])
def test_gradients_by_finite_differences(kind: str, aggregation: str, gradient: str) -> None:
    """gspo_token and kl_gradient k2 stop gradients by definition and have no finite differences."""
    generator = torch.Generator().manual_seed(3)
    lp, old, ref, adv, entropy, w = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(6))
    cispo_weight = kind == "cispo"  # its coefficient is constant: keep the ratio clipped so that differences agree
    old = lp - 3 if cispo_weight else lp - 0.05 * old
    result_inputs = (lp.requires_grad_(True), entropy.requires_grad_(True))

    def run(logprobs: Tensor, entropies: Tensor) -> Tensor:
        return policy_loss(
            logprobs, old.detach(), adv, torch.tensor([1, 1, 0, 1, 1, 1, 1]), kind=kind, clip_low=0.2, clip_high=0.3,
            dual_clip=dual_clip_for(kind), kl="k3", kl_gradient=gradient, beta=0.1, ref_logprobs=ref, entropy=entropies,
            entropy_coef=0.05, weights=w, cu_seqlens=torch.tensor([0, 3, 3, 7]), aggregation=aggregation,
            sequence_groups=torch.tensor([0, 1, 0]), norm_length=4, denominator=2.5,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(run, result_inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ppo"}, "kind is 'ppo'"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
        ({"kl": "k4", "ref_logprobs": torch.zeros(2)}, "kl is 'k4'"),
        ({"kl_gradient": "none"}, "kl_gradient is 'none'"),
        ({"kl": "k3"}, "kl 'k3' alone"),
        ({"ref_logprobs": torch.zeros(2)}, "ref_logprobs alone"),
        ({"beta": 0.1}, "kl is None"),
        ({"entropy_coef": 0.1}, "entropy is None"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "kind is 'cispo'"),
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"kind": "gspo"}, "needs cu_seqlens"),
        ({"aggregation": "group_mean", "cu_seqlens": torch.tensor([0, 2])}, "needs sequence_groups"),
        ({"aggregation": "sequence_mean_token_sum_norm", "cu_seqlens": torch.tensor([0, 2])}, "norm_length"),
        ({"cu_seqlens": torch.tensor([0, 1])}, "end with 2"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, "not decrease"),
        ({"weights": torch.zeros(3)}, r"weights is \[3\]"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        policy_loss(zeros, zeros, zeros, torch.ones(2), **{**CLIP, "denominator": 1, **options})
