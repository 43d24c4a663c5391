"""Linear layers in FP8: the three products, what is saved, gradient buffers, recomputation, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from grpo_mc.ops import reference
from helpers.compare import assert_close, sqnr_db
from helpers.engines import load_policy, make_requests, single_mesh, tokens_of
from helpers.training import denominators_of, gradients_of, make_batches, make_groups, make_policy

TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")
WEIGHT, TOKENS = (128, 128), (128, 1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with single_mesh() as built:
        yield built


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """x through FP8 and back, by the reference; float64."""
    return reference.dequantize_fp8(*reference.quantize_fp8(x, tile=tile), tile=tile).double()


def run(layer: torch.nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]  # type: ignore[list-item,union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, k, n", [(300, 200, 300), (7, 64, 24), (1, 129, 130), (256, 256, 128)])
def test_gradients_are_near_those_of_the_plain_layer(tokens: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Signal to quantisation noise as torchao asks of its layers: 25 dB forward and for gradients."""
    from grpo_mc.megatron.fp8_linear import TileScaledLinear

    layer, plain = TileScaledLinear(k, n, dtype=dtype), torch.nn.Linear(k, n, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    x, grad = normal(tokens, k, dtype=dtype), normal(tokens, n, seed=1, dtype=dtype)
    names = ("out", "input's gradient", "weight's gradient", "bias's gradient")
    for name, got, want in zip(names, run(layer, x, grad), run(plain, x, grad), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert sqnr_db(got, want) >= 25, (name, sqnr_db(got, want))


def test_each_product_is_that_of_operands_rounded_once() -> None:
    """Against float64 with magnitudes that differ by row and column, so that a tile along the wrong axis shows."""
    from grpo_mc.megatron.fp8_linear import tile_scaled_linear

    x = (normal(2, 150, 260) * torch.logspace(-3, 3, 260)).requires_grad_()
    weight = normal(140, 260, seed=1).requires_grad_()
    grad = normal(2, 150, 140, seed=2) * torch.logspace(-2, 2, 300).view(2, 150, 1)
    out = tile_scaled_linear(x, weight)
    out.backward(grad)
    rows, grads = x.detach().view(300, 260), grad.view(300, 140)
    assert out.shape == (2, 150, 140) and x.grad is not None and weight.grad is not None
    codes = rounded(weight.detach(), WEIGHT)
    assert_close(out.detach().view(300, 140), rounded(rows, (1, 128)) @ codes.t(), 3e-6, "forward")
    assert_close(x.grad.view(300, 260), rounded(grads, (1, 128)) @ codes, 3e-6, "input's gradient")
    assert_close(weight.grad, rounded(grads, TOKENS).t() @ rounded(rows, TOKENS), 3e-6, "weight's gradient")


def test_what_is_saved_is_codes_along_the_tokens_and_the_weight() -> None:
    from grpo_mc.megatron.fp8_linear import tile_scaled_linear

    x, weight = normal(256, 128).requires_grad_(), normal(64, 128).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        tile_scaled_linear(x, weight)
    assert [(each.dtype, tuple(each.shape)) for each in saved] == [
        (torch.float32, (64, 128)), (torch.float8_e4m3fn, (256, 128)), (torch.float32, (2, 128)),
    ]  # fmt: skip
    assert saved[0].data_ptr() == weight.data_ptr()
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        tile_scaled_linear(x, weight.detach())  # frozen: nothing of x is needed
    assert len(saved) == 1 and saved[0].data_ptr() == weight.data_ptr()


def test_frozen_weights_and_inputs_without_gradient() -> None:
    from grpo_mc.megatron.fp8_linear import tile_scaled_linear

    x, weight = normal(9, 20).requires_grad_(), normal(12, 20, seed=1)
    tile_scaled_linear(x, weight).sum().backward()
    assert x.grad is not None
    tile_scaled_linear(x.detach(), weight.requires_grad_()).sum().backward()
    assert weight.grad is not None
    tile_scaled_linear(torch.zeros(0, 20), weight).sum().backward()
    with torch.no_grad():
        assert not tile_scaled_linear(x, weight).requires_grad
    (first,) = torch.autograd.grad(tile_scaled_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(ValueError, match="Half"):
        tile_scaled_linear(x.half(), weight)


def test_recomputing_gives_the_same_bits() -> None:
    from grpo_mc.megatron.fp8_linear import TileScaledLinear

    torch.manual_seed(0)
    layer = torch.nn.Sequential(TileScaledLinear(70, 200), torch.nn.SiLU(), TileScaledLinear(200, 70))

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    x, grad = normal(130, 70), normal(130, 70, seed=1)
    for once, twice in zip(run(layer, x, grad), run(Again(), x, grad), strict=True):
        assert torch.equal(once, twice)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_buffer_is_added_to(main_dtype: torch.dtype) -> None:
    """As Megatron-Core's own layers treat it: two backward passes add up, autograd gets a tensor nobody reads."""
    from grpo_mc.megatron.fp8_linear import TileScaledLinear

    layer, x, grad = TileScaledLinear(50, 30, bias=False), normal(40, 50), normal(40, 30, seed=1)
    weight: Any = layer.weight
    (_, _, want) = run(layer, x, grad)
    layer.gradient_accumulation_fusion = True
    (_, _, without) = run(layer, x, grad)
    assert torch.equal(without, want)  # there is no buffer yet
    weight.main_grad = torch.ones(30, 50, dtype=main_dtype)
    weight.grad = None
    layer(x).backward(grad)
    layer(x).backward(grad)
    assert weight.grad is None  # no mark, no tensor
    assert_close(weight.main_grad, 2 * want + 1, 1e-6 if main_dtype == torch.float32 else 1e-2)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    layer(x).backward(grad)
    assert weight.grad_added_to_main_grad and not weight.grad.any()


def linear_pair(kind: str, **changes: Any) -> list[Any]:
    """A plain layer and ours with the same arguments and weights."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from grpo_mc.megatron.fp8_linear import TileScaledColumnParallelLinear, TileScaledRowParallelLinear

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    arguments: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": True,
        "skip_bias_add": False,
    }
    if kind == "row":
        arguments["input_is_parallel"] = True
    classes = (RowParallelLinear, TileScaledRowParallelLinear) if kind == "row" else (
        ColumnParallelLinear, TileScaledColumnParallelLinear)  # fmt: skip
    layers = [each(200, 140, **arguments | changes) for each in classes]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


@pytest.mark.parametrize("kind", ["column", "row"])
def test_parallel_layers_have_the_contract_and_checkpoints_of_the_plain_ones(kind: str, mesh: Any) -> None:
    plain, ours = linear_pair(kind)
    x, grad = normal(20, 1, 200), normal(20, 1, 140, seed=1)

    def first(layer: Any) -> torch.nn.Module:
        class Output(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                out, bias = self.layer(x)
                assert bias is None
                return out

        return Output()

    for got, want in zip(run(first(ours), x, grad), run(first(plain), x, grad), strict=True):
        assert sqnr_db(got, want) >= 25
    metadata = {"dp_cp_group": mesh.dp_group}
    shards = [layer.sharded_state_dict("layer.", (), metadata) for layer in (plain, ours)]
    assert list(shards[0]) == list(shards[1])
    for name in shards[0]:
        mine, theirs = (each[name].__dict__ | {"data": None} for each in shards)
        assert mine == theirs
    out, bias = linear_pair(kind, skip_bias_add=True)[1](x)
    assert torch.equal(bias, torch.zeros(140)) and out.shape == (20, 1, 140)
    assert dict(plain.named_parameters()).keys() == dict(ours.named_parameters()).keys()


def test_a_gradient_that_is_put_off_is_refused(mesh: Any) -> None:
    ours = linear_pair("column", grad_output_buffer=[], embedding_activation_buffer=[])[1]
    ours.config.defer_embedding_wgrad_compute = True
    with pytest.raises(ValueError, match="leave the output layer plain"):
        ours(normal(3, 1, 200))


def experts_of(mesh: Any, folder: Path) -> Any:
    return load_policy(folder, mesh, fp8="tile_scaled").decoder.layers[0].mlp.experts


@pytest.mark.parametrize("counts", [[3, 0, 0, 1], [0, 0, 0, 0], [200, 5, 131, 9], [0, 0, 300, 0]])
def test_experts_in_one_product_are_experts_one_by_one(
    counts: list[int], mesh: Any, tiny_model: Callable[..., Path]
) -> None:
    """H17. Bit for bit: output, gradients of rows and probabilities, and of every expert's weights."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = experts_of(mesh, tiny_model("mixtral"))
    rows = sum(counts)
    found = []
    for forward in (type(experts).forward, SequentialMLP.forward):
        experts.zero_grad()
        x, probs = normal(rows, 64).requires_grad_(), torch.rand(rows, generator=torch.Generator().manual_seed(1))
        probs.requires_grad_()
        out, bias = forward(experts, x, torch.tensor(counts), probs)
        assert bias is None and out.shape == (rows, 64)
        out.backward(normal(rows, 64, seed=2))
        found.append([out.detach(), x.grad, probs.grad, *(each.grad for each in experts.parameters())])
    assert len(found[0]) == 3 + 2 * 4
    for together, alone in zip(*found, strict=True):
        assert torch.equal(together, alone)
    for expert, count in zip(experts.local_experts, counts, strict=True):
        assert bool(expert.linear_fc1.weight.grad.any()) == (count > 0)


def test_experts_add_to_gradient_buffers_and_checkpoint_alike(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    ours = experts_of(mesh, tiny_model("mixtral"))
    plain = load_policy(tiny_model("mixtral"), mesh).decoder.layers[0].mlp.experts
    x, probs, counts = normal(90, 64), torch.ones(90), torch.tensor([60, 0, 9, 21])
    ours(x, counts, probs)[0].backward(normal(90, 64, seed=2))
    for expert in ours.local_experts:
        for layer in (expert.linear_fc1, expert.linear_fc2):
            layer.gradient_accumulation_fusion = True
            layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.ones_like(layer.weight), False
            layer.weight.want, layer.weight.grad = layer.weight.grad, None
    ours(x, counts, probs)[0].backward(normal(90, 64, seed=2))
    for name, weight in ours.named_parameters():
        assert weight.grad_added_to_main_grad, name
        assert_close(weight.main_grad, weight.want + 1, 1e-6, name)
    assert (ours.local_experts[1].linear_fc1.weight.main_grad == 1).all()
    assert plain.state_dict().keys() == ours.state_dict().keys()
    metadata = {"dp_cp_group": mesh.dp_group}
    assert plain.sharded_state_dict("e.", (), metadata).keys() == ours.sharded_state_dict("e.", (), metadata).keys()


def test_experts_refuse_what_a_grouped_product_has_not(mesh: Any, tiny_model: Callable[..., Path]) -> None:
    experts = experts_of(mesh, tiny_model("mixtral"))
    for name in ("add_bias_linear", "moe_apply_probs_on_input"):
        setattr(experts.config, name, True)
        with pytest.raises(ValueError, match=f"{name} is True"):
            type(experts)(4, experts.config, None, None)
        setattr(experts.config, name, False)


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
