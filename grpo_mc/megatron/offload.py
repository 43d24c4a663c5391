"""Adam over states that live in host memory: chunks are copied to the device, updated, and copied back.

Two sets of buffers on the device take turns. While one chunk is updated on the stream that the caller works on, a
second stream brings the next one and a third takes the last one back, so that copies and updates overlap. On a CPU the
same code makes plain copies, for tests: there the states lie in host memory anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_mc.ops import AdamState, adam_step
from grpo_mc.ops.adam import BLOCK

CHUNK = 1 << 22
"""Entries copied at once; a multiple of 128, the block of codes."""


def in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor in host memory, pinned where the device is a GPU, so that copies do not stop the host."""
    host = tensor.detach().cpu().clone()
    return host.pin_memory() if device.type == "cuda" else host


def chunks(entries: int, size: int) -> Iterator[slice]:
    """Consecutive ranges of at most `size` entries."""
    for start in range(0, entries, size):
        yield slice(start, min(start + size, entries))


class ChunkedAdam:
    """The two sets of buffers, and the step through them. The result is adam_step's on the whole, bit for bit."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        """
        Args:
            device: Where updates run.
            chunk: Entries copied at once.

        Raises:
            ValueError: chunk is no multiple of 128 above 0.
        """
        if chunk <= 0 or chunk % BLOCK:
            raise ValueError(f"offload: chunk is {chunk}; it must be a multiple of 128 above 0")
        self.device, self.chunk = device, chunk
        self._slots: list[dict[str, Tensor]] = [{}, {}]
        self._lanes = _Lanes(device)

    def step(
        self, params: Tensor, grads: Tensor, state: AdamState, out: Tensor | None, *, with_params: bool, **numbers: Any
    ) -> None:
        """adam_step, in place; returns when host memory is up to date.

        Args:
            params: float32 [n]: in host memory with_params, else on the device.
            grads, out: On the device; `out` as out_bf16 of adam_step.
            state: In host memory; [n] or [blocks, ...].
            numbers: The other arguments of adam_step, offset among them.
        """
        offset = numbers.pop("offset", 0)
        for turn, part in enumerate(chunks(params.numel(), self.chunk)):
            is_codes = state.exp_avg_scale is not None
            rows = slice(part.start // BLOCK, -(-part.stop // BLOCK)) if is_codes else part
            host = {name: tensor[rows] for name, tensor in state._asdict().items() if tensor is not None}
            if with_params:
                host["params"] = params[part]
            with self._lanes.bring(turn % 2):
                there = {name: self._buffer(turn % 2, name, tensor) for name, tensor in host.items()}
                for name, tensor in host.items():
                    there[name].copy_(tensor, non_blocking=True)
            with self._lanes.update(turn % 2):
                adam_step(
                    there.pop("params", params[part]), grads[part], AdamState(**there),
                    out_bf16=None if out is None else out[part], offset=offset + part.start, **numbers,
                )  # fmt: skip
            with self._lanes.take_back(turn % 2):
                for name, tensor in host.items():
                    tensor.copy_(self._buffer(turn % 2, name, tensor), non_blocking=True)
        self._lanes.finish()

    def _buffer(self, slot: int, name: str, like: Tensor) -> Tensor:
        """A buffer of the slot in the shape of a chunk's tensor."""
        whole = self._slots[slot].get(name)
        if whole is None or whole.numel() < like.numel() or whole.dtype != like.dtype:
            whole = self._slots[slot][name] = torch.empty(like.numel(), dtype=like.dtype, device=self.device)
        return whole[: like.numel()].view(like.shape)


class _Lanes:
    """The order of copies and updates: on a GPU two streams beside the caller's, on a CPU one thing after the other."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._brought, self._updated, self._free = ([torch.cuda.Event() for _ in range(2)] for _ in range(3))
            self._device = device

    def bring(self, slot: int) -> AbstractContextManager[Any]:
        """Around the copies to a slot: when what it held is back in host memory."""
        if not self.is_cuda:
            return nullcontext()
        self._up.wait_event(self._free[slot])
        return _Recorded(self._up, self._brought[slot])

    def update(self, slot: int) -> AbstractContextManager[Any]:
        """Around the update of a slot, on the caller's stream."""
        if not self.is_cuda:
            return nullcontext()
        here = torch.cuda.current_stream(self._device)
        here.wait_event(self._brought[slot])
        return _Recorded(here, self._updated[slot])

    def take_back(self, slot: int) -> AbstractContextManager[Any]:
        """Around the copies from a slot."""
        if not self.is_cuda:
            return nullcontext()
        self._down.wait_event(self._updated[slot])
        return _Recorded(self._down, self._free[slot])

    def finish(self) -> None:
        """Waits for host memory to be up to date."""
        if self.is_cuda:
            self._down.synchronize()


class _Recorded:
    """Work on a stream, and an event behind it."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._on, self._stream, self._event = torch.cuda.stream(stream), stream, event

    def __enter__(self) -> None:
        self._on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._event.record(self._stream)
        self._on.__exit__(*error)
