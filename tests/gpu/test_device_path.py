"""On one GPU: what is loaded says so, the operators give the CPU's numbers, and so does a whole training step.

These tests have not been run on a GPU yet. Where the CUDA operators are not built (csrc/cuda has no sources so far),
all that can be asked is that CUDA tensors are refused instead of read as CPU memory; the comparisons are skipped then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mc import ops
from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import measure, plan_micro_batches
from helpers.compare import assert_all_close, assert_close
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
HAS_CUDA_OPERATORS = bool(ops.info()["cuda_library"])
needs_operators = pytest.mark.skipif(not HAS_CUDA_OPERATORS, reason="the CUDA operators are not built")
TOLERANCE = 1e-3
"""Relative, float32: sums run in another order, and the matrix products are another library's."""


def loss_and_gradient(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """From rewards and logits to the loss and the gradient of the logits, all on one device; results on the CPU."""
    draw = torch.Generator().manual_seed(0)
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([0, 0, 1, 1])
    logits, targets = torch.randn(12, 300, generator=draw), torch.randint(300, (12,), generator=draw)
    leaf = logits.to(device).requires_grad_()
    advantages = ops.group_advantages(
        rewards.to(device), groups.to(device), baseline="mean", scale="std", ddof=0, eps=1e-4
    )
    logprobs = ops.token_logprobs(leaf, targets.to(device), temperature=0.7)
    result = ops.policy_loss(
        logprobs,
        logprobs.detach() - 0.1,
        advantages.repeat_interleave(3),
        torch.ones(12, dtype=torch.bool, device=device),
        kind="clip",
        clip_low=0.2,
        clip_high=0.2,
        aggregation="token_mean",
        denominator=12.0,
    )
    result.loss.backward()
    assert leaf.grad is not None
    return result.loss.detach().cpu(), leaf.grad.cpu()


def test_info_tells_of_the_device() -> None:
    assert ops.info()["devices"] == (["cpu", "cuda"] if HAS_CUDA_OPERATORS else ["cpu"])


@pytest.mark.skipif(HAS_CUDA_OPERATORS, reason="the CUDA operators are built")
def test_without_cuda_operators_cuda_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="CUDA"):
        loss_and_gradient("cuda")


@needs_operators
def test_the_operators_give_the_numbers_of_the_cpu() -> None:
    (loss, gradient), (expected_loss, expected) = loss_and_gradient("cuda"), loss_and_gradient("cpu")
    assert_close(gradient, expected, TOLERANCE)
    assert float(loss) == pytest.approx(float(expected_loss), rel=TOLERANCE, abs=1e-6)


@needs_operators
def test_a_training_step_gives_the_loss_and_gradients_of_the_cpu(tiny_model: Callable[..., Path]) -> None:
    """The CPU's are those of transformers, which the CPU tests hold to 1e-5."""
    folder, algorithm = tiny_model("llama"), AlgorithmConfig(aggregation="token_mean")
    groups: Any = make_groups([(5, [4, 1, 9]), (1, [3, 2]), (8, [0, 2, 7])], 264)
    with single_mesh() as mesh:
        assert mesh.device.type == "cuda"
        policy = make_policy(folder, mesh, algorithm)
        plan = plan_micro_batches([measure(group) for group in groups], 40, 1)[0]
        batches = make_batches(groups, plan, algorithm, mesh)
        loss = policy.backward(batches, denominators_of(batches))["loss"]
        gradients = {name: gradient.cpu() for name, gradient in gradients_of(policy, mesh).items()}
    expected_loss, expected = transformers_step(load_transformers(folder), groups, algorithm)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert_all_close(gradients, expected, TOLERANCE, "cuda against cpu")
