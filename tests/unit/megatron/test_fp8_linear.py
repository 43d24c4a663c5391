"""Linear layers and experts in FP8: products, what is saved, gradient buffers, recomputation; see test_fp8_model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_mc.config import AlgorithmConfig
from grpo_mc.ops import reference
from helpers.compare import assert_close, sqnr_db
from helpers.engines import load_policy, single_mesh

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
