"""All-gather of weights with few bits on the wire: what a step changed, against the copy that every rank holds.

    difference = own weights - own part of the copy        copy += what the 4-bit codes of all differences stand for

Four bits are far too few for weights, and cost nothing for differences (SDP4Bit, arXiv 2410.15526, table 6). All ranks,
the owner too, add the same codes to the same copy, so the copies stay equal to the last bit. The next difference is
taken against the copy as it came out: what rounding left over is in it, and nothing needs to be kept. Now and then the
weights themselves are gathered (a refresh).

The weights that the optimizer updates must lie apart from the copy, or what rounding left over would be lost: the main
weights of a bf16 model do; those of Megatron-Core's fp32 models are the copy itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mc.megatron.compressed_collectives import part_bounds
from grpo_mc.megatron.wire_format import DIFFERENCES, WireFormat


class CompressedAllGather:
    """Keeps the ranks' copies of weights near their owners' parts; all ranks of the group call together."""

    def __init__(self, numel: int, group: Any, *, wire: WireFormat = DIFFERENCES, refresh_every: int = 500) -> None:
        """
        Args:
            numel: Entries of the whole; rank r owns entries bounds[r].
            wire: How differences travel.
            refresh_every: Every so many calls, the first included, the weights themselves travel.
        """
        if refresh_every < 1:
            raise ValueError(f"all_gather: refresh_every is {refresh_every}; it must be at least 1")
        self.numel, self.group, self.wire, self.refresh_every = numel, group, wire, refresh_every
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.bounds = part_bounds(numel, self.ranks)
        self._size = -(-numel // self.ranks)
        self._calls = 0

    def all_gather(self, part: Tensor, copy: Tensor) -> Tensor:
        """Brings every rank's copy up to date.

        Args:
            part: This rank's part of the weights, in any float type; a NaN or an infinity makes its block of the copy
                NaN on every rank, and the next call a refresh.
            copy: [numel] contiguous, float32, bfloat16 or float16, the same on every rank (before a refresh that does
                not matter): replaced in place.

        Returns:
            copy.

        Raises:
            ValueError: part or copy of another size, or in memory that they share.
            RuntimeError: A rank did not come within the group's timeout.
        """
        self._check(part, copy)
        with torch.no_grad():
            is_refresh = self._calls % self.refresh_every == 0
            self._calls += 1
            if is_refresh:
                self._refresh(part, copy)
            else:
                self._add_differences(part, copy)
        return copy

    def reset(self) -> None:
        """Makes the next call a refresh, on every rank that calls this: all must."""
        self._calls = 0

    def state_dict(self) -> dict[str, int]:
        """Where in the cycle of refreshes the next call is; the copy is the caller's."""
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets what state_dict returned; the copy must be what it was then."""
        self._calls = state["calls"]

    def _check(self, part: Tensor, copy: Tensor) -> None:
        first, last = self.bounds[self.rank]
        if copy.shape != (self.numel,) or part.numel() != last - first:
            raise ValueError(
                f"all_gather: part has {part.numel()} entries and copy {list(copy.shape)};"
                f" rank {self.rank} of {self.ranks} needs {last - first} and [{self.numel}]"
            )
        if part.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() and part.numel():
            raise ValueError("all_gather: part shares memory with copy; keep the weights that are updated apart")

    def _refresh(self, part: Tensor, copy: Tensor) -> None:
        mine = copy.new_zeros(self._size)
        mine[: part.numel()] = part.detach().flatten()
        everything = copy.new_empty(self.ranks * self._size)
        dist.all_gather_into_tensor(everything, mine, group=self.group)
        copy.copy_(everything[: self.numel])

    def _add_differences(self, part: Tensor, copy: Tensor) -> None:
        first, last = self.bounds[self.rank]
        difference = torch.zeros(self._size, device=copy.device)
        torch.sub(part.detach().flatten().float(), copy[first:last].float(), out=difference[: last - first])
        message = torch.empty(self.wire.num_bytes(self._size), dtype=torch.uint8, device=copy.device)
        self.wire.encode(difference, None, message)
        everything = message.new_empty(self.ranks * len(message))
        dist.all_gather_into_tensor(everything, message, group=self.group)
        for rank, (first, last) in enumerate(self.bounds):
            codes, scale = self.wire.split(everything[rank * len(message) : (rank + 1) * len(message)])
            if not scale.isfinite().all():  # every rank sees the same messages
                self._calls = 0
            change = torch.zeros(self._size, device=copy.device)
            self.wire.add(codes, scale, change)
            copy[first:last] += change[: last - first]
