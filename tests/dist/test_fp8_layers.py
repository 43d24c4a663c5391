"""FP8 layers on two ranks: equal to one process where tiles coincide, near it where they do not, with and without
sequence parallelism; whole models under tensor and expert parallelism.

One launch runs everything, because importing the engine costs more than the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mc.config import AlgorithmConfig
from grpo_mc.data.micro_batches import GroupPart
from helpers.compare import assert_close, sqnr_db
from helpers.engines import make_requests, single_mesh, tokens_of
from helpers.processes import run_distributed
from helpers.training import denominators_of, gradients_of, make_batches, make_groups, make_policy

pytestmark = pytest.mark.dist

# (name, tokens, inputs, hidden): the first splits into whole tiles everywhere, the others nowhere.
SIZES = [("whole tiles", 256, 256, 256), ("tails", 42, 192, 160), ("few tokens", 2, 130, 20)]
LAYOUTS = [("llama", {"tp": 2}), ("mixtral", {"tp": 2}), ("mixtral", {"ep": 2})]
TOKEN_MEAN = AlgorithmConfig(aggregation="token_mean")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_layers(tokens: int, inputs: int, hidden: int, tp: int, rank: int, sequence_parallel: bool) -> dict[str, Tensor]:
    """Column- then row-parallel layer: this rank's output, gradients of the input and of the two weights."""
    from megatron.core.transformer import TransformerConfig

    from grpo_mc.megatron.fp8_linear import TileScaledColumnParallelLinear, TileScaledRowParallelLinear

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, perform_initialization=False,
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    shared: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "skip_bias_add": False}
    first = TileScaledColumnParallelLinear(inputs, hidden, **shared)
    second = TileScaledRowParallelLinear(hidden, inputs, input_is_parallel=True, **shared)
    with torch.no_grad():
        first.weight.copy_(normal(hidden, inputs, seed=1).div(inputs**0.5).chunk(tp, 0)[rank])
        second.weight.copy_(normal(inputs, hidden, seed=2).div(hidden**0.5).chunk(tp, 1)[rank])
    x, grad = normal(tokens, 1, inputs, seed=3), normal(tokens, 1, inputs, seed=4)
    if sequence_parallel:
        x, grad = x.chunk(tp)[rank], grad.chunk(tp)[rank]
    x = x.clone().requires_grad_()
    out = second(torch.nn.functional.silu(first(x)[0]))[0]
    out.backward(grad)
    assert x.grad is not None and first.weight.grad is not None and second.weight.grad is not None
    return {"out": out.detach(), "x": x.grad, "first": first.weight.grad, "second": second.weight.grad}


def model_step(folder: Path, mesh: Any, fp8: str, **options: Any) -> dict[str, Tensor]:
    """Gradients by name on rank 0 of one step on a fixed batch."""
    policy = make_policy(folder, mesh, TOKEN_MEAN, fp8=fp8, **options)
    groups = make_groups([(5, [4, 0, 9]), (3, [30, 33])], 264)
    plan: list[Any] = [(GroupPart(0, (0, 1, 2)), GroupPart(1, (0, 1)))]
    if mesh.dp == 2:
        plan = [(GroupPart(mesh.dp_rank, tuple(range(len(groups[mesh.dp_rank].rollouts)))),)]
    batches = make_batches(groups, plan, TOKEN_MEAN, mesh, pad_multiple=mesh.tp)
    for batch in batches:
        batch.loss = replace(batch.loss, old_logprobs=None)
    whole = make_batches(groups, [(GroupPart(0, (0, 1, 2)), GroupPart(1, (0, 1)))], TOKEN_MEAN, mesh)
    policy.backward(batches, denominators_of(whole))
    found = gradients_of(policy, mesh)
    assert policy.step(1e-3)[0]
    return found


def sampled(folder: Path, mesh: Any, fp8: str) -> Any:
    """Tokens of the native engine."""
    from grpo_mc.data.tokenizer import load_tokenizer
    from grpo_mc.rollout.native import NativeEngine
    from grpo_mc.rollout.sampling import SamplingParams
    from helpers.engines import load_policy

    engine = NativeEngine(load_policy(folder, mesh, fp8=fp8), mesh, load_tokenizer(folder), seed=3)
    responses = engine.generate(make_requests([4, 9], 2), SamplingParams(temperature=1.0, max_new_tokens=5))
    return tokens_of(responses), [list(each.logprobs) for each in responses]


