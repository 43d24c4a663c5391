"""The stand-ins for CUDA inside Megatron-Core: each does its work there, none is seen outside, all can be undone."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grpo_mc.megatron import cpu_runtime
from helpers.compare import assert_close

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without CUDA")


@pytest.fixture
def vanilla() -> Iterator[None]:
    """Megatron-Core as it was imported, without stand-ins; afterwards again as it was found."""
    cpu_runtime.install()  # imports everything it reaches
    cpu_runtime.uninstall()
    yield
    cpu_runtime.uninstall()
    cpu_runtime.install()


@pytest.fixture
def installed() -> None:
    assert cpu_runtime.install()


@pytest.fixture
def inside(installed: None) -> types.ModuleType:
    """What the name torch means in a module of Megatron-Core."""
    return sys.modules["megatron.core.parallel_state"].torch  # type: ignore[no-any-return]


def run_as(module: str, code: str, **names: Any) -> Any:
    """The value of an expression evaluated in a module of this name."""
    return eval(code, {"__name__": module, "torch": torch, **names})


def state() -> dict[tuple[str, str], int]:
    """(owner, attribute) -> identity of everything that could be replaced."""
    found = {("torch.Tensor", name): id(value) for name, value in vars(torch.Tensor).items()}
    for name, module in sys.modules.items():
        if name.startswith("megatron.core"):
            for attribute, value in vars(module).items():
                found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(f"{name}.{attribute}", key): id(inner) for key, inner in vars(value).items()}
    return found


def changed(before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def test_uninstall_restores_everything(vanilla: None) -> None:
    before = state()
    cpu_runtime.install()
    assert len(changed(before, state())) > 100  # at the least a name torch in every module
    cpu_runtime.uninstall()
    assert not changed(before, state())


def test_installing_twice_is_undone_once(vanilla: None) -> None:
    before = state()
    cpu_runtime.install()
    once = state()
    cpu_runtime.install()
    assert not changed(once, state())
    cpu_runtime.uninstall()
    assert not changed(before, state())


def test_nothing_happens_beside_cuda(vanilla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_runtime.install() is False
    assert not changed(before, state())


def test_only_megatron_core_is_reached(vanilla: None) -> None:
    """Changes are in megatron.core's modules, and in two methods of torch.Tensor."""
    others = {name: dict(vars(module)) for name, module in sys.modules.items()
              if name.partition(".")[0] in ("torch", "grpo_mc") and name != cpu_runtime.__name__}  # fmt: skip
    before = state()
    cpu_runtime.install()
    touched = {owner for owner, _ in changed(before, state()) if not owner.startswith("megatron.core")}
    assert touched == {"torch.Tensor"}
    assert {name for owner, name in changed(before, state()) if owner == "torch.Tensor"} == {"cuda", "type"}
    for name, attributes in others.items():
        now = vars(sys.modules[name])
        assert all(now.get(key) is value for key, value in attributes.items()), name


def test_the_users_torch_still_knows_no_cuda(installed: None) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.LongTensor").dtype == torch.int64
    assert torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)).type() == "torch.BFloat16Tensor"
    assert torch.cuda.Stream is not cpu_runtime._Stream and not torch.cuda.is_available()


def test_tensor_methods_answer_megatron_core(installed: None) -> None:
    tensor = torch.zeros(2)
    assert run_as("megatron.core.some.module", "t.cuda()", t=tensor) is tensor
    assert run_as("megatron.core.some.module", "t.cuda(0, non_blocking=True)", t=tensor) is tensor
    for dtype, name in [(torch.float32, "Float"), (torch.bfloat16, "BFloat16"), (torch.float16, "Half")]:
        answer = run_as("megatron.core.optimizer.optimizer", "t.type()", t=tensor.to(dtype))
        assert answer == f"torch.cuda.{name}Tensor"
    assert run_as("megatron.core.some.module", "t.type(torch.int64)", t=tensor).dtype == torch.int64
    with pytest.raises((RuntimeError, AssertionError)):
        run_as("somebody.elses.module", "t.cuda()", t=tensor)
    assert run_as("megatron_core_lookalike", "t.type()", t=tensor) == "torch.FloatTensor"


