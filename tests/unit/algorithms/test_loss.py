"""The loss of a micro-batch from the configuration, its denominators and its metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.algorithms import (
    Denominators,
    LossInputs,
    add_sums,
    apply_correction,
    count_batch,
    count_denominators,
    grpo_loss,
    loss_metrics,
)
from grpo_mc.algorithms.kl import warn_about_kl
from grpo_mc.config import AlgorithmConfig
from grpo_mc.ops.reference.policy_loss import AGGREGATIONS, KINDS

LENGTHS = (1, 3, 0, 5, 2, 4)
GROUPS = (10, 10, 10, 4, 4, 4)


def make_inputs(sequences: tuple[int, ...] = tuple(range(6)), **changes: Any) -> tuple[Tensor, LossInputs]:
    """Log-probs and constants of some of six fixed sequences, so that any split holds the same numbers."""
    generator = torch.Generator().manual_seed(0)
    everything = {name: torch.randn(sum(LENGTHS), generator=generator) * 0.3 for name in ("lp", "old", "roll", "ref")}
    per_sequence = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.8, 0.0])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = torch.tensor([t for s in sequences for t in range(starts[s], starts[s + 1])], dtype=torch.int64)
    lengths = torch.tensor([LENGTHS[s] for s in sequences], dtype=torch.int64)
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    mask[2] = mask[-1] = False
    inputs = LossInputs(
        old_logprobs=everything["old"][rows] - 1,
        rollout_logprobs=everything["old"][rows] - 1 + everything["roll"][rows] * 0.2,
        advantages=per_sequence[list(sequences)].repeat_interleave(lengths),
        loss_mask=mask[rows],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        sequence_groups=torch.tensor([GROUPS[s] for s in sequences], dtype=torch.int64),
        ref_logprobs=everything["ref"][rows] - 1,
    )
    return everything["lp"][rows] - 1, replace(inputs, **changes)


def run(
    parts: list[tuple[int, ...]], algorithm: AlgorithmConfig, **changes: Any
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient by sequence order, and metrics of the six sequences cut into these micro-batches."""
    batches = [make_inputs(part, **changes) for part in parts]
    corrected = [(lp.requires_grad_(True), apply_correction(inputs, algorithm)) for lp, inputs in batches]
    denominators = count_batch(
        ((i.loss_mask, i.cu_seqlens, i.sequence_groups) for _, i in corrected), aggregation=algorithm.aggregation
    )
    total, sums = 0.0, []
    for lp, inputs in corrected:
        loss, metrics = grpo_loss(lp, lp.abs(), inputs, algorithm, denominators)
        loss.backward()
        total += float(loss.detach())
        sums.append(metrics)
    grads: dict[int, Tensor] = {}
    for part, (lp, inputs) in zip(parts, corrected, strict=True):
        assert lp.grad is not None
        pieces = torch.split(lp.grad, inputs.cu_seqlens.diff().tolist()) if part else ()
        grads.update(zip(part, pieces, strict=True))
    return total, torch.cat([grads[s] for s in range(6)]), loss_metrics(add_sums(sums))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", ["none", "tis", "mask_token", "mask_sequence", "tis_sequence"])
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    kind: str, aggregation: str, correction: str
) -> None:
    """H12; group_mean needs a group in one micro-batch, the others may cut it. A filler of nothing changes nothing."""
    config = AlgorithmConfig(
        loss=kind, aggregation=aggregation, correction=correction, correction_low=0.93, correction_high=1.07,
        beta=0.1, entropy_coef=0.01, norm_length=6, dual_clip=None if kind in ("cispo", "reinforce") else 2.0,
    )  # fmt: skip
    whole = run([(0, 1, 2, 3, 4, 5)], config)
    splits: list[list[tuple[int, ...]]] = [[(3, 4, 5), (0, 1, 2)], [(0, 1, 2), (3, 4, 5), ()]]
    if aggregation != "group_mean":
        splits += [[(s,) for s in range(6)], [(5, 0), (1, 4, 2), (3,)]]
    for split in splits:
        loss, grad, metrics = run(split, config)
        assert loss == pytest.approx(whole[0], abs=1e-6)
        torch.testing.assert_close(grad, whole[1], rtol=1e-5, atol=1e-7)
        assert metrics == pytest.approx(whole[2], rel=1e-6)


def test_token_mean_of_unequal_micro_batches() -> None:
    """H12: micro-batches with token losses [4] and [0, 0, 0] give 4/4 = 1, not (4 + 0) / 2 = 2."""
    config = AlgorithmConfig(aggregation="token_mean")
    total = 0.0
    for losses in ([4.0], [0.0, 0.0, 0.0]):
        zeros = torch.zeros(len(losses))
        inputs = LossInputs(
            old_logprobs=zeros, rollout_logprobs=zeros, advantages=-torch.tensor(losses), loss_mask=zeros == 0,
            cu_seqlens=torch.tensor([0, len(losses)]), sequence_groups=torch.tensor([0]),
        )  # fmt: skip
        total += float(grpo_loss(zeros, None, inputs, config, Denominators(4, 2, 1)).loss)
    assert total == 1.0


def test_denominators_count_what_is_in_the_loss() -> None:
    """A masked sequence, an empty one and a group of only such ones never count; groups count once over parts."""
    part = (torch.tensor([1, 1, 0, 0, 1]).bool(), torch.tensor([0, 2, 3, 4, 4, 5]), torch.tensor([5, 5, 8, 9, 5]))
    assert count_denominators(*part) == Denominators(tokens=3, sequences=2, groups=1)
    assert count_batch([part, part]) == Denominators(tokens=6, sequences=4, groups=1)
    assert count_denominators(*part) + count_denominators(*part) == Denominators(6, 4, 2)
    with pytest.raises(ValueError, match="group 5 lies in several"):
        count_batch([part, part], aggregation="group_mean")
    counts = Denominators(6, 4, 2)
    assert Denominators.from_tensor(counts.to_tensor()) == counts
    assert [counts.for_aggregation(a) for a in AGGREGATIONS] == [6, 4, 4, 4, 2]
    with pytest.raises(ValueError, match="'mean'"):
        counts.for_aggregation("mean")


