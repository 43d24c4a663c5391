"""Dispatch and combine of grpo_mc.megatron.moe_dispatch against the plain all-to-all: bytes on the wire and seconds.

torchrun --nproc-per-node 2 benchmarks/moe_dispatch.py [--json]

The plain all-to-all sends a row for each expert of a token, its weight in a message of its own, and gets a row for each
back; that is what Megatron-Core's all-to-all dispatcher does. Ours sends a row for each rank, whatever the number of
experts there, and gets one back. Both run forward and backward with experts that return their rows. Bytes are those
that one rank sends to the others forward (dispatch and combine) and backward; seconds are medians over rounds in which
the ways take turns, the slowest rank counting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from grpo_mc.megatron.moe_dispatch import combine, dispatch

PLAIN = "plain all-to-all"
WAYS = {PLAIN: None, "dedupe": None, "dedupe, fp8": "fp8"}
"""The payload of each way; None = the dtype of the tokens."""


@contextmanager
def bytes_sent(group: Any) -> Iterator[list[int]]:
    """Counts the bytes that leave this rank through all_to_all_single for the others while the block runs."""
    original, found, rank = dist.all_to_all_single, [0], dist.get_rank(group)

    def counting(
        output: Tensor, message: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
    ) -> Any:
        if message.numel():
            world = dist.get_world_size(group)
            splits = input_split_sizes or [len(message) // world] * world
            found[0] += (len(message) - splits[rank]) * message[0].numel() * message.element_size()
        return original(output, message, output_split_sizes, input_split_sizes, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        yield found


def plain(x: Tensor, ids: Tensor, probs: Tensor, group: Any, num_experts: int) -> Tensor:
    """A row for each choice, in torch alone."""
    world = dist.get_world_size(group)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    others = torch.empty_like(counts)
    dist.all_to_all_single(others, counts, group=group)
    send, receive = (c.view(world, -1).sum(1).tolist() for c in (counts, others))
    rows, weights = x[order // ids.shape[1]], probs.flatten()[order]
    got = all_to_all_single(rows.new_empty(sum(receive), x.shape[1]), rows, receive, send, group=group)
    got_weights = all_to_all_single(weights.new_empty(sum(receive)), weights, receive, send, group=group)
    by_expert = torch.arange(num_experts // world).repeat(world).repeat_interleave(others).argsort(stable=True)
    expert_out = got[by_expert] * got_weights[by_expert, None].to(x.dtype)
    back = torch.empty_like(expert_out).index_copy(0, by_expert, expert_out)
    returned = all_to_all_single(torch.empty_like(rows), back, send, receive, group=group)
    return torch.zeros_like(x).index_add(0, order // ids.shape[1], returned)


def ours(x: Tensor, ids: Tensor, probs: Tensor, group: Any, num_experts: int, payload: str | None) -> Tensor:
    dispatched = dispatch(x, ids, probs, group, num_experts, payload=payload)
    return combine(dispatched.rows, dispatched.handle)


def measured(call: Callable[[], Tensor], group: Any) -> tuple[Tensor, float]:
    """The result, and the seconds of the slowest rank, forward and backward."""
    dist.barrier(group)
    start = time.perf_counter()
    out = call()
    out.sum().backward()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return out.detach(), float(seconds)


def compare_ways(options: argparse.Namespace, group: Any) -> list[dict[str, Any]]:
    """One row of figures a way."""
    draw = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(options.tokens, options.hidden, generator=draw).to(torch.bfloat16).requires_grad_()
    ids = torch.rand(options.tokens, options.experts, generator=draw).argsort(1)[:, : options.top_k].contiguous()
    probs = torch.rand(options.tokens, options.top_k, generator=draw).softmax(1).requires_grad_()
    calls = {
        name: (lambda: plain(x, ids, probs, group, options.experts))
        if name == PLAIN
        else (lambda payload=payload: ours(x, ids, probs, group, options.experts, payload))
        for name, payload in WAYS.items()
    }
    sent, outs, seconds = {}, {}, {name: [] for name in WAYS}
    for name, call in calls.items():
        with bytes_sent(group) as counted:
            outs[name], _ = measured(call, group)
        sent[name] = counted[0]
    for number in range(options.rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            seconds[name].append(measured(calls[name], group)[1])
    rows = []
    for name in WAYS:
        taken = statistics.median(seconds[name])
        rows.append({
            "op": "moe_dispatch", "way": name, "ranks": dist.get_world_size(group), "tokens": options.tokens,
            "experts": options.experts, "top_k": options.top_k, "hidden": options.hidden, "dtype": "bfloat16",
            "seconds": taken, "ratio": statistics.median(seconds[PLAIN]) / taken, "bytes_sent": sent[name],
            "byte_factor": sent[name] / sent[PLAIN],
            "difference": float((outs[name] - outs[PLAIN]).float().norm() / outs[PLAIN].float().norm()),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank (1024)")
    parser.add_argument("--hidden", type=int, default=2048, help="columns (2048)")
    parser.add_argument("--experts", type=int, default=64, help="over all ranks (64)")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each way (9)")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rows = compare_ways(options, dist.group.WORLD)
    if dist.get_rank() == 0:
        for row in rows:
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{row['way']:18} {row['seconds'] * 1e3:8.1f} ms  {row['ratio']:5.2f} x  "
                    f"{row['bytes_sent'] / 1e6:8.2f} MB sent  {row['byte_factor']:.3f} of plain  "
                    f"differs by {row['difference']:.1e}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