FACTORY_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "tensor": ([1.0],), "zeros": (2,), "empty": (2,), "ones": (2,), "full": ((2,), 3.0), "arange": (2,), "rand": (2,),
    "randn": (2,), "randint": (0, 5, (2,)), "as_tensor": ([1.0],), "empty_like": (torch.zeros(2),),
    "zeros_like": (torch.zeros(2),), "ones_like": (torch.zeros(2),),
}  # fmt: skip


@pytest.mark.parametrize("name", cpu_runtime._FACTORIES)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), "cpu", None])
def test_factories_make_cpu_tensors_for_megatron_core(name: str, device: Any, inside: types.ModuleType) -> None:
    made = getattr(inside, name)(*FACTORY_ARGUMENTS[name], device=device)
    assert made.device.type == "cpu"


@pytest.mark.parametrize("name", sorted(set(cpu_runtime._FACTORIES) - {"as_tensor"}))
def test_pinned_memory_is_plain_memory(name: str, inside: types.ModuleType) -> None:
    assert not getattr(inside, name)(*FACTORY_ARGUMENTS[name], pin_memory=True).is_pinned()


def test_the_rest_of_torch_is_torch(inside: types.ModuleType) -> None:
    assert inside.Tensor is torch.Tensor and inside.nn is torch.nn and inside.distributed is torch.distributed
    assert inside.float32 is torch.float32 and inside.matmul is torch.matmul
    assert inside._dynamo is torch._dynamo  # found although torch loads it late
    with pytest.raises(AttributeError):
        _ = inside.no_such_name


def test_cuda_means_the_cpu_inside(inside: types.ModuleType) -> None:
    cuda = inside.cuda
    assert cuda is not torch.cuda and not cuda.is_available() and cuda.device_count() == 1
    assert inside.zeros(1, device=cuda.current_device()).device.type == "cpu"
    for nothing in ("set_device", "synchronize", "empty_cache"):
        assert getattr(cuda, nothing)() is None
    assert cuda.memory_allocated() == cuda.max_memory_allocated() == 0
    assert cuda.IntTensor is torch.cuda.IntTensor  # what has no stand-in is torch's own


def test_streams_and_events_run_in_order(inside: types.ModuleType) -> None:
    cuda = inside.cuda
    stream, event = cuda.Stream(device=0), cuda.Event(enable_timing=True)
    stream.wait_stream(cuda.current_stream())
    stream.wait_event(event)
    assert stream.record_event(event) is event and isinstance(stream.record_event(), cuda.Event)
    event.record(stream)
    event.wait(), event.synchronize(), stream.synchronize()
    assert event.query() is True and event.elapsed_time(cuda.Event()) == 0.0
    assert cuda.current_stream() is cuda.current_stream() and cuda.default_stream() is cuda.current_stream()
    with cuda.stream(stream), stream:
        pass


def test_the_generator_of_cuda_is_the_cpus(inside: types.ModuleType) -> None:
    cuda, before = inside.cuda, torch.get_rng_state()
    try:
        cuda.manual_seed(7)
        kept = cuda.get_rng_state()
        first = torch.rand(3)
        cuda.set_rng_state(kept)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), first)
        assert cuda.default_generators[0] is torch.default_generator
    finally:
        torch.set_rng_state(before)


def test_random_state_tracker_entries(installed: None) -> None:
    """Entries _get_cuda_rng_state, _set_cuda_rng_state: a fork draws from its own stream and puts ours back."""
    from megatron.core.tensor_parallel import random as tracker

    before = torch.get_rng_state()
    try:
        kept = tracker._get_cuda_rng_state()
        first = torch.rand(3)
        tracker._set_cuda_rng_state(kept)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(tracker._get_cuda_rng_state(device="cuda", clone=True), torch.get_rng_state())
        states = tracker.CudaRNGStatesTracker()
        states.add("a stream", 11)
        outside = torch.get_rng_state()
        with states.fork("a stream"):
            drawn = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), outside)
        torch.manual_seed(11)
        assert torch.equal(torch.rand(3), drawn)
    finally:
        torch.set_rng_state(before)


