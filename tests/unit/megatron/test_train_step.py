"""The training step on one process: loss and gradients against transformers, packing, splits, bad gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mc.algorithms.denominators import Denominators
from grpo_mc.config import AlgorithmConfig, OptimizerConfig
from grpo_mc.data.micro_batches import GroupPart, measure, plan_micro_batches
from grpo_mc.data.packing import pack
from helpers.compare import assert_all_close
from helpers.engines import single_mesh
from helpers.training import (
    denominators_of,
    gradients_of,
    load_transformers,
    make_batches,
    make_groups,
    make_policy,
    transformers_step,
)

RAGGED = [(5, [4, 1, 9]), (1, [3, 2]), (8, [0, 2, 7]), (3, [6])]
TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")
EVERYTHING = AlgorithmConfig(
    aggregation="sequence_mean_token_mean", beta=0.05, entropy_coef=0.01, dual_clip=3.0, correction="tis"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as mesh:
        yield mesh


@pytest.fixture
def policy(mesh: Any, tiny_model: Callable[..., Path]) -> Any:
    return make_policy(tiny_model("llama"), mesh, TOKEN_MEAN)


def step(
    policy: Any, mesh: Any, groups: Any, max_tokens: int, masked: set[tuple[int, int]] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the groups in micro-batches of a token budget."""
    plan = plan_micro_batches([measure(group) for group in groups], max_tokens, 1)[0]
    batches = make_batches(groups, plan, policy.algorithm, mesh, masked)
    loss = policy.backward(batches, denominators_of(batches))["loss"]
    return loss, gradients_of(policy, mesh)


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize(
    ("algorithm", "beginning"),
    [(TOKEN_MEAN, 0), (EVERYTHING, 0), (EVERYTHING, 20)],
    ids=["token_mean", "everything", "everything after a shared beginning"],
)
def test_loss_and_gradients_are_those_of_transformers(
    family_model: tuple[str, Path], algorithm: AlgorithmConfig, beginning: int, mesh: Any
) -> None:
    """Shared prompts, packing and scored rows against every response alone with its own prompt."""
    family, folder = family_model
    groups = make_groups(RAGGED, 264, beginning=beginning)
    if beginning:
        plan = plan_micro_batches([measure(group) for group in groups], 10_000, 1)[0]
        assert {block.beginning_length for block in pack(groups, plan[0]).blocks[1:]} == {beginning}
    policy = make_policy(folder, mesh, algorithm, temperature=0.8)
    loss, gradients = step(policy, mesh, groups, 10_000)
    expected_loss, expected = transformers_step(load_transformers(folder), groups, algorithm, 0.8)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_all_close(gradients, expected, 1e-5, family)


@pytest.mark.parametrize("lengths", [[(4, [5])], [(4, [5, 5, 5])], [(1, [1])], [(6, [0, 3])], [(3, [2]), (9, [1, 8])]])
def test_a_shared_prompt_trains_as_copies_of_it(policy: Any, mesh: Any, lengths: list[tuple[int, list[int]]]) -> None:
    groups = make_groups(lengths, 264)
    shared_loss, shared = step(policy, mesh, groups, 10_000)
    separate_loss, separate = step(policy, mesh, groups, 1)  # a budget of 1: each response with a prompt of its own
    assert shared_loss == pytest.approx(separate_loss, rel=1e-5)
    assert_all_close(shared, separate, 1e-5, lengths)


def test_the_split_into_micro_batches_changes_nothing(policy: Any, mesh: Any) -> None:
    """H12: denominators are those of the batch."""
    groups = make_groups(RAGGED, 264)
    loss, gradients = step(policy, mesh, groups, 10_000)
    for max_tokens in (40, 20, 8):
        other_loss, other = step(policy, mesh, groups, max_tokens)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert_all_close(other, gradients, 1e-5, f"budget {max_tokens}")


def test_short_micro_batches_weigh_no_more(policy: Any, mesh: Any) -> None:
    """H12, by hand: token losses [4] and [0, 0, 0] in two micro-batches make 1.0, not 2.0."""
    groups = make_groups([(2, [1]), (2, [3])], 264)
    batches = make_batches(groups, [(GroupPart(0, (0,)),), (GroupPart(1, (0,)),)], TOKEN_MEAN, mesh)
    for batch, advantage in zip(batches, (-4.0, 0.0), strict=True):
        batch.loss.advantages.fill_(advantage)
        batch.loss = replace(batch.loss, old_logprobs=None)  # ratio 1
    assert policy.backward(batches, denominators_of(batches))["loss"] == pytest.approx(1.0, abs=1e-6)


def test_an_empty_response_and_a_masked_rollout_add_nothing(policy: Any, mesh: Any) -> None:
    """H08 (a, c)."""
    groups, fewer = make_groups([(4, [3, 5, 0])], 264), make_groups([(4, [3, 5, 0])], 264)
    del fewer[0].rollouts[1:]
    masked_loss, masked = step(policy, mesh, groups, 10_000, masked={(0, 1)})
    loss, gradients = step(policy, mesh, fewer, 10_000)
    assert masked_loss == pytest.approx(loss, rel=1e-6)
    assert_all_close(masked, gradients, 1e-5, "masked rollout")


