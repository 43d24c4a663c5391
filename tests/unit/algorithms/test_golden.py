"""Numbers of other projects, made by running their own functions at the commit named in each file of golden/.

The files hold inputs, results and addresses only. `settings` are the arguments of ours that say the same thing.
Differences that we keep on purpose are in KNOWN_DIFFERENCES with their reason, and are tested to be there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mc import ops
from grpo_mc.algorithms import correct_mismatch
from grpo_mc.config.presets import PRESETS
from grpo_mc.ops import reference
from grpo_mc.ops.reference.kl import kl_term

FOLDER = Path(__file__).parent / "golden"
PROJECTS = ("trl", "verl", "nemo_rl", "slime", "megatron_rl")
Case = dict[str, Any]

_CANCELLATION = "float32 cancellation at a reward offset of 1000; two passes in float64 lose nothing"
KNOWN_DIFFERENCES = {
    "verl-offset_rloo": _CANCELLATION,
    "nemo_rl-offset_loo1_norm1": _CANCELLATION,
    "nemo_rl-offset_loo0_norm1": _CANCELLATION,
}


BOTH = pytest.mark.parametrize("module", [reference, ops], ids=["reference", "operator"])
"""The plain twin and the compiled operator."""


def load(section: str) -> list[Any]:
    cases = []
    for project in PROJECTS:
        content = json.loads((FOLDER / f"{project}.json").read_text())
        assert len(content["commit"]) == 40 and all(content["commit"] in a for a in content["addresses"])
        cases += [pytest.param(case, id=f"{project}-{case['name']}") for case in content[section]]
    return cases


def f32(values: list[float | None]) -> torch.Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float32)


@BOTH
@pytest.mark.parametrize("case", load("advantages"))
def test_advantages_equal_the_other_project(case: Case, module: Any, request: pytest.FixtureRequest) -> None:
    rewards, group_ids, expected = f32(case["rewards"]), torch.tensor(case["group_ids"]), f32(case["advantages"])
    got = module.group_advantages(rewards, group_ids, **case["settings"])
    if any(name in request.node.callspec.id for name in KNOWN_DIFFERENCES):
        assert not torch.allclose(got, expected, rtol=2e-5, atol=2e-5)
        shifted = torch.where(group_ids == 0, rewards - 1000, rewards)
        want = module.group_advantages(shifted, group_ids, **case["settings"])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        return
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@BOTH
@pytest.mark.parametrize("case", load("losses"))
def test_loss_and_gradient_equal_the_other_project(case: Case, module: Any) -> None:
    lengths = torch.tensor(case["lengths"])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.tensor(case["loss_mask"], dtype=torch.bool)
    settings = case["settings"]
    count = int(mask.sum()) if settings["aggregation"] == "token_mean" else len(lengths)
    logprobs = f32(case["logprobs"]).requires_grad_(True)
    loss, _ = module.policy_loss(
        logprobs,
        f32(case["old_logprobs"]),
        f32(case["advantages"]).repeat_interleave(lengths),
        mask,
        **settings,
        ref_logprobs=f32(case["ref_logprobs"]) if "kl" in settings else None,
        weights=f32(case["weights"]) if "weights" in case else None,
        cu_seqlens=cu_seqlens,
        denominator=count,
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(case["loss"]), rtol=2e-6, atol=2e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, f32(case["grad_logprobs"]), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("case", load("kl"))
def test_kl_and_gradient_equal_the_other_project(case: Case) -> None:
    logprobs = f32(case["logprobs"]).requires_grad_(True)
    old = f32(case.get("old_logprobs", case["logprobs"]))
    got = kl_term(logprobs, old, f32(case["ref_logprobs"]), case["settings"]["kind"], case["settings"]["gradient"])
    got.sum().backward()
    torch.testing.assert_close(got.detach(), f32(case["kl"]), rtol=2e-5, atol=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, f32(case["grad"]), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", load("corrections"))
def test_mismatch_weights_equal_the_other_project(case: Case) -> None:
    """Weights on the tokens in the loss; the others take no part."""
    mask = torch.tensor(case["loss_mask"], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *case["sequence_lengths"]]).cumsum(0)
    old, rollout = f32(case["old_logprobs"]), f32(case["rollout_logprobs"])
    got = correct_mismatch(old, rollout, mask, cu_seqlens, **case["settings"])
    assert got.weights is not None and torch.equal(got.loss_mask, mask)
    torch.testing.assert_close(got.weights * mask, f32(case["weights"]), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("project", PROJECTS)
def test_preset_says_what_the_project_computes(project: str) -> None:
    """Its advantage settings and its loss with its aggregation are among the cases that are tested above."""
    content = json.loads((FOLDER / f"{project}.json").read_text())
    preset = PRESETS[project].algorithm
    statistics = [{name: preset[name] for name in case["settings"]} for case in content["advantages"]]
    assert any(case["settings"] == want for case, want in zip(content["advantages"], statistics, strict=True))
    pairs = {(case["settings"]["kind"], case["settings"]["aggregation"]) for case in content["losses"]}
    assert (preset["loss"], preset["aggregation"]) in pairs
