"""A training batch through our engine and, response by response, through transformers: log-probs, loss, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mc.algorithms.denominators import Denominators, count_batch
from grpo_mc.algorithms.loss import LossInputs, apply_correction, grpo_loss
from grpo_mc.config import AlgorithmConfig, OptimizerConfig
from grpo_mc.data.micro_batches import MicroBatch
from grpo_mc.data.packing import pack
from grpo_mc.data.records import FinishReason, Group, Prompt, Rollout, Segment


def make_groups(
    lengths: Sequence[tuple[int, Sequence[int]]], vocab_size: int, seed: int = 0, beginning: int = 0
) -> list[Group]:
    """Groups of random tokens: (prompt length, response lengths) each, behind `beginning` common ones."""
    groups, common = [], np.random.default_rng([seed, 1000]).integers(0, vocab_size, beginning)
    for position, (prompt_length, response_lengths) in enumerate(lengths):
        draw = np.random.default_rng([seed, position])
        responses = [draw.integers(0, vocab_size, length) for length in response_lengths]
        prompt = np.concatenate([common, draw.integers(0, vocab_size, prompt_length)])
        groups.append(group_of(position, prompt, responses))
    return groups


def group_of(group_id: int, prompt_ids: np.ndarray, responses: Sequence[np.ndarray]) -> Group:
    """A group of given tokens."""
    prompt = Prompt(f"test:{group_id}", np.asarray(prompt_ids, np.int64), "")
    rollouts = [
        Rollout(
            group_id, sample, prompt, [Segment("model", np.asarray(ids, np.int64))], "", FinishReason.FINISHED, (0,)
        )
        for sample, ids in enumerate(responses)
    ]
    return Group(group_id, prompt, rollouts)


def make_policy(folder: Path, mesh: Any, algorithm: AlgorithmConfig | None = None, **options: Any) -> Any:
    """A Policy with the weights of a folder; `options` go to policy_config, but for `temperature` and `optimizer`."""
    from grpo_mc.megatron.train_step import Policy
    from helpers.engines import load_policy

    temperature, optimizer = options.pop("temperature", 1.0), options.pop("optimizer", OptimizerConfig(lr=1e-3))
    model = load_policy(folder, mesh, **options)
    return Policy(model, mesh, algorithm=algorithm or AlgorithmConfig(), optimizer=optimizer, temperature=temperature)


def per_token_inputs(
    groups: Sequence[Group], packed: Any, masked: set[tuple[int, int]] | None = None, device: Any = "cpu"
) -> LossInputs:
    """Loss inputs of a packed micro-batch: constants drawn by (group, sample), old and reference log-probs near -5."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("old", "rollout", "ref", "advantage", "mask")}
    for group, sample in packed.rollout_order:
        length = groups[group].rollouts[sample].response_length
        draw = np.random.default_rng([7, group, sample])
        columns["old"].append(draw.normal(-5.5, 0.4, length))
        columns["rollout"].append(columns["old"][-1] + draw.normal(0, 0.2, length))
        columns["ref"].append(columns["old"][-1] + draw.normal(0, 0.5, length))
        columns["advantage"].append(np.full(length, draw.normal(0.3, 1.0)))
        columns["mask"].append(np.full(length, float((group, sample) not in (masked or set()))))
    tensors = {name: torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(np.float32)).to(device)
               for name, parts in columns.items()}  # fmt: skip
    return LossInputs(
        old_logprobs=tensors["old"],
        rollout_logprobs=tensors["rollout"],
        ref_logprobs=tensors["ref"],
        advantages=tensors["advantage"],
        loss_mask=tensors["mask"] > 0,
        cu_seqlens=torch.from_numpy(packed.cu_seqlens).to(device),
        sequence_groups=torch.from_numpy(packed.group_positions).to(device),
    )


