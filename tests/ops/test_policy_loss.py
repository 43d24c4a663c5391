"""policy_loss: hand-worked numbers, every option against the reference, masks, ties, clamps, the registrations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops import reference
from grpo_mc.ops.policy_loss import METRICS
from helpers.compare import assert_close

KINDS = ("clip", "gspo", "gspo_token", "cispo", "reinforce")
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "group_mean",
)
BASE = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean", "denominator": 1.0}


def make(lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.3) -> dict[str, Any]:
    """Every tensor argument for sequences of these lengths, three to a group, a fifth of the tokens masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return (torch.randn(tokens, generator=generator) * scale).to(dtype)

    old = normal(2.0) - 3
    return {
        "logprobs": old + normal(spread),
        "old_logprobs": old,
        "advantages": normal(1.0),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.8,
        "ref_logprobs": old + normal(spread),
        "entropy": normal(1.0).abs(),
        "weights": torch.rand(tokens, generator=generator).to(dtype) * 2,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)]),
        "sequence_groups": torch.arange(len(lengths)) // 3 * 10 - 5,
        "norm_length": 17,
    }


def run(function, inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients (of 3 x loss, so that grad_output matters) and metrics."""
    arguments = {**inputs, **options}
    leaves = {k: arguments[k].detach().clone().requires_grad_() for k in ("logprobs", "entropy") if k in arguments}
    loss, metrics = function(**{**arguments, **leaves})
    if loss.requires_grad:
        (loss * 3).backward()
    grads = {f"grad_{k}": leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for k, leaf in leaves.items()}
    return {"loss": loss.detach(), **grads, **metrics}


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def without(inputs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in inputs.items() if k not in names}


def compare(inputs: dict[str, Any], tolerance: float = 1e-5, **options: Any) -> None:
    got = run(ops.policy_loss, inputs, **options)
    want = run(reference.policy_loss, double(inputs), **options)
    scale = {"loss": float(want["loss"].abs()) + float(want["grad_logprobs"].abs().sum())}
    for name, value in want.items():
        if value.dim() == 0:  # a sum of terms of both signs: bounded by the size of the terms, not of the sum
            size = scale.get(name, abs(float(value)) + math.sqrt(inputs["logprobs"].numel()))
            assert abs(float(got[name]) - float(value)) <= tolerance * size, (name, options, got[name], value)
        else:
            assert_close(got[name], value, tolerance, (name, options))


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


@pytest.mark.parametrize("kind", KINDS)
def test_log_ratio_of_100_stays_finite(kind: str) -> None:
    inputs = make([4, 1, 3])
    inputs["loss_mask"][:] = True
    inputs["logprobs"] = inputs["old_logprobs"] + torch.tensor([100.0, -100, 0, 1e4, 100, -1e4, 21, 19])
    for options in ({"kl": "k3", "beta": 0.1}, {"kl": "k3", "beta": 0.1, "kl_gradient": "importance"}):
        got = run(ops.policy_loss, inputs, **{**BASE, "kind": kind, **options})
        assert all(bool(torch.isfinite(x).all()) for x in got.values()), got
        compare(inputs, **{**BASE, "kind": kind, **options})


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


def option_cases() -> list[dict[str, Any]]:
    """Every kind with every aggregation; every KL estimator with every gradient form; each other option alone."""
    cases: list[dict[str, Any]] = [{"kind": k, "aggregation": a} for k in KINDS for a in AGGREGATIONS]
    forms = ("direct", "k2", "importance")
    cases += [
        {"kind": kind, "kl": kl, "kl_gradient": form, "beta": 0.3, "aggregation": "group_mean"}
        for kind in KINDS
        for kl in ("k1", "k2", "k3")
        for form in forms
    ]
    cases += [{"kind": k, "dual_clip": 1.1} for k in ("clip", "gspo", "gspo_token")]
    cases += [{"kind": k, "clip_low": 0.01, "clip_high": 0.5} for k in KINDS]
    cases += [{"kl": "k3"}, {"entropy_coef": 0.05}, {"entropy_coef": -0.05, "aggregation": "sequence_mean_token_mean"}]
    return cases


@pytest.mark.parametrize("case", option_cases(), ids=str)
def test_every_option_matches_the_reference(case: dict[str, Any]) -> None:
    """H16: each option alone, with and without the optional tensors, float32 and float64."""
    inputs = make([3, 1, 17, 0, 40, 8, 9, 2], spread=0.5)
    optional = [] if "kl" in case else ["ref_logprobs"]
    optional += [] if case.get("entropy_coef") else ["entropy"]
    options = {**BASE, "denominator": 6.0, **case}
    compare(without(inputs, *optional), **options)
    compare(without(inputs, "weights", *optional), **options)
    exact = double(without(inputs, *optional))
    compare(exact, 1e-12, **options)


def test_small_weights_scale_the_loss() -> None:
    """H16: importance weights of 0.01 shrink loss and gradient a hundredfold, KL and entropy not at all."""
    inputs = without(make([6, 6]), "ref_logprobs", "entropy", "weights")
    plain = run(ops.policy_loss, inputs, **BASE)
    small = run(ops.policy_loss, {**inputs, "weights": torch.full((12,), 0.01)}, **BASE)
    assert_close(small["grad_logprobs"], plain["grad_logprobs"] * 0.01, 1e-6)
    assert float(small["loss"]) == pytest.approx(float(plain["loss"]) * 0.01, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    inputs = double(make([3, 5, 2], spread=0.1))
    logprobs, entropy = inputs.pop("logprobs").requires_grad_(), inputs.pop("entropy").requires_grad_()
    for kl, form in (("k1", "direct"), ("k2", "direct"), ("k3", "importance")):
        for aggregation in ("token_mean", "group_mean"):
            options = {**BASE, "kind": kind, "kl": kl, "kl_gradient": form, "beta": 0.3, "entropy_coef": 0.2}
            options |= {"aggregation": aggregation, "denominator": 7.0, "clip_low": 0.9, "clip_high": 3.0}
            if kind in ("gspo_token", "cispo"):  # stop-gradients: compared with the reference's autograd instead
                compare({**inputs, "logprobs": logprobs.detach(), "entropy": entropy.detach()}, 1e-12, **options)
                continue
            assert torch.autograd.gradcheck(
                lambda lp, h, options=options: ops.policy_loss(lp, entropy=h, **inputs, **options).loss,
                (logprobs, entropy),
            )


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str, dtype: torch.dtype) -> None:
    for entropy_coef, kl in ((0.0, None), (0.1, "k3")):
        inputs = make([3, 4, 2], dtype)
        for name in ("logprobs", "entropy"):
            inputs[name].requires_grad_()
        names = ("ref_logprobs", "entropy", "weights", "cu_seqlens", "sequence_groups")
        optional = [inputs[n] if n != "ref_logprobs" or kl else None for n in names]
        arguments = [inputs[n] for n in ("logprobs", "old_logprobs", "advantages", "loss_mask")] + optional
        options = {
            "kind": kind,
            "clip_low": 0.2,
            "clip_high": 0.3,
            "dual_clip": None,
            "kl": kl,
            "kl_gradient": "direct",
            "beta": 0.1 if kl else 0.0,
            "entropy_coef": entropy_coef,
            "aggregation": "group_mean",
            "norm_length": None,
        }
        denominator = torch.tensor(3.0, dtype=torch.float64)
        torch.library.opcheck(torch.ops.grpo_mc.policy_loss, (*arguments, denominator), options)


@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_threads_agree_bit_for_bit(kind: str) -> None:
    inputs = make([700, 1, 3000, 2048, 1500, 13] * 3)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            options = {**BASE, "kind": kind, "aggregation": "sequence_mean_token_mean", "kl": "k3", "beta": 0.1}
            results.append(run(ops.policy_loss, inputs, **options))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


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
        ({"clip_high": float("nan")}, "clip_high nan"),
        ({"dual_clip": 1.0}, "dual_clip is 1; it must be above 1"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "dual_clip is 3 but kind is cispo"),
        ({"kind": "gspo"}, "needs cu_seqlens"),
        ({"aggregation": "sequence_mean_token_mean"}, "needs cu_seqlens"),
        ({"aggregation": "group_mean", "cu_seqlens": torch.tensor([0, 8])}, "needs sequence_groups"),
        ({"aggregation": "sequence_mean_token_sum_norm", "cu_seqlens": torch.tensor([0, 8])}, "norm_length >= 1"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "from 0 to 7"),
        ({"cu_seqlens": torch.tensor([0, 9, 8])}, r"cu_seqlens\[2\] is 8 after 9"),
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


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=9),
    kind=st.sampled_from(KINDS),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.sampled_from([None, "k1", "k2", "k3"]),
    kl_gradient=st.sampled_from(["direct", "k2", "importance"]),
    beta=st.sampled_from([0.0, 0.04, 1.0]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    weighted=st.booleans(),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    spread=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fuzz_against_the_reference(
    lengths, kind, aggregation, kl, kl_gradient, beta, entropy_coef, weighted, dual_clip, spread, dtype, strided, seed
) -> None:
    inputs = make(lengths, dtype, seed, spread)
    drop = [] if kl else ["ref_logprobs"]
    drop += [] if weighted else ["weights"]
    inputs = without(inputs, *drop)
    if strided:
        tokens = len(inputs["logprobs"])
        for name in ("old_logprobs", "advantages", "loss_mask"):
            inputs[name] = inputs[name].repeat_interleave(2)[::2]
            assert tokens < 2 or not inputs[name].is_contiguous()
    options = {**BASE, "kind": kind, "aggregation": aggregation, "kl": kl, "kl_gradient": kl_gradient}
    options |= {"beta": beta if kl else 0.0, "entropy_coef": entropy_coef, "denominator": float(len(lengths))}
    options["dual_clip"] = dual_clip if kind in ("clip", "gspo", "gspo_token") else None
    # A ratio within rounding of a clip edge may fall on either side in float32: nudge those tokens away.
    log_ratio = inputs["logprobs"] - inputs["old_logprobs"]
    for edge in (0.8, 1.2, *([dual_clip] if dual_clip else [])):
        near = (log_ratio - math.log(edge)).abs() < 1e-4
        inputs["logprobs"] = torch.where(near, inputs["logprobs"] + 1e-3, inputs["logprobs"])
    compare(inputs, 1e-12 if dtype == torch.float64 else 1e-5, **options)
