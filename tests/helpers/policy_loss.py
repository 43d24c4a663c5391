"""Inputs for policy_loss, a run of it with gradients, and its comparison with the plain twin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from grpo_mc import ops
from grpo_mc.ops import reference
from helpers.compare import assert_close

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


def run(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients (of 3 x loss, so that grad_output matters) and metrics."""
    arguments = {**inputs, **options}
    leaves = {k: arguments[k].detach().clone().requires_grad_() for k in ("logprobs", "entropy") if k in arguments}
    loss, metrics = function(**{**arguments, **leaves})
    if loss.requires_grad:
        (loss * 3).backward()
    grads = {f"grad_{k}": leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for k, leaf in leaves.items()}
    return {"loss": loss.detach(), **grads, **metrics}


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs in float64."""
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def without(inputs: dict[str, Any], *names: str) -> dict[str, Any]:
    """The inputs but for some."""
    return {k: v for k, v in inputs.items() if k not in names}


def compare(inputs: dict[str, Any], tolerance: float = 1e-5, **options: Any) -> None:
    """Fails unless the operator gives loss, gradients and metrics of the reference in float64."""
    got = run(ops.policy_loss, inputs, **options)
    want = run(reference.policy_loss, double(inputs), **options)
    scale = {"loss": float(want["loss"].abs()) + float(want["grad_logprobs"].abs().sum())}
    for name, value in want.items():
        if value.dim() == 0:  # a sum of terms of both signs: bounded by the size of the terms, not of the sum
            size = scale.get(name, abs(float(value)) + math.sqrt(inputs["logprobs"].numel()))
            assert abs(float(got[name]) - float(value)) <= tolerance * size, (name, options, got[name], value)
        else:
            assert_close(got[name], value, tolerance, (name, options))