@pytest.mark.parametrize("module", ["moe_utils", "token_dispatcher"])
def test_split_sizes_become_numpy(module: str, installed: None) -> None:
    """Entries maybe_move_tensor_to_cpu."""
    move = importlib.import_module(f"megatron.core.transformer.moe.{module}").maybe_move_tensor_to_cpu
    sizes = torch.tensor([3, 0, 1])
    assert move(sizes) is sizes
    assert move(sizes, as_numpy=True, record_stream=True).tolist() == [3, 0, 1]
    assert not torch.is_tensor(move(sizes, as_numpy=True))
    assert move(None, as_numpy=True) is None and move([1, 2], as_numpy=True) == [1, 2]


@pytest.mark.parametrize(
    ("name", "of_torch"),
    [("dist_all_gather_func", "all_gather_into_tensor"), ("dist_reduce_scatter_func", "reduce_scatter_tensor")],
)
def test_a_lone_rank_copies_no_buffer(
    name: str, of_torch: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of param_and_grad_buffer: nothing to do in place and alone, torch's own otherwise."""
    from megatron.core.distributed import param_and_grad_buffer

    asked: list[str] = []
    monkeypatch.setattr(torch.distributed, of_torch, lambda *unused, **also: asked.append("done"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    function, buffer = getattr(param_and_grad_buffer, name), torch.arange(4.0)
    assert function(buffer, buffer, group=None, async_op=False) is None
    assert buffer.tolist() == [0, 1, 2, 3] and asked == []
    function(buffer, buffer.clone(), group=None)  # not in place
    function(buffer, buffer, group=None, async_op=True)  # the caller waits for a handle
    assert asked == ["done"] * 2


ONLY_BESIDE_CUDA_PACKAGES = {"te_general_gemm", "fused_weight_gradient_mlp_cuda"}


def test_every_stand_in_is_in_force(installed: None) -> None:
    for module_name, name, value, _ in cpu_runtime.ENTRIES:
        assert vars(importlib.import_module(module_name))[name] is value, (module_name, name)


def test_weight_gradients_are_added_in_place(installed: None) -> None:
    """Entries of tensor_parallel.layers: what the CUDA extension would do."""
    from megatron.core.tensor_parallel import layers

    rows, grads = torch.randn(5, 3), torch.randn(5, 2)
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.ones(2, 3)
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows.to(dtype), grads.to(dtype), total)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        assert_close(total, 1 + grads.T @ rows, tolerance, dtype)


@pytest.mark.parametrize("marked", [True, False])
def test_a_lookup_adds_to_the_rows_it_read(marked: bool, installed: None) -> None:
    """Entry F: a marked table's gradient goes into its buffer, another table's to autograd."""
    from megatron.core.tensor_parallel import layers

    table = torch.nn.Parameter(torch.randn(6, 2))
    if marked:
        table.main_grad, table.accumulates_lookups = torch.ones(6, 2), True  # type: ignore[attr-defined]
    rows = layers.F.embedding(torch.tensor([[4, 1], [4, 4]]), table)
    assert torch.equal(rows, table[torch.tensor([[4, 1], [4, 4]])])
    rows.sum().backward()
    expected = torch.tensor([0.0, 1, 0, 0, 3, 0])[:, None].expand(6, 2)
    if marked:
        assert table.grad is None and torch.equal(table.main_grad, 1 + expected)
    else:
        assert table.grad is not None and torch.equal(table.grad, expected)
    assert layers.F.silu is torch.nn.functional.silu


def test_every_entry_names_something_of_megatron_core(vanilla: None) -> None:
    """A stand-in for a name that a newer Megatron-Core has dropped would do nothing."""
    for module_name, name, _, why in cpu_runtime.ENTRIES:
        module = importlib.import_module(module_name)
        assert why
        looked_up = name in inspect.getsource(module)
        assert looked_up and (hasattr(module, name) or name in ONLY_BESIDE_CUDA_PACKAGES), (module_name, name)


def test_no_function_compiles_at_its_first_call(installed: None) -> None:
    compiled = [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for attribute, value in vars(module).items()
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
    ]
    assert not compiled


def test_a_module_imported_later_is_reached_by_the_next_install(installed: None) -> None:
    late = types.ModuleType("megatron.core.imported_late")
    late.torch = torch  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    try:
        cpu_runtime.install()
        assert late.torch.zeros(1, device="cuda").device.type == "cpu"
        cpu_runtime.uninstall()
        assert late.torch is torch
    finally:
        del sys.modules[late.__name__]
        cpu_runtime.install()
