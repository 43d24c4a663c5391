"""rollout.batch_invariant: tokens and log-probs are the same bit for bit, whatever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mc.rollout.layouts import RopeTable
from grpo_mc.rollout.row_tiles import TILE_ROWS, FixedRowTiles
from grpo_mc.rollout.sampling import SamplingParams
from helpers.engines import make_requests, trainer_logprobs

LENGTHS = [1, 5, 16, 33, 2]
PARAMS = SamplingParams(max_new_tokens=6, temperature=1.3)
# Wide enough that torch and its libraries split work over threads and choose kernels by the number of rows.
WIDE = {"hidden_size": 576, "intermediate_size": 1500, "num_hidden_layers": 2, "num_attention_heads": 9,
        "num_key_value_heads": 3}  # fmt: skip


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bits(responses: list[Any]) -> dict[Any, Any]:
    """Everything that must not change by a bit."""
    return {(r.group_id, r.sample_index): (r.token_ids, r.logprobs, r.finish_reason) for r in responses}


def engine_of(policy: Callable[..., Any], mesh: Any, *key: Any, changes: Any = None, **options: Any) -> Any:
    from grpo_mc.rollout.native import NativeEngine

    model, tokenizer = policy(*key, **(changes or {}))
    return NativeEngine(model, mesh, tokenizer, seed=5, batch_invariant=True, **options)


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "fp32"), ("qwen2", "fp32"), ("qwen3", "fp32"), ("mixtral", "fp32"), ("mixtral", "bf16"),
])  # fmt: skip
def test_bits_do_not_depend_on_the_batch(family: str, dtype: str, policy: Callable[..., Any], mesh: Any) -> None:
    requests = make_requests(LENGTHS, 4)
    usual = bits(engine_of(policy, mesh, family, dtype).generate(requests, PARAMS))
    for rows, block, prefill in ((1, 16, 4096), (3, 4, 8), (7, 1, 40)):
        engine = engine_of(
            policy, mesh, family, dtype, max_batch_rows=rows, kv_block_size=block, max_prefill_tokens=prefill
        )
        assert bits(engine.generate(requests, PARAMS)) == usual, (rows, block, prefill)
    others = make_requests([3, 40, 9], 11, first_id=50)
    mixed = [*requests, *others]
    random.Random(1).shuffle(mixed)
    found = bits(engine_of(policy, mesh, family, dtype).generate(mixed, PARAMS))
    assert {key: value for key, value in found.items() if key[0] < 50} == usual


def test_bits_do_not_depend_on_the_batch_in_a_wide_model(threads: int, policy: Callable[..., Any], mesh: Any) -> None:
    """More than 32768 elements to an operation, over several threads whose shares are no whole rows."""
    requests = make_requests([3, 20], 25)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    usual = bits(engine_of(policy, mesh, changes=WIDE).generate(requests, params))
    for rows in (1, 9):
        some = [request for request in requests if rows > 1 or request.group_id == 0]
        found = bits(engine_of(policy, mesh, changes=WIDE, max_batch_rows=rows).generate(some, params))
        assert found == {key: usual[key] for key in found}, rows


def test_the_values_are_those_of_the_usual_arithmetic(policy: Callable[..., Any], mesh: Any) -> None:
    requests = make_requests(LENGTHS, 3)
    responses = engine_of(policy, mesh).generate(requests, PARAMS)
    scored = trainer_logprobs(policy()[0], mesh, requests, responses, 1.3)
    for r in responses:
        assert abs(torch.tensor(r.logprobs) - torch.from_numpy(scored[r.group_id, r.sample_index])).max() < 1e-5


class _Products(TorchDispatchMode):
    """Records the number of rows of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear", "aten.baddbmm", "aten.matmul"):
            self.names.add(name)
            self.rows.add(args[1 if name == "aten.addmm" else 0].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_every_product_of_the_model_is_tiled(family: str, policy: Callable[..., Any], mesh: Any) -> None:
    """Or goes through row_linear, which is invariant by itself; a product that a new model adds cannot slip by."""
    with _Products() as seen:
        engine_of(policy, mesh, family).generate(make_requests([5, 40], 3), PARAMS)
    assert seen.names <= {"aten.mm"} and seen.rows <= {TILE_ROWS}
    assert bool(seen.names) == (family == "mixtral")  # the router's product


@pytest.mark.parametrize(("width", "columns"), [(37, 51), (64, 4), (1500, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_product_at_any_place(width: int, columns: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(columns, width, generator=generator).to(dtype)
    row = torch.randn(width, generator=generator).to(dtype)
    found = set()
    for count, at in ((1, 0), (2, 1), (5, 2), (31, 30), (32, 31), (33, 32), (64, 40), (70, 5)):
        x = torch.randn(count, 1, width, generator=generator).to(dtype)
        x[at] = row
        with FixedRowTiles():
            results = (torch.matmul(x, weight.t()), F.linear(x, weight), x @ weight.t())
        assert all(out.shape == (count, 1, columns) for out in results)
        found |= {out[at].float().numpy().tobytes() for out in results}
        assert torch.allclose(results[0].double(), x.double() @ weight.double().t(), rtol=0.02, atol=0.5)
    assert len(found) == 1


@pytest.mark.parametrize("width", [1, 37, 100, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_activation_at_any_place(width: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(width)
    row = torch.randn(2 * width, generator=generator).to(dtype)
    found = set()
    for count, at in ((1, 0), (3, 1), (17, 16), (64, 0), (67, 45)):
        both = torch.randn(count, 1, 2 * width, generator=generator).to(dtype)
        both[at] = row
        x = both.chunk(2, dim=-1)[0]
        with FixedRowTiles():
            results = F.silu(x), F.silu(x.contiguous())
        for out in results:
            assert torch.allclose(out.float(), F.silu(x).float(), rtol=0.01, atol=1e-6)
            found.add(out[at].float().numpy().tobytes())
    assert len(found) == 1


def test_no_rows_and_a_bias() -> None:
    weight, bias = torch.randn(5, 3), torch.randn(5)
    with FixedRowTiles():
        assert F.linear(torch.zeros(0, 3), weight).shape == (0, 5)
        assert F.silu(torch.zeros(0, 3)).shape == (0, 3)
        found = F.linear(torch.ones(2, 3), weight, bias)
    assert torch.allclose(found, F.linear(torch.ones(2, 3), weight, bias), atol=1e-6)


def test_rope_of_a_position_is_fixed_and_right() -> None:
    inverse = 1.0 / 10000.0 ** (torch.arange(0, 14, 2).float() / 14)
    table, later = RopeTable(), RopeTable()
    table.num_positions = 5
    first = table.lookup(torch.tensor([4, 0]), inverse, torch.float32)
    table.num_positions = 3000
    again = table.lookup(torch.tensor([4, 2999, 0]), inverse, torch.float32)
    later.num_positions = 2100
    other = later.lookup(torch.tensor([0, 4]), inverse, torch.float32)
    for kind, function in enumerate((torch.cos, torch.sin)):
        assert first[kind].shape == (2, 1, 7)
        assert torch.equal(again[kind][[0, 2]], first[kind]) and torch.equal(other[kind][[1, 0]], first[kind])
        assert torch.allclose(again[kind][1, 0], function(2999.0 * inverse), atol=1e-4)
        assert torch.allclose(first[kind][0, 0], function(4.0 * inverse), atol=1e-6)


def test_three_tensor_ranks_are_refused(policy: Callable[..., Any], mesh: Any) -> None:
    from dataclasses import replace

    from grpo_mc.rollout.native import NativeEngine

    model, tokenizer = policy()
    with pytest.raises(ValueError, match=r"batch_invariant with parallel.tp 3"):
        NativeEngine(model, replace(mesh, tp=3), tokenizer, seed=0, batch_invariant=True)
