"""Faults put into the ranks of the parity check, one after another; prints what the check makes of each.

A program of its own: the check forks its ranks from a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from grpo_mc.megatron import parity, parity_rank
from grpo_mc.megatron.hf_config import model_shape
from grpo_mc.megatron.parity_layout import REFERENCE, TINY_MIXTRAL, fit, parse_layout

FOLDER = Path(tempfile.mkdtemp())


def run(name: str, timeout_s: float = 60.0) -> Any:
    return parity.measure(fit(parse_layout(name), model_shape(TINY_MIXTRAL)), None, FOLDER, timeout_s)


def report(case: str, layout: str, measured: Any, reference: Any) -> None:
    compared = parity.compare(parse_layout(layout), measured, reference, 0.0)
    verdict = "passes" if compared.passes(1e-5) else "fails"
    print(f"{case}: {verdict} at '{compared.worst_gradient}' by {compared.gradient_difference:.1e}")


@contextlib.contextmanager
def on_rank(rank: int, module: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """In ranks forked inside, `module.name` is replaced on one rank."""
    original = getattr(module, name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (replacement if os.environ["RANK"] == str(rank) else original)(*args, **kwargs)

    with mock.patch.object(module, name, choose):
        yield


def give_up(*args: Any) -> None:
    raise RuntimeError("rank one gives up")


def sleep_for_ever(*args: Any) -> None:
    time.sleep(600)


def main() -> None:
    reference = run(REFERENCE)
    assert not isinstance(reference, str), reference

    from grpo_mc.megatron import train_step

    with mock.patch.object(train_step, "finalize_model_grads", lambda *args, **kwargs: None):
        report("dropped_reduction", "dp2", run("dp2"), reference)

    whole = parity_rank.gather_shards

    def disturb(ddp: Any) -> None:
        whole(ddp)
        for parameter in ddp.module.decoder.layers[1].pre_mlp_layernorm.parameters():
            parameter.main_grad.mul_(1.01)

    with on_rank(1, parity_rank, "gather_shards", disturb):
        report("unequal_copies", "tp2", run("tp2"), reference)

    losses, gradients = reference.losses, reference.gradients
    without = {name: tensor for name, tensor in gradients.items() if name != "sequence_mean: lm_head.weight"}
    poisoned = {**without, "sequence_mean: lm_head.weight": torch.full((131, 64), torch.nan)}
    report("missing_gradient", "mb1", parity_rank.Measurement(losses, without), reference)
    report("nan_gradient", "mb1", parity_rank.Measurement(losses, poisoned), reference)

    with on_rank(1, parity_rank, "measure_layout", give_up):
        print(f"failure: {run('dp2')}")
    start = time.monotonic()
    with on_rank(0, parity_rank, "measure_layout", sleep_for_ever):
        print(f"hang: {run('dp2', timeout_s=3.0)}")
    print(f"hang_seconds: {time.monotonic() - start:.1f}")
    print(f"children: {len(psutil.Process().children(recursive=True))}")


if __name__ == "__main__":
    main()
