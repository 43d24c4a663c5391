"""One step on the same batch: TRL's loss and gradients against the textbook formula and against ours, to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason='needs TRL: pip install "grpo_mc[bench]"')

import transformers

from helpers.compare import assert_all_close, assert_close
from helpers.our_step import OurStep, Wanted, our_steps
from helpers.processes import run_distributed
from helpers.tiny_models import VOCAB_SIZE
from helpers.trl_reference import FixedBatch, TrlStep, random_batch, trl_step, with_shifted_old_logprobs

pytestmark = [pytest.mark.trl, pytest.mark.dist]
TOLERANCE = 1e-5
LONGEST = 7
"""Tokens of the longest response that random_batch makes, the Dr. GRPO denominator."""

# What TRL is told -> what that is under preset trl.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dapo": ({}, []),
    "bnpo": ({"loss_type": "bnpo"}, []),
    "grpo": ({"loss_type": "grpo"}, ["algorithm.aggregation=sequence_mean_token_mean"]),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": LONGEST},
        [
            "algorithm.aggregation=sequence_mean_token_sum_norm",
            f"algorithm.norm_length={LONGEST}",
            "algorithm.scale=none",
        ],
    ),
    "clip higher, batch std": (
        {"epsilon_high": 0.28, "scale_rewards": "batch"},
        ["algorithm.clip_high=0.28", "algorithm.scale=batch_std"],
    ),
    "kl": ({"beta": 0.04}, ["algorithm.beta=0.04"]),
    "temperature": ({"temperature": 0.7}, ["rollout.temperature=0.7"]),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
        [
            "algorithm.loss=gspo",
            "algorithm.aggregation=sequence_mean_token_mean",
            "algorithm.clip_low=0.1",
            "algorithm.clip_high=0.15",
        ],
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        ["algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=0.3"],
    ),
}


@pytest.fixture(scope="module")
def model_folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def batch(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FixedBatch:
    """Ragged rollouts whose ratios lie on both sides of the clip range."""
    plain = random_batch(VOCAB_SIZE)
    step = trl_step(model_folder, plain, tmp_path_factory.mktemp("trl"))
    shifted = with_shifted_old_logprobs(plain, step.logprobs)
    reference = with_shifted_old_logprobs(plain, step.logprobs, seed=2).old_logprobs
    return replace(shifted, ref_logprobs=reference)


def textbook(model_folder: Path, batch: FixedBatch, loss_type: str) -> TrlStep:
    """The same step written out: one unpadded sequence at a time, float32, autograd."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rewards = torch.tensor(batch.rewards).view(-1, batch.group_size)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    losses, logprobs = [], []
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        lp = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        old = lp.detach() if batch.old_logprobs is None else torch.tensor(batch.old_logprobs[i])
        ratio = torch.exp(lp - old)
        losses.append(-torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i]))
        logprobs.append(lp.detach())
    if loss_type == "grpo":
        loss = torch.stack([each.mean() for each in losses]).mean()
    elif loss_type == "dr_grpo":
        loss = torch.cat(losses).sum() / (len(losses) * max(len(r) for r in batch.responses))
    else:
        loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return TrlStep(float(loss.detach()), advantages, logprobs, gradients)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_trl_is_the_textbook_formula(model_folder: Path, batch: FixedBatch, tmp_path: Path, loss_type: str) -> None:
    theirs = trl_step(model_folder, batch, tmp_path, loss_type=loss_type)
    expected = textbook(model_folder, batch, loss_type)
    assert theirs.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert_close(theirs.advantages, expected.advantages, TOLERANCE, "advantages")
    assert_close(torch.cat(theirs.logprobs), torch.cat(expected.logprobs), TOLERANCE, "logprobs")
    assert_all_close(theirs.gradients, expected.gradients, TOLERANCE, loss_type)


def test_trl_repeats_itself_bit_for_bit(model_folder: Path, batch: FixedBatch, tmp_path: Path) -> None:
    first = trl_step(model_folder, batch, tmp_path / "a", beta=0.04)
    second = trl_step(model_folder, batch, tmp_path / "b", beta=0.04)
    assert first.loss == second.loss
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


def test_the_batch_reaches_both_clip_sides(model_folder: Path, batch: FixedBatch, tmp_path: Path) -> None:
    step = trl_step(model_folder, batch, tmp_path)
    assert batch.old_logprobs is not None
    old = torch.cat([torch.tensor(row) for row in batch.old_logprobs])
    ratio = torch.exp(torch.cat(step.logprobs) - old)
    lengths = torch.tensor([len(row) for row in batch.responses])
    advantages = step.advantages.repeat_interleave(lengths)
    assert int(((ratio > 1.2) & (advantages > 0)).sum()) > 0
    assert int(((ratio < 0.8) & (advantages < 0)).sum()) > 0
    assert bool((step.advantages[-batch.group_size :] == 0).all())  # the group without spread


def batch_of(case: str, batch: FixedBatch) -> FixedBatch:
    return batch if case == "kl" else replace(batch, ref_logprobs=None)


@pytest.fixture(scope="module")
def our_results(model_folder: Path, batch: FixedBatch) -> dict[str, OurStep]:
    """Every case on our engine, one process for all."""
    wanted = [Wanted(batch_of(case, batch), overrides, 40) for case, (_, overrides) in CASES.items()]
    (results,) = run_distributed(our_steps, 1, model_folder, wanted, init=False)
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_our_step_is_trls(
    model_folder: Path, batch: FixedBatch, our_results: dict[str, OurStep], tmp_path: Path, case: str
) -> None:
    theirs = trl_step(model_folder, batch_of(case, batch), tmp_path, **CASES[case][0])
    ours = our_results[case]
    assert_close(ours.advantages, theirs.advantages, TOLERANCE, "advantages")
    assert_close(torch.cat(ours.logprobs), torch.cat(theirs.logprobs), TOLERANCE, "logprobs")
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE, abs=1e-7)
    assert_all_close(ours.gradients, theirs.gradients, TOLERANCE, case)


def test_our_step_on_two_ranks_is_trls(model_folder: Path, batch: FixedBatch, tmp_path: Path) -> None:
    """Groups are dealt unevenly (3 over 2 ranks); the token mean is over all of them (H12)."""
    theirs = trl_step(model_folder, batch, tmp_path, beta=0.04)
    wanted = [Wanted(batch, ["algorithm.beta=0.04"], 30)]
    ranks = [steps[0] for steps in run_distributed(our_steps, 2, model_folder, wanted, init=False)]
    assert [rank.loss for rank in ranks] == pytest.approx([theirs.loss] * 2, rel=TOLERANCE)
    assert_all_close(ranks[0].gradients, theirs.gradients, TOLERANCE, "dp 2")
