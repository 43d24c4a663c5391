"""policy_loss against its plain twin: every option, large ratios, random cases; gradients, registrations, threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mc import ops
from grpo_mc.ops.reference.policy_loss import AGGREGATIONS, KINDS
from helpers.policy_loss import BASE, compare, double, make, run, without


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


@pytest.mark.parametrize("kind", KINDS)
def test_log_ratio_of_100_stays_finite(kind: str) -> None:
    inputs = make([4, 1, 3])
    inputs["loss_mask"][:] = True
    inputs["logprobs"] = inputs["old_logprobs"] + torch.tensor([100.0, -100, 0, 1e4, 100, -1e4, 21, 19])
    for options in ({"kl": "k3", "beta": 0.1}, {"kl": "k3", "beta": 0.1, "kl_gradient": "importance"}):
        got = run(ops.policy_loss, inputs, **{**BASE, "kind": kind, **options})
        assert all(bool(torch.isfinite(x).all()) for x in got.values()), got
        compare(inputs, **{**BASE, "kind": kind, **options})


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