def make_batches(
    groups: Sequence[Group], plan: Sequence[MicroBatch], algorithm: AlgorithmConfig, mesh: Any,
    masked: set[tuple[int, int]] | None = None, pad_multiple: int = 1,
) -> list[Any]:  # fmt: skip
    """The micro-batches of a plan, with loss inputs."""
    from grpo_mc.megatron.micro_batch import make_micro_batch

    batches = []
    for part in plan:
        packed = pack(groups, part, pad_multiple=pad_multiple)
        loss = apply_correction(per_token_inputs(groups, packed, masked, mesh.device), algorithm)
        batches.append(make_micro_batch(packed, mesh.device, loss))
    return batches


def denominators_of(batches: Sequence[Any]) -> Denominators:
    """The global counts of micro-batches that are the whole batch."""
    return count_batch((b.loss.loss_mask, b.loss.cu_seqlens, b.loss.sequence_groups) for b in batches)


def gradients_of(policy: Any, mesh: Any) -> dict[str, Tensor]:
    """Hugging Face name -> gradient after Policy.backward, on rank 0."""
    from grpo_mc.megatron.gradients import export_gradients, gather_shards

    gather_shards(policy.ddp)
    return {name: gradient.clone() for name, gradient in export_gradients(policy.model, mesh)}


def load_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder in transformers, with plain attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    # transformers gives the padding token's embedding no gradient; where it is also the end-of-sequence token, that is
    # one of the tokens to train (H07).
    model.get_input_embeddings().padding_idx = None
    return model


def transformers_scores(hf: Any, group: Group, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """(logprobs [R], entropy [R]) of each rollout of a group, each run alone behind the prompt, with gradient."""
    scores = []
    for rollout in group.rollouts:
        ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, rollout.response_ids]))[None]
        first = len(group.prompt.token_ids) - 1
        logits = hf(input_ids=ids, use_cache=False).logits[0, first:-1]
        logp = (logits / temperature).log_softmax(-1)
        chosen = logp.gather(1, ids[0, first + 1 :, None])[:, 0]
        scores.append((chosen, -(logp.exp() * logp).sum(-1)))
    return scores


def transformers_step(
    hf: Any, groups: Sequence[Group], algorithm: AlgorithmConfig, temperature: float = 1.0,
    masked: set[tuple[int, int]] | None = None,
) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    """Loss and gradients by Hugging Face name of the batch that make_batches makes, by transformers and autograd."""
    from grpo_mc.data.micro_batches import GroupPart

    whole = tuple(GroupPart(at, tuple(range(len(group.rollouts)))) for at, group in enumerate(groups))
    inputs = apply_correction(per_token_inputs(groups, pack(groups, whole), masked), algorithm)
    scores = [score for group in groups for score in transformers_scores(hf, group, temperature)]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scores, strict=True))
    counts = count_batch([(inputs.loss_mask, inputs.cu_seqlens, inputs.sequence_groups)])
    hf.zero_grad()
    loss = grpo_loss(logprobs, entropy, inputs, algorithm, counts).loss
    loss.backward()
    return float(loss.detach()), checkpoint_gradients(hf)


def checkpoint_gradients(hf: Any) -> dict[str, Tensor]:
    """Gradients under the names of the checkpoint (transformers 5 stacks the experts in memory)."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in hf.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if name.endswith("mlp.experts.gate_up_proj"):
            stem = name.replace("mlp.experts.gate_up_proj", "block_sparse_moe.experts")
            for expert, both in enumerate(gradient):
                gradients[f"{stem}.{expert}.w1.weight"], gradients[f"{stem}.{expert}.w3.weight"] = both.chunk(2)
        elif name.endswith("mlp.experts.down_proj"):
            stem = name.replace("mlp.experts.down_proj", "block_sparse_moe.experts")
            for expert, down in enumerate(gradient):
                gradients[f"{stem}.{expert}.w2.weight"] = down
        else:
            gradients[name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")] = gradient
    return gradients
