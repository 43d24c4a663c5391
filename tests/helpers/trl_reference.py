"""One training step of TRL's GRPOTrainer on a fixed batch: rewards in, advantages, loss and gradients out.

Everything is TRL's own code: a `rollout_func` hands the trainer the fixed tokens, its own scoring turns the rewards
into advantages, its own `compute_loss` and autograd do the rest. Only the old and reference log-probs may be replaced,
so that ratios away from 1 (and the clipping, and a KL) are compared too. Runs on the CPU in float32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class FixedBatch:
    """N rollouts with their rewards; the G rollouts of a group are neighbours and share their prompt."""

    prompts: list[list[int]]
    """[N] prompt ids, ragged."""
    responses: list[list[int]]
    """[N] response ids, ragged; at least one token each."""
    rewards: list[float]
    """[N]."""
    group_size: int
    old_logprobs: list[list[float]] | None = None
    """[N] ragged like responses; None = the current policy's own (ratio 1)."""
    ref_logprobs: list[list[float]] | None = None
    """[N] ragged like responses; None = TRL's reference model, a copy of the start."""


@dataclass(frozen=True)
class TrlStep:
    """What TRL makes of a batch."""

    loss: float
    advantages: torch.Tensor
    """[N] float32."""
    logprobs: list[torch.Tensor]
    """[N] float32, ragged: the current policy on the response tokens."""
    gradients: dict[str, torch.Tensor]
    """By parameter name of the transformers model; a tied output layer appears once, as the embedding."""


def random_batch(vocab_size: int, *, groups: int = 3, group_size: int = 4, seed: int = 0) -> FixedBatch:
    """Ragged prompts (3-9 tokens) and responses (1-7 tokens), 0/1 and graded rewards, one group without spread."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(0, vocab_size, (length,), generator=generator).tolist()

    prompts = [prompt for prompt in (ids(3, 9) for _ in range(groups)) for _ in range(group_size)]
    responses = [ids(1, 7) for _ in prompts]
    rewards = torch.rand(len(prompts), generator=generator).round(decimals=2).tolist()
    rewards[:group_size] = [float(i % 2) for i in range(group_size)]
    rewards[-group_size:] = [0.5] * group_size
    return FixedBatch(prompts, responses, rewards, group_size)


def with_shifted_old_logprobs(batch: FixedBatch, logprobs: Sequence[torch.Tensor], *, seed: int = 1) -> FixedBatch:
    """`batch` with old log-probs up to 0.5 away from `logprobs`: ratios 0.6 to 1.65, on both sides of a 0.2 clip."""
    generator = torch.Generator().manual_seed(seed)
    shifted = [(lp + torch.rand(lp.shape, generator=generator) - 0.5).tolist() for lp in logprobs]
    return replace(batch, old_logprobs=shifted)


def trl_step(model_folder: Path, batch: FixedBatch, output_dir: Path, **settings: Any) -> TrlStep:
    """Runs TRL on `batch`.

    Args:
        model_folder: Hugging Face layout, with a tokenizer.
        batch: the rollouts.
        output_dir: a scratch folder that TRL may write to.
        settings: fields of trl.GRPOConfig over TRL's defaults, e.g. loss_type, beta, epsilon_high, temperature,
            scale_rewards, max_completion_length (the Dr. GRPO denominator).

    Returns: the step; nothing is updated.
    """
    trainer = _trainer(model_folder, batch, output_dir, settings)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # normally set by the training loop
    inputs = trainer._generate_and_score_completions([{"prompt": str(i)} for i in range(len(batch.prompts))])
    for key, rows in (("old_per_token_logps", batch.old_logprobs), ("ref_per_token_logps", batch.ref_logprobs)):
        if rows is not None:
            inputs[key] = _padded(rows, inputs["completion_mask"])
    with torch.no_grad():
        logprobs = _response_logprobs(trainer, inputs)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad.detach().clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return TrlStep(float(loss.detach()), inputs["advantages"].clone(), logprobs, gradients)


def _trainer(model_folder: Path, batch: FixedBatch, output_dir: Path, settings: dict[str, Any]) -> Any:
    import datasets
    import trl

    def fixed_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": batch.prompts, "completion_ids": batch.responses, "logprobs": None}

    def fixed_rewards(prompts: list[str], **kwargs: Any) -> list[float]:
        return batch.rewards

    fields = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": len(batch.prompts),
        "num_generations": batch.group_size,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_completion_length": max(len(ids) for ids in batch.responses),
    }
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is marked experimental
    return trl.GRPOTrainer(
        model=str(model_folder),
        reward_funcs=fixed_rewards,
        args=trl.GRPOConfig(**fields | settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["0"] * len(batch.prompts)}),
        rollout_func=fixed_rollouts,
    )


def _response_logprobs(trainer: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].size(1)
    padded = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention_mask, width)[0]
    return [row[mask.bool()] for row, mask in zip(padded, inputs["completion_mask"], strict=True)]


def _padded(rows: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(mask.shape, dtype=torch.float32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    return padded