@pytest.mark.parametrize("algorithm", [TOKEN_MEAN, EVERYTHING], ids=["token_mean", "everything"])
def test_nothing_to_train_on_gives_zero_loss_and_gradients(policy: Any, mesh: Any, algorithm: AlgorithmConfig) -> None:
    """H08 (b): all masked, all empty, and a filler; backward runs every time and leaves finite metrics."""
    policy.algorithm = algorithm
    masked = make_batches(make_groups([(4, [3, 2])], 264), [(GroupPart(0, (0, 1)),)], algorithm, mesh, {(0, 0), (0, 1)})
    empty = make_batches(make_groups([(4, [0, 0])], 264), [(GroupPart(0, (0, 1)),)], algorithm, mesh)
    filler = make_batches([], [()], algorithm, mesh)
    for name, batches in {"masked": masked, "empty": empty, "filler": filler}.items():
        ran: list[str] = []
        hook = policy.model.decoder.layers[0].register_full_backward_hook(lambda *unused, ran=ran: ran.append("layer"))
        sums = policy.backward(batches, denominators_of(batches))
        hook.remove()
        assert ran, f"{name}: no backward pass"
        assert sums["loss"] == 0.0 and all(math.isfinite(value) for value in sums.values()), (name, sums)
        assert sums["token_count"] == 0
        for key, gradient in gradients_of(policy, mesh).items():
            assert not gradient.any(), f"{name}: gradient of {key}"


def test_fillers_add_nothing(policy: Any, mesh: Any) -> None:
    """H20 on one rank: a micro-batch without rollouts after real ones."""
    groups, plan = make_groups(RAGGED, 264), [(GroupPart(0, (0, 1, 2)),), (GroupPart(3, (0,)),)]
    found = []
    for extra in ([], [(), ()]):
        batches = make_batches(groups, plan + extra, TOKEN_MEAN, mesh)
        found.append((policy.backward(batches, denominators_of(batches))["loss"], gradients_of(policy, mesh)))
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


def test_a_second_step_starts_from_zero(policy: Any, mesh: Any) -> None:
    groups = make_groups(RAGGED, 264)
    first, second = step(policy, mesh, groups, 30), step(policy, mesh, groups, 30)
    assert first[0] == second[0]
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name]), name


def test_the_update_is_adam_with_clipping(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """Two steps against torch.optim.AdamW on the same gradients."""
    settings = OptimizerConfig(lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, clip_grad=0.5)
    policy = make_policy(tiny_model("llama"), mesh, TOKEN_MEAN, optimizer=settings)
    twins = {name: torch.nn.Parameter(weight) for name, weight in weights_of(policy).items()}
    decayed = [twin for twin in twins.values() if twin.dim() > 1]
    rest = [twin for twin in twins.values() if twin.dim() == 1]  # norms and biases do not decay
    adam = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1.0, betas=(0.8, 0.95),
                             eps=1e-6, weight_decay=0.1)  # fmt: skip
    for lr in (1e-2, 3e-3):
        step(policy, mesh, make_groups(RAGGED, 264), 10_000)
        for name, parameter in policy.model.named_parameters():
            twins[name].grad = parameter.main_grad.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(list(twins.values()), 0.5))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        updated, our_norm = policy.step(lr)
        assert updated and our_norm == pytest.approx(norm, rel=1e-5) and norm > 0.5
        assert_all_close(weights_of(policy), {k: v.detach() for k, v in twins.items()}, 1e-5, f"weights at lr {lr}")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_changes_no_weight(policy: Any, mesh: Any, poison: float) -> None:
    groups = make_groups(RAGGED, 264)
    step(policy, mesh, groups, 10_000)
    before = weights_of(policy)
    next(iter(policy.model.decoder.layers[2].parameters())).main_grad.view(-1)[3] = poison
    updated, norm = policy.step(1e-2)
    assert updated is False and not math.isfinite(norm)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(policy).items())
    step(policy, mesh, groups, 10_000)  # and the next batch is clean again
    updated, norm = policy.step(1e-2)
    assert updated is True and math.isfinite(norm)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights_of(policy).values())


def test_a_bad_logprob_shows_in_the_loss(policy: Any, mesh: Any) -> None:
    """NaN in the constants reaches the loss and the gradients, and then no weight."""
    batches = make_batches(make_groups([(3, [2])], 264), [(GroupPart(0, (0,)),)], TOKEN_MEAN, mesh)
    batches[0].loss.advantages[0] = math.nan
    before = weights_of(policy)
    assert math.isnan(policy.backward(batches, denominators_of(batches))["loss"])
    assert policy.step(1e-2)[0] is False
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(policy).items())


def test_old_logprobs_of_the_policy_itself_give_ratio_one(policy: Any, mesh: Any) -> None:
    """H05, H06: the scoring pass agrees with the training pass, so that the first ratio is 1."""
    policy.temperature = 0.7
    batches = make_batches(make_groups(RAGGED, 264), [tuple(GroupPart(g, (0,)) for g in range(4))], TOKEN_MEAN, mesh)
    batches[0].loss.old_logprobs.copy_(torch.from_numpy(policy.logprobs(batches)[0]))
    sums = policy.backward(batches, denominators_of(batches))
    assert sums["ratio_sum"] / sums["token_count"] == pytest.approx(1.0, abs=1e-6)
    assert sums["clip_low_count"] == sums["clip_high_count"] == 0


def test_several_steps_raise_the_reward(policy: Any, mesh: Any) -> None:
    """Twenty steps on one group push up what has a positive advantage and down what has a negative one."""
    batches = make_batches(make_groups([(4, [3, 3])], 264), [(GroupPart(0, (0, 1)),)], TOKEN_MEAN, mesh)
    batches[0].loss = replace(batches[0].loss, old_logprobs=None, advantages=torch.tensor([1.0] * 3 + [-1.0] * 3))
    before = policy.logprobs(batches)[0]
    for _ in range(20):
        policy.backward(batches, Denominators(6, 2, 1))
        policy.step(1e-3)
    gain = policy.logprobs(batches)[0] - before
    assert np.mean(gain[:3]) > 0.5 and np.mean(gain[3:]) < -0.5
