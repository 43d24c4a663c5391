"""policy_loss: hand-worked numbers, masks, ties, accumulation, metrics, the user's mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_mc import ops
from grpo_mc.ops.policy_loss import METRICS
from grpo_mc.ops.reference.policy_loss import AGGREGATIONS, KINDS
from helpers import cuda_emulator
from helpers.compare import assert_close
from helpers.policy_loss import BASE, compare, make, run, without


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_clip_direction(dtype: torch.dtype) -> None:
    """H11: gradient zero exactly where the clipped branch is strictly smaller."""
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5] * 2, dtype=dtype)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=dtype)
    expected = [-0.5, -0.9, -1.1, -1.2, 0.8, 0.9, 1.1, 1.5]
    for i in range(8):
        logprobs = ratio[i : i + 1].log().requires_grad_()
        mask = torch.ones(1, dtype=torch.bool)
        loss, metrics = ops.policy_loss(logprobs, torch.zeros(1, dtype=dtype), advantages[i : i + 1], mask, **BASE)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(expected[i], abs=1e-6)
        assert (float(logprobs.grad) == 0) == (i in (3, 4))
        assert float(metrics["clip_high_count"]) == (i == 3) and float(metrics["clip_low_count"]) == (i == 4)


def test_a_tie_at_the_clip_edge_passes_the_full_gradient() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    options = {**BASE, "clip_low": 0.0, "clip_high": 0.0}
    loss, metrics = ops.policy_loss(
        logprobs, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.ones(2, dtype=torch.bool), **options
    )
    loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 2.0]
    assert float(metrics["clip_high_count"] + metrics["clip_low_count"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_loss_is_minus_the_mean_advantage_with_its_gradient(kind: str) -> None:
    inputs = without(make([5, 9]), "weights")
    inputs["logprobs"] = inputs["old_logprobs"]
    count = float(inputs["loss_mask"].sum())
    got = run(ops.policy_loss, inputs, **{**BASE, "kind": kind, "denominator": count, "kl": "k3"})
    masked = torch.where(inputs["loss_mask"], inputs["advantages"], 0.0)
    if kind not in ("cispo", "reinforce"):
        assert float(got["loss"]) == pytest.approx(-float(masked.sum()) / count, rel=1e-5)
    if kind != "gspo":
        assert_close(got["grad_logprobs"], -3 * masked / count, 1e-6)
    assert float(got["ratio_sum"]) == pytest.approx(count)


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    logprobs = torch.tensor([math.log(9.0)], requires_grad=True)
    loss, metrics = ops.policy_loss(
        logprobs, torch.zeros(1), torch.tensor([-2.0]), torch.ones(1, dtype=torch.bool), **BASE, dual_clip=3.0
    )
    loss.backward()
    assert (float(loss.detach()), float(logprobs.grad), float(metrics["dual_clip_count"])) == (6.0, 0.0, 1.0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_k3_saturates_and_keeps_small_values(dtype: torch.dtype) -> None:
    """H10, and tiny d where exp(d) - d - 1 in float32 would keep no digit."""
    d = torch.tensor([0.5, -0.5, 20.0, 100.0, 1e-3, -1e-5, 0.0, -100.0], dtype=dtype)
    logprobs = torch.zeros(8, dtype=dtype, requires_grad=True)
    ones = torch.ones(8, dtype=torch.bool)
    loss, _ = ops.policy_loss(
        logprobs,
        torch.zeros(8, dtype=dtype),
        torch.zeros(8, dtype=dtype),
        ones,
        **BASE,
        kl="k3",
        beta=1.0,
        ref_logprobs=d,
    )
    loss.backward()
    kl = []
    for value in d:
        _, metrics = ops.policy_loss(
            torch.zeros(1, dtype=dtype),
            torch.zeros(1, dtype=dtype),
            torch.zeros(1, dtype=dtype),
            ones[:1],
            **BASE,
            kl="k3",
            ref_logprobs=value[None],
        )
        kl.append(float(metrics["kl_sum"]))
    assert kl[:2] == pytest.approx([0.148721, 0.106531], abs=1e-6)
    assert kl[2] == kl[3] == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert kl[4:6] == pytest.approx([5.0016671e-7, 4.99998333e-11], rel=1e-6)
    assert kl[6:] == pytest.approx([0.0, math.exp(-20) + 19], rel=1e-6)
    assert bool(torch.isfinite(logprobs.grad).all())
    assert logprobs.grad[[3, 6, 7]].tolist() == [0, 0, 0]
    assert logprobs.grad[[0, 4]].tolist() == pytest.approx([1 - math.exp(0.5), -1.0005002e-3], rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_cannot_matter(kind: str, aggregation: str) -> None:
    """H08: NaN, infinities and an old log-prob of -inf under the mask; a fully masked sequence among others."""
    inputs = make([5, 3, 0, 8, 1])
    inputs["loss_mask"][5:8] = False
    options = {**BASE, "kind": kind, "aggregation": aggregation, "kl": "k3", "beta": 0.1, "entropy_coef": 0.01}
    want = run(ops.policy_loss, inputs, **options)
    for name in ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "entropy", "weights"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            changed = {**inputs, name: torch.where(inputs["loss_mask"], inputs[name], bad)}
            got = run(ops.policy_loss, changed, **options)
            assert all(torch.equal(got[k], want[k]) for k in want), (name, bad)
    assert float(want["grad_logprobs"][~inputs["loss_mask"]].abs().max()) == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_on(kind: str, aggregation: str) -> None:
    """H08: a whole micro-batch masked, and no token at all: loss 0, gradients 0, backward runs, counts 0."""
    options = {**BASE, "kind": kind, "aggregation": aggregation, "kl": "k3", "beta": 0.1, "entropy_coef": 0.01}
    masked = make([4, 4])
    masked["loss_mask"][:] = False
    for inputs in (masked, make([]), make([0, 0])):
        for denominator in (0.0, 8.0):
            got = run(ops.policy_loss, inputs, **{**options, "denominator": denominator})
            assert all(float(x.abs().sum()) == 0 for x in got.values()), got


def test_token_mean_under_accumulation() -> None:
    """H12: micro-batches with token losses [4] and [0, 0, 0] and the global count give 1.0."""
    parts = []
    for advantages in (torch.tensor([-4.0]), torch.zeros(3)):
        n = len(advantages)
        mask = torch.ones(n, dtype=torch.bool)
        loss, _ = ops.policy_loss(torch.zeros(n), torch.zeros(n), advantages, mask, **{**BASE, "denominator": 4.0})
        parts.append(float(loss))
    assert sum(parts) == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_halves_add_to_the_whole(aggregation: str) -> None:
    inputs = make([5, 3, 7, 2, 9, 1])
    options = {**BASE, "aggregation": aggregation, "kl": "k3", "beta": 0.1, "denominator": torch.tensor(5.0)}
    whole = run(ops.policy_loss, inputs, **options)
    halves = []
    for tokens, sequences in ((slice(0, 15), slice(0, 3)), (slice(15, 27), slice(3, 6))):
        half = {k: v[tokens] for k, v in inputs.items() if isinstance(v, torch.Tensor) and len(v) == 27}
        starts = inputs["cu_seqlens"][sequences.start : sequences.stop + 1]
        half |= {"cu_seqlens": starts - starts[0], "sequence_groups": inputs["sequence_groups"][sequences]}
        halves.append(run(ops.policy_loss, half, **options, norm_length=17))
    for name in ("loss", *METRICS):
        assert float(halves[0][name] + halves[1][name]) == pytest.approx(float(whole[name]), rel=1e-5)
    assert_close(torch.cat([h["grad_logprobs"] for h in halves]), whole["grad_logprobs"], 1e-6)


def test_small_weights_scale_the_loss() -> None:
    """H16: importance weights of 0.01 shrink loss and gradient a hundredfold, KL and entropy not at all."""
    inputs = without(make([6, 6]), "ref_logprobs", "entropy", "weights")
    plain = run(ops.policy_loss, inputs, **BASE)
    small = run(ops.policy_loss, {**inputs, "weights": torch.full((12,), 0.01)}, **BASE)
    assert_close(small["grad_logprobs"], plain["grad_logprobs"] * 0.01, 1e-6)
    assert float(small["loss"]) == pytest.approx(float(plain["loss"]) * 0.01, rel=1e-5)


def test_only_what_needs_a_gradient_gets_one() -> None:
    inputs = make([4])
    inputs["entropy"].requires_grad_()
    loss, _ = ops.policy_loss(**without(inputs, "ref_logprobs"), **BASE, entropy_coef=0.5)
    loss.backward()  # logprobs need no gradient
    want = torch.where(inputs["loss_mask"], -0.5, 0.0)
    assert torch.equal(inputs["entropy"].grad, want)
    measured = inputs["entropy"].detach().clone().requires_grad_()
    logprobs = inputs["logprobs"].clone().requires_grad_()
    rest = without(inputs, "ref_logprobs", "entropy", "logprobs")
    ops.policy_loss(logprobs, entropy=measured, **rest, **BASE).loss.backward()
    assert measured.grad is None and logprobs.grad is not None


def test_metrics_carry_no_gradient() -> None:
    inputs = make([4])
    inputs["logprobs"].requires_grad_()
    _, metrics = ops.policy_loss(**without(inputs, "ref_logprobs"), **BASE)
    assert tuple(metrics) == METRICS
    assert all(m.dtype == torch.float64 and m.dim() == 0 and not m.requires_grad for m in metrics.values())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "ppo"}, "kind is 'ppo'; use one of clip, gspo"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
        ({"kl": "k4"}, "kl is 'k4'"),
        ({"kl": "k3", "ref_logprobs": None}, "got kl alone"),
        ({"ref_logprobs": torch.zeros(8)}, "got ref_logprobs alone"),
        ({"beta": 0.1}, "beta is 0.1 but kl is None"),
        ({"kl_gradient": "none"}, "kl_gradient is 'none'"),
        ({"entropy_coef": 0.1}, "entropy_coef is 0.1 but entropy is None"),
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
        ({"dual_clip": 1.0}, "dual_clip is 1; it must be finite and above 1"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "dual_clip is 3 but kind is cispo"),
        ({"kind": "gspo"}, "needs cu_seqlens"),
        ({"aggregation": "sequence_mean_token_mean"}, "needs cu_seqlens"),
        ({"aggregation": "group_mean", "cu_seqlens": torch.tensor([0, 8])}, "needs sequence_groups"),
        ({"aggregation": "sequence_mean_token_sum_norm", "cu_seqlens": torch.tensor([0, 8])}, "norm_length >= 1"),
        ({"cu_seqlens": torch.tensor([0, 8]), "sequence_groups": torch.tensor([1, 2])}, "holds 1 sequences"),
        ({"advantages": torch.zeros(2)}, "advantages is"),
        ({"logprobs": torch.zeros(8, dtype=torch.bfloat16)}, "logprobs are BFloat16"),
        ({"denominator": torch.ones(2)}, "must be one number"),
    ],
)
def test_user_mistakes_are_value_errors(change: dict[str, Any], message: str) -> None:
    plain = {n: torch.zeros(8) for n in ("logprobs", "old_logprobs", "advantages")}
    with pytest.raises(ValueError, match=message):
        ops.policy_loss(**{**plain, "loss_mask": torch.ones(8, dtype=torch.bool), **BASE, **change})


@pytest.mark.parametrize("kind", ("gspo", "gspo_token", "clip"))
@pytest.mark.parametrize(
    "starts, message",
    [
        ([0, 7], "from 0 to 7"),
        ([1, 8], "from 1 to 8"),
        ([0, 9], "from 0 to 9"),
        ([0], "from 0 to 0"),
        ([0, 9, 8], r"cu_seqlens\[2\] is 8 after 9"),
        ([0, 5, 3, 8], r"cu_seqlens\[2\] is 3 after 5"),
        ([0, -(2**40), 2**40, 8], rf"cu_seqlens\[1\] is -{2**40} after 0"),
    ],
)
def test_offsets_that_make_no_sense_are_an_error_or_on_a_gpu_nan(kind: str, starts: list[int], message: str) -> None:
    plain = {n: torch.zeros(8) for n in ("old_logprobs", "advantages")}
    logprobs = torch.zeros(8, requires_grad=True)
    options = {**BASE, "kind": kind, "aggregation": "sequence_mean_token_mean", "cu_seqlens": torch.tensor(starts)}

    def call() -> torch.Tensor:
        return ops.policy_loss(logprobs, loss_mask=torch.ones(8, dtype=torch.bool), **plain, **options).loss

    if not cuda_emulator.IS_USED:
        with pytest.raises(ValueError, match=message):
            call()
        return
    loss = call()
    loss.backward()
    assert math.isnan(float(loss.detach())) and bool(logprobs.grad.isnan().any())


@pytest.mark.parametrize("bad", (-1.0, math.nan, math.inf))
def test_a_denominator_that_is_no_count_is_an_error_or_on_a_gpu_nan(bad: float) -> None:
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    options = {**BASE, "denominator": bad}
    if not cuda_emulator.IS_USED:
        with pytest.raises(ValueError, match=f"denominator is {bad:g}; it must be a finite count"):
            ops.policy_loss(zeros, zeros, zeros, mask, **options)
        return
    assert math.isnan(float(ops.policy_loss(zeros, zeros, zeros, mask, **options).loss))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("kind", KINDS)
def test_any_address_and_many_parts(kind: str, dtype: torch.dtype) -> None:
    """Tensors that start in the middle of sixteen bytes, and more tokens than one block of threads sums."""
    inputs = make([1, 700, 1500, 2, 3, 1100, 0, 17], dtype)
    shifted = {
        k: torch.cat([v[:1], v])[1:] if isinstance(v, torch.Tensor) and len(v) == len(inputs["logprobs"]) else v
        for k, v in inputs.items()
    }
    assert shifted["advantages"].data_ptr() % 16 != 0
    options = {**BASE, "kind": kind, "aggregation": "group_mean", "kl": "k3", "beta": 0.1, "entropy_coef": 0.01}
    want, got = (run(ops.policy_loss, x, **options) for x in (inputs, shifted))
    assert all(torch.equal(got[k], want[k]) for k in want)
    compare(shifted, 1e-12 if dtype == torch.float64 else 1e-5, **options)
