"""Log-probs of scored tokens: the shift, the temperature, positions, padding of the vocabulary (one process)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mc.data.micro_batches import GroupPart, measure, plan_micro_batches
from grpo_mc.data.packing import pack
from grpo_mc.data.records import Group
from helpers.compare import assert_close
from helpers.engines import load_policy, single_mesh
from helpers.training import group_of, load_transformers, make_groups, transformers_scores


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as mesh:
        yield mesh


def direct(logits: torch.Tensor, targets: list[int], mesh: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from grpo_mc.megatron.logprobs import vocab_parallel_logprobs

    settings = dict(vocab_start=0, vocab_size=logits.shape[1], temperature=1.0) | options
    return vocab_parallel_logprobs(logits, torch.tensor(targets), group=mesh.tp_group, **settings)


def scored(model: Any, mesh: Any, groups: list[Group], *, temperature: float = 1.0, max_tokens: int = 10_000,
           pad_multiple: int = 1) -> dict[tuple[int, int], np.ndarray]:  # fmt: skip
    """(group, sample) -> log-probs [R] by the trainer's scoring pass."""
    from grpo_mc.megatron.micro_batch import make_micro_batch
    from grpo_mc.megatron.train_step import compute_logprobs

    plan = plan_micro_batches([measure(group) for group in groups], max_tokens, 1)[0]
    batches = [make_micro_batch(pack(groups, part, pad_multiple=pad_multiple), mesh.device) for part in plan]
    found = {}
    for batch, logprobs in zip(batches, compute_logprobs(model, mesh, batches, temperature), strict=True):
        found |= dict(zip(batch.packed.rollout_order, batch.packed.per_rollout(logprobs), strict=True))
    return found


def test_a_token_is_scored_by_the_logits_before_it(mesh: Any) -> None:
    """H04, by hand: tokens [0, 1, 2]; the row at token t predicts t + 1."""
    logits = torch.tensor([[0.0, 2, 0], [0, 0, 3], [1, 0, 0]])
    logprobs, _ = direct(logits[:-1], [1, 2], mesh)
    assert logprobs.tolist() == pytest.approx([-0.239545, -0.094923], abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, (-0.126928, -2.126928)), (0.5, (-0.018150, -4.018150)), (2.0, (-0.313262, -1.313262))],
)
def test_the_temperature_divides_the_logits(temperature: float, expected: tuple[float, float], mesh: Any) -> None:
    """H05, by hand."""
    logprobs, _ = direct(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), [0, 1], mesh, temperature=temperature)
    assert logprobs.tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("padding", [0.0, 50.0, -50.0, float("inf")])
def test_padded_columns_do_not_count(padding: float, mesh: Any) -> None:
    """H19 on one process: 5 tokens padded to 8 columns."""
    logits = torch.cat([torch.zeros(2, 5), torch.full((2, 3), padding)], 1).requires_grad_()
    logprobs, entropy = direct(logits * 1.0, [0, 4], mesh, vocab_size=5)
    assert logprobs.tolist() == pytest.approx([-math.log(5)] * 2, abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(5)] * 2, abs=1e-6)


def test_the_model_scores_as_transformers(mesh: Any, family_model: tuple[str, Path]) -> None:
    """H04, H05 through the whole model: packed and shared, against every response alone."""
    _, folder = family_model
    groups = make_groups([(5, [4, 1, 9]), (1, [3]), (8, [0, 2])], 264)
    model, hf = load_policy(folder, mesh), load_transformers(folder)
    for temperature in (1.0, 0.5):
        found = scored(model, mesh, groups, temperature=temperature)
        for position, group in enumerate(groups):
            with torch.no_grad():
                expected = transformers_scores(hf, group, temperature)
            for sample, (logprobs, _) in enumerate(expected):
                mine = torch.from_numpy(found[position, sample])
                assert_close(mine, logprobs, 1e-5, f"temperature {temperature} rollout {position}.{sample}")
                assert mine.dtype == torch.float32 and len(mine) == groups[position].rollouts[sample].response_length


def test_neighbours_and_padding_change_no_logprob(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """H06: one 8-token sequence alone, behind other sequences, in front of them, and with padding tokens."""
    model = load_policy(tiny_model("llama"), mesh)
    tokens = np.random.default_rng(3).integers(0, 264, 8)
    ours = group_of(0, tokens[:1], [tokens[1:]])  # the first token has nothing before it and no score
    other = make_groups([(13, [1]), (4, [9, 2])], 264)
    alone = scored(model, mesh, [ours])[0, 0]
    assert len(alone) == 7
    cases = {
        "behind": scored(model, mesh, [*other, ours])[2, 0],
        "in front": scored(model, mesh, [ours, *other])[0, 0],
        "padded": scored(model, mesh, [ours], pad_multiple=13)[0, 0],
        "split off": scored(model, mesh, [*other, ours], max_tokens=8)[2, 0],
        "among siblings": scored(model, mesh, [group_of(0, tokens[:1], [tokens[3:], tokens[1:], tokens[2:]])])[0, 1],
    }
    for name, found in cases.items():
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5, err_msg=name)
    ratio = np.exp(cases["behind"] - alone)  # the first step's ratio, had the sampler seen the sequence alone
    assert abs(ratio - 1).max() < 1e-5


def test_the_prompt_has_no_score(mesh: Any) -> None:
    """H04: only response tokens are scored; a filler scores nothing."""
    groups = make_groups([(5, [4, 0])], 264)
    packed = pack(groups, (GroupPart(0, (0, 1)),))
    assert packed.num_scored == 4 and packed.scored_rows.tolist() == [4, 5, 6, 7]
    assert pack(groups, ()).num_scored == 0


def test_scoring_leaves_no_trace(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    model = load_policy(tiny_model("llama"), mesh)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.train()
    first = scored(model, mesh, make_groups([(3, [4])], 264))
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    again = scored(model, mesh, make_groups([(3, [4])], 264))
    assert np.array_equal(first[0, 0], again[0, 0])
