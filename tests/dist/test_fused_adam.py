"""FusedAdam inside Megatron-Core's optimizer: as AdamW steps, its copies, its checkpoints, replicas that stay equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.processes import run_distributed
from helpers.tiny_models import build_tiny_model

pytestmark = pytest.mark.dist

STEPS = 3
TP = {"one": 1, "dp2": 1, "tp2": 2}
CASES = {
    1: [("one", "fp32", "fp32"), ("one", "fp32", "int4"), ("one", "bf16", "int8")],
    2: [("dp2", "fp32", "int4"), ("dp2", "bf16", "fp32"), ("tp2", "fp32", "int4")],
}
"""(layout, dtype, states) by the number of processes."""
OFFLOADED = [("bf16", "fp32"), ("bf16", "int4"), ("fp32", "int8")]
"""(dtype, states), on two processes."""
MIXTRAL = ("dp2", "fp32", "int4")


@dataclass
class Found:
    """What one rank saw."""

    same_as_adamw: float
    """Relative difference of the main weights from AdamW's after the same steps, over how far AdamW moved."""
    copies_follow: bool
    """The model's weights are the main weights, rounded."""
    resumed: dict[str, bool]
    norms: list[torch.Tensor]
    """Weights of which each tensor-parallel rank holds a copy."""


def _main_weights(policy: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for group in policy.optimizer.param_groups for p in group["params"]]


def _states(policy: Any) -> list[torch.Tensor]:
    from grpo_mc.megatron.checkpoint_shards import distributed_optimizers

    adams = [outer.optimizer for outer in distributed_optimizers(policy.optimizer)]
    kept = [tensor for adam in adams for state in adam.state.values() for tensor in state.values()]
    steps = [torch.tensor(group["step"]) for adam in adams for group in adam.param_groups]
    return [tensor.clone() for tensor in kept] + steps


def _same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def _run(folder: Path, model: str, layout: str, dtype: str, states: str) -> Found:
    from megatron.core import parallel_state

    from grpo_mc.megatron.checkpoint import load_checkpoint, save_checkpoint
    from grpo_mc.megatron.mesh import build_mesh
    from helpers.tiny_policy import build_policy, train_step

    parallel_state.destroy_model_parallel()
    mesh = build_mesh(tp=TP[layout], pp=1, ep=1, timeout_s=60)
    policies = [build_policy(mesh, folder / model, dtype, optimizer=options) for options in ({}, _options(states))]
    started = _main_weights(policies[0])
    for policy in policies:
        for step in range(STEPS):
            train_step(policy, mesh, step)
    theirs, ours = map(_main_weights, policies)
    pairs = zip(theirs, ours, started, strict=True)
    apart = [float((a - b).norm() / (a - c).norm().clamp_min(1e-12)) for a, b, c in pairs if a.numel()]

    fused, path = policies[1], folder / f"{model}-{layout}-{dtype}-{states}"
    saved = _states(fused) + _main_weights(fused)
    save_checkpoint(fused, mesh, path / "step_3", {})
    outcome = train_step(fused, mesh, STEPS)
    resumed = build_policy(mesh, folder / model, dtype, optimizer=_options(states))
    load_checkpoint(resumed, mesh, path / "step_3")
    check = {"state": _same_bits(saved, _states(resumed) + _main_weights(resumed))}
    check["next step"] = train_step(resumed, mesh, STEPS) == outcome
    check["state after it"] = _same_bits(_states(fused), _states(resumed))
    check["weights after it"] = _same_bits(*([p.detach() for p in x.model.parameters()] for x in (fused, resumed)))
    whole = {name: p.detach().clone() for name, p in fused.model.named_parameters()}
    return Found(max(apart), _follow(fused), check, [p for name, p in whole.items() if "norm" in name])


