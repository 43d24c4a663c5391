"""model.fp8=tile_scaled in whole models: gradients, recompute, training, memory, sampling, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from helpers.compare import sqnr_db
from helpers.engines import load_policy, make_requests, single_mesh, tokens_of
from helpers.training import denominators_of, gradients_of, make_batches, make_groups, make_policy

TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")
WEIGHT, TOKENS = (128, 128), (128, 1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as built:
        yield built


def batches_of(policy: Any, mesh: Any) -> list[Any]:
    groups = make_groups([(5, [4, 0, 9]), (2, [30, 33]), (12, [40, 50, 41])], 264)
    plan = [tuple(GroupPart(at, tuple(range(len(group.rollouts)))) for at, group in enumerate(groups))]
    return make_batches(groups, plan, policy.algorithm, mesh)


@pytest.mark.parametrize("layers, bound_db", [(1, 15.0), (4, 13.0)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_models_gradients_are_near_those_in_float32(
    family: str, layers: int, bound_db: float, mesh: Any, tiny_model: Callable[..., Path]
) -> None:
    """All gradients together. A layer's four products, forward and backward, each add noise of -28.8 dB."""
    found, logprobs = [], []
    for fp8 in ("none", "tile_scaled"):
        policy = make_policy(tiny_model(family, num_hidden_layers=layers), mesh, TOKEN_MEAN, fp8=fp8)
        batches = batches_of(policy, mesh)
        for batch in batches:  # ratio 1: a token that is clipped on one side only would say nothing of precision
            batch.loss = replace(batch.loss, old_logprobs=None)
        logprobs.append(torch.from_numpy(policy.logprobs(batches)[0]))
        policy.backward(batches, denominators_of(batches))
        found.append(gradients_of(policy, mesh))
    flat = [torch.cat([gradient.flatten() for gradient in gradients.values()]) for gradients in found]
    assert sqnr_db(flat[1], flat[0]) >= bound_db
    gap = (logprobs[1] - logprobs[0]).abs()
    assert 0 < float(gap.mean()) < 0.1


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_score_does_not_depend_on_the_batch(family: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """So the ratio of an unchanged policy is 1, though scoring and training cut a batch in ways of their own.

    Experts see few or many rows here, which are summed in different orders: a code may flip, no more.
    """
    policy = make_policy(tiny_model(family, num_hidden_layers=4), mesh, TOKEN_MEAN, fp8="tile_scaled")
    groups = make_groups([(5, [4, 7, 9]), (12, [40, 50, 41])], 264)
    parts = [GroupPart(group, (sample,)) for group in (0, 1) for sample in (0, 1, 2)]
    plans = [[(GroupPart(0, (0, 1, 2)), GroupPart(1, (0, 1, 2)))], [(part,) for part in parts]]
    together, alone = (np.concatenate(policy.logprobs(make_batches(groups, plan, TOKEN_MEAN, mesh))) for plan in plans)
    assert len(together) == 151
    assert np.abs(together - alone).max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_recompute_changes_no_gradient(family: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    found = []
    for recompute in ("none", "full"):
        policy = make_policy(tiny_model(family), mesh, TOKEN_MEAN, fp8="tile_scaled", recompute=recompute)
        batches = batches_of(policy, mesh)
        policy.backward(batches, denominators_of(batches))
        found.append(gradients_of(policy, mesh))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), f"{family} {name}"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_keeps_as_much_less_as_the_memory_estimate_says(
    family: str, dtype: str, mesh: Any, tiny_model: Callable[..., Path]
) -> None:
    from grpo_mc.megatron.memory_estimate import Layout, estimate_memory

    kept, said = [], []
    for fp8 in ("none", "tile_scaled"):
        policy = make_policy(tiny_model(family), mesh, TOKEN_MEAN, fp8=fp8, dtype=dtype)
        batches = make_batches(make_groups([(100, [157])], 264), [(GroupPart(0, (0,)),)], TOKEN_MEAN, mesh)
        saved: dict[int, Tensor] = {}  # by the address of their memory, which stays taken

        def keep(x: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            policy.backward(batches, denominators_of(batches))
        for parameter in policy.model.parameters():
            saved.pop(parameter.untyped_storage().data_ptr(), None)
        kept.append(sum(x.untyped_storage().nbytes() for x in saved.values()))
        layout = Layout(dtype=dtype, fp8=fp8 != "none", max_tokens_per_micro_batch=256)  # no layer sees the last token
        said.append(estimate_memory(policy.model.architecture, layout).activations)
    assert kept[0] - kept[1] == pytest.approx(said[0] - said[1], rel=0.03)  # each expert has a scale more


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_follows_float32(family: str, dtype: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """Twenty steps on one batch: the loss falls as it does without FP8, and all weights are trained."""
    losses = {}
    for fp8 in ("none", "tile_scaled"):
        policy = make_policy(tiny_model(family), mesh, TOKEN_MEAN, fp8=fp8, dtype=dtype)
        batches = batches_of(policy, mesh)
        before = [parameter.detach().clone() for parameter in policy.model.parameters()]
        losses[fp8] = []
        for _ in range(20):
            losses[fp8].append(policy.backward(batches, denominators_of(batches))["loss"])
            assert policy.step(3e-3)[0]
        changed = [not torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True)]
        assert all(changed)
    plain, ours = (np.array(losses[name]) for name in ("none", "tile_scaled"))
    fall = plain[0] - plain[-1]
    assert fall > 0.1
    assert np.abs(ours - plain).max() < 0.1 * fall, (plain, ours)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sampling_uses_the_weights_as_they_are(family: str, mesh: Any, tiny_model: Callable[..., Path]) -> None:
    """The native engine on a model that trains in FP8 gives the plain model's tokens and log-probs, bit for bit."""
    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.rollout.native import NativeEngine
    from grpo_mc.rollout.sampling import SamplingParams

    folder, found = tiny_model(family), []
    for fp8 in ("none", "tile_scaled"):
        engine = NativeEngine(load_policy(folder, mesh, fp8=fp8), mesh, load_tokenizer(folder), seed=3)
        responses = engine.generate(make_requests([4, 9], 2), SamplingParams(temperature=1.0, max_new_tokens=6))
        found.append((tokens_of(responses), [list(each.logprobs) for each in responses]))
    assert found[0] == found[1]


def test_a_device_without_the_products_is_refused_before_the_model_is_built(
    mesh: Any, tiny_model: Callable[..., Path]
) -> None:
    elsewhere = replace(mesh, device=torch.device("xpu"))
    for family, operators in (("llama", "quantize_fp8, fp8_gemm_ cannot"), ("mixtral", "fp8_grouped_wgrad_ cannot")):
        with pytest.raises(ValueError, match=f"{operators} run on xpu; set model.fp8=none"):
            load_policy(tiny_model(family), elsewhere, fp8="tile_scaled")


def test_only_the_layers_products_are_in_fp8(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    from grpo_mc.megatron.fp8_experts import TileScaledExperts

    model = load_policy(tiny_model("mixtral"), mesh, fp8="tile_scaled")
    layer = model.decoder.layers[0]
    experts = layer.mlp.experts
    assert isinstance(experts, TileScaledExperts)
    columns = (layer.self_attention.linear_qkv, experts.local_experts[3].linear_fc1)
    rows = (layer.self_attention.linear_proj, experts.local_experts[3].linear_fc2)
    assert all(type(each).__name__ == "TileScaledColumnParallelLinear" for each in columns)
    assert all(type(each).__name__ == "TileScaledRowParallelLinear" for each in rows)
    assert type(model.output_layer).__name__ == "ColumnParallelLinear"
    plain = load_policy(tiny_model("mixtral"), mesh)
    assert model.state_dict().keys() == plain.state_dict().keys()
    metadata = {"dp_cp_group": mesh.dp_group}
    assert model.sharded_state_dict(metadata=metadata).keys() == plain.sharded_state_dict(metadata=metadata).keys()