def test_nothing_to_train_on_gives_zero_and_no_metrics() -> None:
    """H08: metrics are left out with a count of 0, never an exception."""
    nothing = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for aggregation in AGGREGATIONS:
        config = AlgorithmConfig(aggregation=aggregation, beta=0.1, norm_length=4, correction="tis")
        loss, grad, metrics = run([(0, 1, 2, 3, 4, 5)], config, loss_mask=nothing)
        assert loss == 0.0 and grad.abs().max() == 0
        assert metrics == {"policy/token_count": 0.0}


def test_old_logprobs_none_means_the_current_policy() -> None:
    """Loss, gradient and mismatch as if the same log-probs had been passed, for every kind."""
    for kind in KINDS:
        for correction in ("none", "tis", "tis_sequence"):
            config = AlgorithmConfig(loss=kind, correction=correction, beta=0.1)
            logprobs, _ = make_inputs()
            implicit = run([(0, 1, 2, 3, 4, 5)], config, old_logprobs=None)
            explicit = run([(0, 1, 2, 3, 4, 5)], config, old_logprobs=logprobs)
            assert implicit[0] == explicit[0] and torch.equal(implicit[1], explicit[1])
            assert implicit[2] == explicit[2]
            assert implicit[2]["policy/ratio_mean"] == 1.0


def test_a_correction_is_never_skipped_silently() -> None:
    """H16's kind: an option that would not be applied raises."""
    logprobs, inputs = make_inputs()
    config = AlgorithmConfig(correction="mask_token", correction_high=1.1)
    with pytest.raises(ValueError, match="apply_correction"):
        grpo_loss(logprobs, None, inputs, config, Denominators(1, 1, 1))
    with pytest.raises(ValueError, match="old_logprobs is None"):
        apply_correction(replace(inputs, old_logprobs=None), config)
    with pytest.raises(ValueError, match="ref_logprobs is None"):
        grpo_loss(logprobs, None, replace(inputs, ref_logprobs=None), AlgorithmConfig(beta=0.1), Denominators(1, 1, 1))


def test_kl_in_the_reward_is_measured_but_not_in_the_loss() -> None:
    in_reward = AlgorithmConfig(beta=0.5, kl="k1", kl_placement="in_reward")
    off = AlgorithmConfig(kl="k1")
    parts = [(0, 1, 2, 3, 4, 5)]
    assert run(parts, in_reward)[0] == run(parts, off)[0] != run(parts, AlgorithmConfig(beta=0.5, kl="k1"))[0]
    assert "policy/kl" in run(parts, in_reward)[2]
    assert "policy/kl" not in run(parts, off, ref_logprobs=None)[2]


def test_kl_gradient_flows_in_a_constant_group() -> None:
    """H01: advantages of 0 leave the KL in the loss; without KL the gradient is 0."""
    zeros = torch.zeros(sum(LENGTHS))
    parts = [(0, 1, 2, 3, 4, 5)]
    assert run(parts, AlgorithmConfig(), advantages=zeros)[1].abs().max() == 0
    assert run(parts, AlgorithmConfig(beta=0.1), advantages=zeros)[1].abs().max() > 0


def test_loss_metrics_divide_once() -> None:
    sums = add_sums(
        [
            {"token_count": 1, "ratio_sum": torch.tensor(2.0), "clip_low_count": 1, "clip_high_count": 0},
            {"token_count": 3, "ratio_sum": 4.0, "clip_low_count": 0, "clip_high_count": 2, "kl_sum": 0.2},
            {"mismatch_token_count": 4, "mismatch_abs_sum": 2, "mismatch_weight_sum": 4, "mismatch_weight_sq_sum": 10},
        ]
    )
    assert loss_metrics(sums) == pytest.approx(
        {
            "policy/ratio_mean": 1.5,
            "policy/clip_frac_low": 0.25,
            "policy/clip_frac_high": 0.5,
            "policy/kl": 0.05,
            "policy/token_count": 4.0,
            "mismatch/logprob_abs_diff": 0.5,
            "mismatch/weight_mean": 1.0,
            "mismatch/effective_sample_size": 16 / (4 * 10),
        }
    )
    assert loss_metrics({}) == {}


def test_perfect_agreement_has_effective_sample_size_1() -> None:
    _, inputs = make_inputs()
    metrics = run([(0, 1, 2, 3, 4, 5)], AlgorithmConfig(), rollout_logprobs=inputs.old_logprobs)[2]
    assert metrics["mismatch/effective_sample_size"] == 1.0
    assert metrics["mismatch/logprob_abs_diff"] == metrics["mismatch/k3"] == 0.0
    assert math.isclose(metrics["mismatch/weight_mean"], 1.0)


def test_k1_as_a_loss_warns() -> None:
    with pytest.warns(UserWarning, match="zero expected gradient"):
        warn_about_kl(AlgorithmConfig(beta=0.1, kl="k1"))


def test_other_kl_settings_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    for fields in ({}, {"beta": 0.1}, {"kl_gradient": "k2", "kl": "k1", "beta": 0.1}, {"kl": "k1"}):
        warn_about_kl(AlgorithmConfig(**fields))
    assert not recwarn.list