def _offloaded(folder: Path, dtype: str, states: str) -> dict[str, bool]:
    """Whether steps through chunks of states in host memory, and a checkpoint of them, are those without."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.checkpoint import load_checkpoint, save_checkpoint
    from grpo_mc.megatron.checkpoint_shards import distributed_optimizers
    from grpo_mc.megatron.fused_adam import use_fused_adam
    from grpo_mc.megatron.mesh import build_mesh
    from grpo_mc.megatron.offload import ChunkedAdam
    from helpers.tiny_policy import build_policy, train_step

    parallel_state.destroy_model_parallel()
    mesh = build_mesh(tp=1, pp=1, ep=1, timeout_s=60)
    plain, chunked, resumed = (build_policy(mesh, folder / "llama", dtype, optimizer=_options(states)) for _ in "123")
    for policy in (chunked, resumed):  # the configuration refuses this on a CPU
        for outer in distributed_optimizers(policy.optimizer):
            adam = outer.optimizer
            chunks = ChunkedAdam(torch.device("cpu"), 256)
            use_fused_adam(outer, bits=adam.bits, seed=adam.seed, chunked=chunks)
    outcomes = [[train_step(policy, mesh, step) for step in range(STEPS)] for policy in (plain, chunked)]
    path = folder / f"offloaded-{dtype}-{states}" / "step_3"
    save_checkpoint(chunked, mesh, path, {})
    load_checkpoint(resumed, mesh, path)
    outcomes += [[train_step(policy, mesh, STEPS)] for policy in (plain, chunked, resumed)]
    weights = [[p.detach() for p in policy.model.parameters()] for policy in (plain, chunked, resumed)]
    held = [p.untyped_storage().nbytes() for group in chunked.optimizer.param_groups for p in group["params"]]
    return {
        "losses and norms": outcomes[0] == outcomes[1],
        "next step": outcomes[2] == outcomes[3] == outcomes[4],
        "weights": _same_bits(weights[0], weights[1]) and _same_bits(weights[0], weights[2]),
        "main weights are gone": dtype == "fp32" or set(held) == {4},
    }


def _options(states: str) -> dict[str, Any]:
    return {"kind": "fused_adamw", "states": states}


def _follow(policy: Any) -> bool:
    from grpo_mc.megatron.checkpoint_shards import distributed_optimizers
    from grpo_mc.megatron.fused_adam import _in_buffer

    pairs = []
    for outer in distributed_optimizers(policy.optimizer):
        for mains, models in (
            (outer.shard_fp32_from_float16_groups, outer.model_float16_groups),
            (outer.shard_fp32_groups, outer.model_fp32_groups),
        ):
            pairs += [pair for some in zip(mains, models, strict=True) for pair in zip(*some, strict=True)]
        assert all(torch.equal(main.to(model.dtype), _in_buffer(outer, model)) for main, model in pairs)
    return len(pairs) > 3


def _refusals(folder: Path) -> list[str]:
    """What loading says of other states and of another layout."""
    from megatron.core import parallel_state

    from grpo_mc.megatron.checkpoint import load_checkpoint
    from grpo_mc.megatron.mesh import build_mesh
    from helpers.tiny_policy import build_policy

    messages = []
    for saved, tp, options in (
        ("dp2-fp32-int4", 1, {}),
        ("dp2-fp32-int4", 1, _options("int8")),
        ("dp2-fp32-int4", 2, _options("int4")),
    ):
        parallel_state.destroy_model_parallel()
        mesh = build_mesh(tp=tp, pp=1, ep=1, timeout_s=60)
        policy = build_policy(mesh, folder / "llama", optimizer=options)
        with pytest.raises(ValueError) as caught:
            load_checkpoint(policy, mesh, folder / f"llama-{saved}" / "step_3")
        messages.append(str(caught.value))
    parallel_state.destroy_model_parallel()
    mesh = build_mesh(tp=1, pp=2, ep=1, timeout_s=60)
    with pytest.raises(ValueError) as caught:
        build_policy(mesh, folder / "llama", optimizer=_options("int4"))
    messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        build_policy(mesh, folder / "llama", optimizer={"kind": "fused_adamw", "offload": True})
    return [*messages, str(caught.value)]


def _work(folder: Path, cases: list[tuple[str, ...]], with_more: bool) -> dict[str, Any]:
    from grpo_mc.megatron.mesh import init_distributed

    init_distributed(60)
    found: dict[str, Any] = {"-".join(case): _run(folder, "llama", *case) for case in cases}
    if with_more:
        found["mixtral"] = _run(folder, "mixtral", *MIXTRAL)
        found["refusals"] = _refusals(folder)
        found |= {f"offloaded-{'-'.join(case)}": _offloaded(folder, *case) for case in OFFLOADED}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fused-adam")
    build_tiny_model(folder / "llama", "llama")
    build_tiny_model(folder / "mixtral", "mixtral", num_hidden_layers=2)
    return [
        found
        for nproc, cases in CASES.items()
        for found in run_distributed(_work, nproc, folder, cases, nproc == 2, init=False, timeout_s=300)
    ]


EVERY = ["-".join(case) for cases in CASES.values() for case in cases] + ["mixtral"]


@pytest.mark.parametrize("case", EVERY)
def test_steps_and_resumes(results: list[dict[str, Any]], case: str) -> None:
    ranks: list[Found] = [rank[case] for rank in results if case in rank]
    assert len(ranks) in (1, 2)
    for found in ranks:
        assert found.same_as_adamw < (1e-3 if case.endswith("fp32") else 0.5)
        assert found.copies_follow
        assert found.resumed == {name: True for name in found.resumed}


def test_replicas_stay_equal(results: list[dict[str, Any]]) -> None:
    """Tensor-parallel ranks round their copies of a norm's states by the same random numbers."""
    one, two = (rank["tp2-fp32-int4"].norms for rank in results if "tp2-fp32-int4" in rank)
    assert _same_bits(one, two)


def test_what_does_not_fit_is_refused(results: list[dict[str, Any]]) -> None:
    for messages in (rank["refusals"] for rank in results if "refusals" in rank):
        assert "saved with optimizer.states = 'int4' but the configuration has 'fp32'" in messages[0]
        assert "but the configuration has 'int8'; set optimizer.kind: fused_adamw" in messages[1]
        assert "moments in int4 load on the same layout only" in messages[2]
        assert "would round its states apart; set states: fp32 or parallel.pp: 1" in messages[3]
        assert "offload is true but the policy is on the CPU" in messages[4]


@pytest.mark.parametrize("case", ["-".join(case) for case in OFFLOADED])
def test_offloaded_is_bit_identical(results: list[dict[str, Any]], case: str) -> None:
    ranks = [rank[f"offloaded-{case}"] for rank in results if f"offloaded-{case}" in rank]
    assert len(ranks) == 2
    for found in ranks:
        assert found == {name: True for name in found}
