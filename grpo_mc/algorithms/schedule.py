"""The learning rate of a step, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from grpo_mc.config import OptimizerConfig


def learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of training step `step`.

    Warm-up, over the first warmup_steps steps: lr * (step + 1) / warmup_steps, so that no step is spent at 0. Then

        constant   lr
        linear     lr + (min_lr - lr) * x
        cosine     min_lr + (lr - min_lr) * (1 + cos(pi x)) / 2

    with x running from 0 at the first step after warm-up to 1 at the last step, total_steps - 1; later steps keep
    x = 1.

    Args:
        step: 0 for the first training batch.
        optimizer: section `optimizer`: lr, min_lr, schedule, warmup_steps.
        total_steps: training batches of the run.

    Raises:
        ValueError: negative step, unknown schedule.
    """
    if step < 0:
        raise ValueError(f"learning_rate: step is {step}; steps count from 0")
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    decay_steps = total_steps - 1 - optimizer.warmup_steps
    x = 1.0 if decay_steps <= 0 else min((step - optimizer.warmup_steps) / decay_steps, 1.0)
    if optimizer.schedule == "constant":
        return optimizer.lr
    if decay_steps <= 0 and step == optimizer.warmup_steps:
        # A single step after warm-up: it trains at the full rate rather than not at all.
        return optimizer.lr
    if optimizer.schedule == "linear":
        return optimizer.lr + (optimizer.min_lr - optimizer.lr) * x
    if optimizer.schedule == "cosine":
        return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * x)) / 2
    raise ValueError(
        f"learning_rate: optimizer.schedule is {optimizer.schedule!r}; use one of constant, linear, cosine"
    )
