"""Runs the operators' own tests on a GPU: calls with CPU tensors are carried to the device, and results back.

The tests of tests/ops make CPU tensors. With GRPO_MC_TEST_CUDA set, tests/conftest.py calls `route_to_cuda`, which
takes the place of every CPU implementation: arguments are copied to the device, the operator runs there, and what it
returns or wrote in place comes back. What a test asserts of numbers, shapes and errors then holds for CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Registrations live as long as their library object."""


def route_to_cuda(device: str = "cuda") -> list[str]:
    """Every operator that has a CUDA implementation now runs there; returns their names."""
    library = torch.library.Library("grpo_mc", "IMPL")
    names = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("grpo_mc::")]
    routed = [
        name
        for name in sorted(set(names))
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    ]
    for name in routed:
        operator = getattr(torch.ops.grpo_mc, name.split("::")[1]).default
        library.impl(name.split("::")[1], carried(operator, operator._schema, device), "CPU", allow_override=True)
    _LIBRARIES.append(library)
    return routed


def carried(operator: Callable[..., Any], schema: Any, device: str) -> Callable[..., Any]:
    """A function of CPU tensors that runs `operator` on the device; arguments the schema says are written come back."""
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}

    def run(*args: Any, **options: Any) -> Any:
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | options
        there = {name: carry(value, device) for name, value in named.items()}
        positional = [there.pop(argument.name) for argument in schema.arguments[: len(args)]]
        result = operator(*positional, **there)
        there |= dict(zip((argument.name for argument in schema.arguments), positional, strict=False))
        for name in written:
            for original, copy in zip(tensors_of(named.get(name)), tensors_of(there.get(name)), strict=True):
                original.copy_(copy)
        back = carry(result, "cpu")
        return tuple(back) if isinstance(result, tuple) else back

    return run


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of one argument: none, one, or a list."""
    return [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, torch.Tensor)]


def carry(value: Any, device: str) -> Any:
    """A tensor's copy on the device with the same strides where its entries lie apart, or a list of such copies;
    anything else as it is."""
    if isinstance(value, list | tuple) and tensors_of(value):
        return [carry(x, device) for x in value]
    if not isinstance(value, torch.Tensor):
        return value
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return (
        value.to(device) if torch._debug_has_internal_overlap(there) == 1 else there.copy_(value)
    )  # 1: surely overlaps
