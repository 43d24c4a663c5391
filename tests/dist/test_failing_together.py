"""A failure of all ranks saves what is finished; a failure of one rank alone ends it within a bound."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import free_port, run_distributed
from helpers.runs import run, tiny_config

pytestmark = pytest.mark.dist


def in_two_processes(model: Path, folder: Path, ports: list[int]) -> dict[str, Any]:
    """A run that fails on every rank in step 2, with dp and with pp; then rank 1 fails alone."""
    import torch.distributed as dist

    from grpo_mc.megatron.mesh import build_mesh, destroy_mesh
    from grpo_mc.pipeline.exchange import all_ranks_failed

    def on_stage(name: str, steps_done: int) -> None:
        if (name, steps_done) == ("rewards", 1):
            raise ValueError("all together")

    found: dict[str, Any] = {}
    for layout in ("dp", "pp"):
        os.environ["MASTER_PORT"] = str(ports.pop())
        try:
            run(tiny_config(model, folder / layout, f"parallel.{layout}=2"), on_stage=on_stage)
        except ValueError as error:
            found[layout] = str(error)
    os.environ["MASTER_PORT"] = str(ports.pop())
    mesh = build_mesh(dp=2)
    start = time.monotonic()
    if mesh.rank == 1:
        found["alone"] = all_ranks_failed(mesh, timeout_s=2.0)
        found["seconds"] = time.monotonic() - start
    dist.barrier()  # where rank 0 was all the time; rank 1 did not disturb it
    destroy_mesh()
    return found


def test_ranks_that_fail_together_save_and_one_that_fails_alone_does_not_wait_for_long(
    tiny_model: Any, tmp_path: Path
) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    ports = [free_port() for _ in range(3)]
    ranks = run_distributed(in_two_processes, 2, model, tmp_path, ports, init=False, timeout_s=240)
    for layout in ("dp", "pp"):
        assert [found[layout] for found in ranks] == ["all together"] * 2
        assert (tmp_path / layout / "checkpoints/step_1/COMPLETE").is_file()
    assert ranks[1]["alone"] is False and 1.0 < ranks[1]["seconds"] < 60.0
