"""The native engine on a tiny model: loading, requests, and the trainer's view of what it sampled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def single_mesh() -> Iterator[Any]:
    """A mesh of this process alone; afterwards neither groups nor environment variables are left."""
    from grpo_mc.megatron.mesh import build_mesh, destroy_mesh

    before = dict(os.environ)
    try:
        yield build_mesh()
    finally:
        destroy_mesh()
        os.environ.clear()
        os.environ.update(before)


def load_policy(folder: Path, mesh: Any, **options: Any) -> Any:
    """This rank's stage of the model in a folder, weights loaded; `options` go to policy_config."""
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.model import build_model, policy_config
    from grpo_mc.megatron.weights import load_weights

    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.architecture, mesh, policy_config(checkpoint.architecture, mesh, **options))
    load_weights(model, checkpoint, mesh)
    return model


def make_requests(lengths: Sequence[int], samples: int, *, first_id: int = 0, vocab_size: int = 256) -> list[Any]:
    """One request for each prompt length; the tokens of a group depend on its id and length only."""
    from grpo_mc.rollout.native import Request

    requests = []
    for group_id, length in enumerate(lengths, start=first_id):
        ids = np.random.default_rng([group_id, length]).integers(0, vocab_size, length)
        requests.append(Request(group_id, ids.astype(np.int64), tuple(range(samples))))
    return requests


def tokens_of(responses: Sequence[Any]) -> dict[tuple[int, int], list[int]]:
    """(group id, sample index) -> token ids."""
    return {(r.group_id, r.sample_index): list(r.token_ids) for r in responses}


def trainer_logprobs(
    model: Any, mesh: Any, requests: Sequence[Any], responses: Sequence[Any], temperature: float, max_tokens: int = 512
) -> dict[tuple[int, int], np.ndarray]:
    """(group id, sample index) -> log-probs [R] float32 as the trainer computes them, prompts shared."""
    from grpo_mc.data.micro_batches import measure, plan_micro_batches
    from grpo_mc.data.packing import pack
    from grpo_mc.data.records import Group, Prompt, Rollout, Segment
    from grpo_mc.megatron.micro_batch import make_micro_batch
    from grpo_mc.megatron.train_step import compute_logprobs

    groups = []
    for request in requests:
        prompt = Prompt(prompt_id=str(request.group_id), token_ids=request.prompt_ids, text="")
        rollouts = [
            Rollout(
                group_id=r.group_id,
                sample_index=r.sample_index,
                prompt=prompt,
                segments=[Segment("model", np.array(r.token_ids, np.int64), np.array(r.logprobs, np.float32))],
                text="",
                finish_reason=r.finish_reason,
                policy_versions=(0,),
            )
            for r in responses
            if r.group_id == request.group_id
        ]
        groups.append(Group(request.group_id, prompt, rollouts))
    multiple = mesh.tp if model.config.sequence_parallel else 1
    plan = plan_micro_batches([measure(group) for group in groups], max_tokens, 1)[0]
    batches = [make_micro_batch(pack(groups, part, pad_multiple=multiple), mesh.device) for part in plan]
    found: dict[tuple[int, int], np.ndarray] = {}
    for batch, scored in zip(batches, compute_logprobs(model, mesh, batches, temperature), strict=True):
        for (group, sample), values in zip(batch.packed.rollout_order, batch.packed.per_rollout(scored), strict=True):
            rollout = groups[group].rollouts[sample]
            found[rollout.group_id, rollout.sample_index] = values
    return found
