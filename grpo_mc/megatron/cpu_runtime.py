"""Megatron-Core on a machine without CUDA: the stand-ins for what it assumes of a GPU.

Megatron-Core names CUDA devices, streams, events and generators directly. Where there is no CUDA, `install` gives its
modules a proxy for the name `torch` whose `cuda` attribute and tensor factories mean the CPU. The proxy reaches
`megatron.core.*` only: the user's own torch is untouched. What a proxy for a module's name cannot reach is listed in
`ENTRIES` and replaced one by one. Two methods of `torch.Tensor` are replaced too, `cuda` and `type`; they act only for
callers inside Megatron-Core. `uninstall` puts everything back. On a machine with CUDA `install` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_mc.megatron import host_collectives
from grpo_mc.megatron.grad_accumulation import add_weight_gradient, functional_with_lookup

# Imported before patching, so that no module is imported later and missed.
_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)

_FACTORIES = "tensor zeros empty ones full arange rand randn randint as_tensor empty_like zeros_like ones_like".split()


class _Stream:
    """A stream of a device that runs everything in order: nothing ever has to wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None: ...


class _Event:
    """An event that has always already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _CpuAsCuda(types.ModuleType):
    """What `torch.cuda` means inside Megatron-Core here: one device, the CPU, and its generator."""

    Stream = _Stream
    Event = _Event
    default_generators: tuple[torch.Generator, ...] = (torch.default_generator,)

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.__dict__.update({k: v for k, v in vars(torch.cuda).items() if k not in vars(type(self))})
        current = _Stream()
        nothing = lambda *args, **kwargs: None  # noqa: E731 - one shared no-op reads best inline
        self.__dict__.update(
            is_available=lambda: False,
            current_device=lambda: torch.device("cpu"),
            set_device=nothing,
            device_count=lambda: 1,
            synchronize=nothing,
            empty_cache=nothing,
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
            current_stream=lambda *args: current,
            default_stream=lambda *args: current,
            stream=lambda stream: contextlib.nullcontext(),
            memory_allocated=lambda *args: 0,
            max_memory_allocated=lambda *args: 0,
        )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory for which device="cuda..." means the CPU and pinned memory means plain memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _make_proxy() -> types.ModuleType:
    proxy = types.ModuleType("torch")
    # A snapshot, so that look-ups cost a dictionary access; what is loaded lazily falls through to torch.
    proxy.__dict__.update(vars(torch))
    proxy.__dict__["__getattr__"] = lambda name: getattr(torch, name)
    proxy.__dict__["cuda"] = _CpuAsCuda()
    for name in _FACTORIES:
        proxy.__dict__[name] = _on_cpu(getattr(torch, name))
    return proxy


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-Core makes split sizes numpy only when they come from a GPU; its collectives need the numpy form."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _called_by_megatron() -> bool:
    """Whether the function that asks was itself called from Megatron-Core's code."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


_tensor_cuda, _tensor_type = torch.Tensor.cuda, torch.Tensor.type


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cuda()`: the tensor itself when Megatron-Core asks, what it always was for anybody else."""
    return self if _called_by_megatron() else _tensor_cuda(self, *args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type()`: the CUDA type's name when Megatron-Core asks (its optimizers compare it with that)."""
    answer = _tensor_type(self, *args, **kwargs)
    if args or kwargs or not _called_by_megatron():
        return answer
    return answer.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else answer


_METHODS = {"cuda": _cuda, "type": _type}


# (module, name, replacement, why): what the proxy cannot reach.
ENTRIES: tuple[tuple[str, str, Any, str], ...] = (
    (
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _get_rng_state,
        "reads torch.cuda's C extension directly",
    ),
    (
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _set_rng_state,
        "writes through torch.cuda's C extension",
    ),
    (
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        _sizes_to_host,
        "converts only tensors that are on a GPU",
    ),
    (
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _sizes_to_host,
        "the same function, imported by name",
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "dist_all_gather_func",
        host_collectives.all_gather,
        "gloo goes through sockets even on one host",
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer",
        "dist_reduce_scatter_func",
        host_collectives.reduce_scatter,
        "gloo goes through sockets even on one host",
    ),
    (
        "megatron.core.tensor_parallel.layers",
        "fused_weight_gradient_mlp_cuda",
        types.SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient),
        "an extension for CUDA; see grad_accumulation",
    ),
    (
        "megatron.core.tensor_parallel.layers",
        "_grad_accum_fusion_available",
        True,
        "whether that extension was found",
    ),
    (
        "megatron.core.tensor_parallel.layers",
        "F",
        functional_with_lookup(),
        "the embedding's gradient goes into the buffer too; see grad_accumulation",
    ),
    (
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        None,
        "a name that exists only beside Transformer Engine",
    ),
)

_MISSING = object()
_undo: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def _uncompiled(owner: Any) -> Iterator[tuple[str, Any]]:
    """What Megatron-Core wrapped in torch.compile at import: compiling it on the CPU costs more than it gains."""
    for name, value in list(vars(owner).items()):
        # Functions only: where a package is missing Megatron-Core puts mocks, which have every attribute.
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
            yield name, value._torchdynamo_orig_callable


def install() -> bool:
    """Make Megatron-Core run on the CPU. Does nothing where CUDA is available.

    Called again, it reaches the Megatron-Core modules that were imported since.

    Returns:
        True when the stand-ins are in force.
    """
    if torch.cuda.is_available():
        return False
    for name in _MODULES:
        importlib.import_module(name)
    proxy = _make_proxy()
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core"):
            continue
        if vars(module).get("torch") is torch:
            _replace(module, "torch", proxy)
        owners = [module] + [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
        for owner in owners:
            for attribute, original in _uncompiled(owner):
                _replace(owner, attribute, original)
    for name, method in _METHODS.items():
        if vars(torch.Tensor).get(name) is not method:
            _replace(torch.Tensor, name, method)
    for module_name, name, value, _ in ENTRIES:
        module = importlib.import_module(module_name)
        if vars(module).get(name, _MISSING) is not value:
            _replace(module, name, value)
    return True


def uninstall() -> None:
    """Put back everything that `install` replaced."""
    while _undo:
        owner, name, old = _undo.pop()
        if old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
