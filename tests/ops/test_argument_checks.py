"""Numbers that mean nothing and tensors on other devices are refused by every operator, in one clear sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_mc import ops

NAN, INF = float("nan"), float("inf")


def policy_loss(**changes: Any) -> ops.PolicyLoss:
    options: dict[str, Any] = {
        "kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token_mean",
        "denominator": 3.0, "kl": "k3", "ref_logprobs": torch.zeros(3), "entropy": torch.ones(3), "beta": 0.1,
    }  # fmt: skip
    tensors = {"logprobs": torch.zeros(3), "old_logprobs": torch.zeros(3), "advantages": torch.ones(3)}
    tensors["loss_mask"] = torch.ones(3, dtype=torch.bool)
    options.update(changes)
    tensors.update({name: options.pop(name) for name in list(options) if name in tensors})
    return ops.policy_loss(**tensors, **options)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("denominator", (NAN, INF, -1.0, torch.tensor(NAN), torch.tensor(-2))),
        ("beta", (NAN, INF, -INF)),
        ("entropy_coef", (NAN, INF)),
        ("clip_low", (NAN, INF, -0.1)),
        ("clip_high", (NAN, INF, -0.1)),
        ("dual_clip", (NAN, INF, 1.0)),
    ],
)
def test_policy_loss_refuses_numbers_that_mean_nothing(option: str, values: tuple[Any, ...]) -> None:
    """A denominator of NaN gave loss 0 without a word."""
    for value in values:
        with pytest.raises(ValueError, match=f"policy_loss: .*{option}"):
            policy_loss(**{option: value})


def test_policy_loss_takes_an_empty_batch() -> None:
    """A denominator of 0 is a batch in which no token is in the loss: loss and gradient are exactly 0."""
    logprobs = torch.zeros(3, requires_grad=True)
    result = policy_loss(logprobs=logprobs, loss_mask=torch.zeros(3, dtype=torch.bool), denominator=0)
    result.loss.backward()
    assert float(result.loss) == 0.0 and logprobs.grad is not None and torch.equal(logprobs.grad, torch.zeros(3))


def logprob_calls(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> list[Any]:
    shard = {"vocab_start": 0, "vocab_size": 4, "temperature": temperature}
    rows = torch.zeros(targets.shape)
    return [
        lambda: ops.token_logprobs(logits, targets, temperature=temperature),
        lambda: ops.token_logprob_stats(logits, targets, **shard),
        lambda: ops.token_logprobs_backward(logits, targets, rows, None, rows, None, inplace=False, **shard),
        lambda: ops.token_logprobs_backward(logits, targets, rows, None, rows, None, inplace=True, **shard),
    ]


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF, 1e-39, 1e-310, 1e46, 1e300])
def test_a_temperature_that_float32_cannot_invert_is_refused(temperature: float) -> None:
    for call in logprob_calls(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), temperature):
        with pytest.raises(ValueError, match="token_logprob.*: temperature is"):
            call()


def test_extreme_temperatures_that_float32_can_invert_give_finite_log_probs() -> None:
    logits, targets = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([0])
    assert float(ops.token_logprobs(logits, targets, temperature=1e-38)) == pytest.approx(-0.693147, rel=1e-5)  # type: ignore[arg-type]
    assert float(ops.token_logprobs(logits, targets, temperature=1e38)) == pytest.approx(-1.386294, rel=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 4)])
def test_logits_of_another_rank_are_refused(shape: tuple[int, ...], device: str) -> None:
    logits, targets = torch.zeros(shape, device=device), torch.zeros(2, dtype=torch.long, device=device)
    for call in (
        lambda: ops.token_logprobs(logits, targets),
        lambda: ops.token_logprob_stats(logits, targets, vocab_start=0, vocab_size=4, temperature=1.0),
    ):
        with pytest.raises(ValueError, match=r"logits has shape .*; it must be \[T, V\]"):
            call()


@pytest.mark.parametrize("scale", [NAN, INF, -INF])
def test_an_attention_scale_must_be_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="paged_attention: scale is .*finite"):
        attention(scale=scale)


def attention(**changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 2, 8), "key_cache": torch.zeros(1, 4, 1, 8), "value_cache": torch.zeros(1, 4, 1, 8),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32), "lengths": torch.ones(1, dtype=torch.int32), "scale": 1.0,
    }  # fmt: skip
    return ops.paged_attention(**{**arguments, **changes})


@pytest.mark.parametrize("eps", [NAN, INF, -1e-4])
def test_eps_of_group_advantages_must_be_finite_and_not_negative(eps: float) -> None:
    with pytest.raises(ValueError, match="group_advantages: eps is"):
        ops.group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), eps=eps)


@pytest.mark.parametrize("eps", [NAN, INF, -1e-4])
def test_eps_of_rms_norm_must_be_finite_and_not_negative(eps: float) -> None:
    with pytest.raises(ValueError, match="rms_norm: eps is"):
        ops.rms_norm(torch.ones(1, 2), torch.ones(2), eps)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    """With one tensor on the meta device the dispatcher computes nothing and returns tensors without data."""
    ids = torch.zeros(2, dtype=torch.long, device="meta")
    calls = {
        "targets": logprob_calls(torch.zeros(2, 4), ids, 1.0),
        "group_ids": [lambda: ops.group_advantages(torch.zeros(2), ids)],
        "weight": [lambda: ops.row_linear(torch.zeros(1, 2), torch.zeros(3, 2, device="meta"))],
        "weight ": [lambda: ops.rms_norm(torch.zeros(1, 2), torch.zeros(2, device="meta"), 1e-5)],
        "lengths": [lambda: attention(lengths=torch.ones(1, dtype=torch.int32, device="meta"))],
        "advantages": [lambda: policy_loss(advantages=torch.ones(3, device="meta"))],
        "ref_logprobs": [lambda: policy_loss(ref_logprobs=torch.ones(3, device="meta"))],
    }
    for name, some in calls.items():
        for call in some:
            with pytest.raises(ValueError, match=f"{name.strip()} is on meta but .* on cpu; all tensors of a call"):
                call()