def everything(folders: dict[str, Path]) -> dict[str, Any]:
    """On every rank of two: the layers under both ways, the models' gradients, and what the engine samples."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.mesh import build_mesh

    found: dict[str, Any] = {}
    for family, degrees in LAYOUTS:
        mesh = build_mesh(**degrees, timeout_s=60)
        if (family, degrees) == LAYOUTS[0]:
            for name, *sizes in SIZES:
                for sequence_parallel in (False, True):
                    found[name, sequence_parallel] = two_layers(*sizes, 2, mesh.tp_rank, sequence_parallel)
        key = (family, *degrees)
        found[key] = model_step(folders[family], mesh, "tile_scaled")
        found[(*key, "recomputed")] = model_step(folders[family], mesh, "tile_scaled", recompute="full")
        if family == "mixtral":
            found[(*key, "sampled")] = [sampled(folders[family], mesh, fp8) for fp8 in ("none", "tile_scaled")]
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {family: tiny_model(family, num_hidden_layers=2) for family in ("llama", "mixtral")}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return run_distributed(everything, 2, folders, timeout_s=180)


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[Any, Any]:
    """The same on one process, in FP8 and in float32."""
    with single_mesh() as mesh:
        found: dict[Any, Any] = {name: two_layers(*sizes, 1, 0, False) for name, *sizes in SIZES}
        for family, folder in folders.items():
            for fp8 in ("none", "tile_scaled"):
                found[family, fp8] = model_step(folder, mesh, fp8)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [name for name, *_ in SIZES])
def test_two_ranks_compute_what_one_computes(
    name: str, sequence_parallel: bool, ranks: list[dict[str, Any]], alone: dict[Any, Any]
) -> None:
    """Where tiles coincide only the order of sums differs, and with it a rounding to FP8 here and there."""
    parts = [rank[name, sequence_parallel] for rank in ranks]
    joined = {"first": torch.cat([p["first"] for p in parts]), "second": torch.cat([p["second"] for p in parts], 1)}
    for key in ("out", "x"):
        joined[key] = torch.cat([part[key] for part in parts]) if sequence_parallel else parts[0][key]
        if not sequence_parallel:
            assert torch.equal(parts[0][key], parts[1][key])
    for key, want in alone[name].items():
        if name == "whole tiles":
            assert_close(joined[key], want, 1e-3, (key, sequence_parallel))
        else:
            assert sqnr_db(joined[key], want) >= 20, (key, sqnr_db(joined[key], want))


@pytest.mark.parametrize("family, degrees", LAYOUTS, ids=str)
def test_a_models_gradients_are_near_those_of_one_process(
    family: str, degrees: dict[str, int], ranks: list[dict[str, Any]], alone: dict[Any, Any]
) -> None:
    """As near to float32 as one process in FP8 is: tiles lie otherwise, and are no coarser."""
    names = alone[family, "none"].keys()
    both = (ranks[0][(family, *degrees)], alone[family, "tile_scaled"], alone[family, "none"])
    ours, single, plain = (torch.cat([gradients[name].flatten() for name in names]) for gradients in both)
    assert sqnr_db(ours, plain) >= sqnr_db(single, plain) - 3


@pytest.mark.parametrize("family, degrees", LAYOUTS, ids=str)
def test_recompute_changes_no_gradient(family: str, degrees: dict[str, int], ranks: list[dict[str, Any]]) -> None:
    """Bit for bit: what is gathered, and where tokens are sent, is the same the second time."""
    once, twice = ranks[0][(family, *degrees)], ranks[0][(family, *degrees, "recomputed")]
    assert once and once.keys() == twice.keys()
    for name, gradient in once.items():
        assert torch.equal(gradient, twice[name]), name


@pytest.mark.parametrize("family, degrees", LAYOUTS[1:], ids=str)
def test_sampling_uses_the_weights_as_they_are(family: str, degrees: dict[str, int], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, ours = rank[(family, *degrees, "sampled")]
        assert plain == ours
